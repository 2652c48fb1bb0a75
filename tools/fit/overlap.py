#!/usr/bin/env python3
"""Fits the eight interference constants a GPU of engine/cost/interference to measured work that runs together, alone
and in all combinations, and prints engine/cost/interference_fitted.inc.

    tools/fit/overlap.py MEASURED                 # the folder with overlap.csv; prints the table
    tools/fit/overlap.py MEASURED --splits 3      # fitted on a random half, errors on the other half, three times

What each part takes alone is interpolated from the rows that have one part; the constants are of the GPU."""
import argparse
import csv
import pathlib
import sys

import numpy as np
from simplex import minimize

PARTS = ("compute_n", "g2g_mb", "h2d_mb", "d2h_mb")
HOST_LINKED = {"l4"}  # whose devices reach each other through the host only


def line(x, y, spread):
    """a + b x by least squares, a and b from 0; what was measured is known to 2 % and its own spread."""
    sigma = np.hypot(0.02 * y, spread)
    if len(set(x)) > 1:
        a, b = np.linalg.lstsq(np.stack([1 / sigma, x / sigma], 1), y / sigma, rcond=None)[0]
        if a >= 0 and b >= 0:
            return a, b
    return 0.0, np.sum(x * y / sigma**2) / np.sum((x / sigma) ** 2)


def alone(groups, amounts, seconds, spreads, given):
    """Seconds that each part of each row takes alone; NaN where no row says."""
    single = given & ((amounts > 0).sum(1) == 1)
    gpus = np.array([g[0] for g in groups])
    worlds = np.array(["/".join(g[:2]) for g in groups])
    names = np.array(["/".join(g) for g in groups])
    # What a device computes does not depend on where the others are; copies do little, and fall back on what is wider.
    keys = ((gpus,), (names,), (names, worlds, gpus), (names, worlds, gpus))
    out = np.where(amounts > 0, np.nan, 0)
    for part in range(4):
        for key in keys[part]:
            for each in np.unique(key):
                known = single & (key == each) & (amounts[:, part] > 0)
                mine = (key == each) & (amounts[:, part] > 0) & np.isnan(out[:, part])
                if known.any() and mine.any():
                    a, b = line(amounts[known, part], seconds[known], spreads[known])
                    out[mine, part] = a + b * amounts[mine, part]
    return out


def together(times, slowed):
    """slowed[r, i, j]: by how much a second of i grows while j runs."""
    left, total = times.copy(), np.zeros(len(times))
    for _ in range(4):
        on = left > 0
        rate = np.where(on, 1 / (1 + np.einsum("rij,rj->ri", slowed, on.astype(float))), 0)
        sum_ = rate.sum(1, keepdims=True)
        rate = np.where(on, rate / np.minimum(np.maximum(sum_, 1e-300), 1), 1)  # one after another is never slower
        need = np.where(on, left / rate, np.inf)
        first = need.min(1, keepdims=True)
        step = np.where(np.isfinite(first), first, 0)
        total += step[:, 0]
        left = np.where(on & (need > first), left - step * rate, 0)
    return total


def matrix(constants, through_host):
    """Order of parts: compute, link, to the device, to the host."""
    by_link, by_far_link, by_copy, link_by_compute, link_by_copy, copy_by_link, upload, download = constants
    out = np.zeros((len(through_host), 4, 4))
    out[:, 0, 1] = np.where(through_host > 0, by_far_link, by_link)
    out[:, 0, 2] = out[:, 0, 3] = by_copy
    out[:, 1, 0] = link_by_compute
    out[:, 1, 2] = out[:, 1, 3] = link_by_copy * through_host
    out[:, 2, 1] = out[:, 3, 1] = copy_by_link * through_host
    out[:, 2, 3], out[:, 3, 2] = upload, download
    return out


def read(folder):
    groups, amounts, seconds, spreads = [], [], [], []
    with open(pathlib.Path(folder) / "overlap.csv", newline="") as file:
        for row in csv.DictReader(file):
            groups.append((row["gpu"], row["world"], row["intra"], row["inter"]))
            amounts.append([float(row[c]) for c in PARTS])
            seconds.append(float(row["latency_ms"]) * 1e-3)
            spreads.append(float(row["std_ms"]) * 1e-3)
    return groups, np.array(amounts), np.array(seconds), np.array(spreads)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", help="folder with overlap.csv")
    parser.add_argument("--splits", type=int, default=0, help="fit on random halves, report on the others")
    options = parser.parse_args()
    groups, amounts, seconds, spreads = read(options.measured)
    gpus = np.array([g[0] for g in groups])
    through_host = np.array([float(int(g[3]) > 1 or g[0] in HOST_LINKED) for g in groups])
    combined = (amounts > 0).sum(1) > 1
    if not options.splits:
        print("// Written by tools/fit/overlap.py. Name, then Interference's constants in their order.")
    totals = []
    for number in range(max(1, options.splits)):
        random = np.random.default_rng(number)
        given = np.ones(len(seconds), bool) if not options.splits else random.random(len(seconds)) < 0.5
        held = given if not options.splits else ~given
        # Held-out rows are predicted from the parts alone among themselves, as a file of its own would be.
        times_given, times_held = (alone(groups, amounts, seconds, spreads, rows) for rows in (given, held))
        for gpu in sorted(set(gpus)):
            mine = given & combined & (gpus == gpu) & ~np.isnan(times_given).any(1)

            def error(constants, rows, times):
                slowed = matrix(constants, through_host[rows])
                return np.abs(together(times[rows], slowed) - seconds[rows]) / seconds[rows]

            def loss(logs):
                return np.mean(error(np.exp(np.clip(logs, -7, 5)), mine, times_given))

            starts = (np.log([0.3, 0.2, 0.1, 0.2, 2, 0.2, 0.5, 0.3]), np.log([0.1, 0.1, 20, 0.1, 2, 0.2, 1.5, 0.4]))
            fits = [minimize(loss, start, step=0.7, evaluations=300, restarts=2) for start in starts]
            constants = np.exp(np.clip(min(fits, key=loss), -7, 5))
            rows = held & combined & (gpus == gpu) & ~np.isnan(times_held).any(1)
            each = error(constants, rows, times_held)
            longest = np.mean(1 - times_held[rows].max(1) / seconds[rows])
            totals.append(each)
            if not options.splits:
                print("{{\"{}\", {{{}}}}},".format(gpu, ", ".join(f"{c:.3g}" for c in constants)))
            told = f"{100 * each.mean():5.2f} % of {rows.sum()} rows; the longest part is {100 * longest:.1f} % short"
            print(f"{gpu:16} {told}", file=sys.stderr)
    print(f"all {100 * np.concatenate(totals).mean():.2f} %", file=sys.stderr)


if __name__ == "__main__":
    main()
