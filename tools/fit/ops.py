#!/usr/bin/env python3
"""Fits the five constants a device of engine/cost/curve to measured op times and prints engine/cost/curve_fitted.inc.

    tools/fit/ops.py MEASURED                 # the folder with ops.csv; prints the table
    tools/fit/ops.py MEASURED --splits 3      # fitted on a random half, errors on the other half, three times

The equations are those of engine/cost/curve.cc; what is not fitted is a fact of a data sheet or of the kernels."""
import argparse
import csv
import pathlib
import sys

import numpy as np
from simplex import minimize

# Facts: flops/s in float32, bytes/s, processors, bytes of the second-level cache, threads of a processor, and whether
# short runs are faster than long ones because the clock cannot be held at the power of the board.
SHEETS = {
    "NVIDIA A100 80GB PCIe": (19.492e12, 1935e9, 108, 40 << 20, 2048, False),
    "NVIDIA A100-PCIE-40GB": (19.492e12, 1555e9, 108, 40 << 20, 2048, False),
    "NVIDIA H100 80GB HBM3": (66.908e12, 3430e9, 132, 50 << 20, 2048, False),
    "NVIDIA L4": (31.334e12, 300e9, 60, 48 << 20, 1536, True),
    "Tesla P100-PCIE-16GB": (9.519e12, 732e9, 56, 4 << 20, 2048, False),
    "Tesla P4": (5.699e12, 192e9, 40, 2 << 20, 2048, False),
    "Tesla T4": (8.141e12, 320e9, 40, 4 << 20, 1024, True),
    "Tesla V100-PCIE-32GB": (14.029e12, 900e9, 80, 6 << 20, 2048, False),
}
OPS = ("linear", "bmm", "softmax", "ln")
WEIGHTS = {"linear": 1.0, "bmm": 1.0, "softmax": 0.3, "ln": 0.3}
TILES = ((128, 128), (128, 64), (64, 128), (64, 64))
SPLITS = (1, 2, 4, 8)
STEP = 8               # of the inner dimension
SHARPNESS = 4          # of the soft maximum
ROW_BYTES = 32768      # from which rows strain the translation of addresses
HEAT_SECONDS = 0.02    # in which the clock has fallen half its way
USUAL_MEMORY_SHARE = 0.8


def product(shape, sheet, constants, bytes_an_element=4):
    peak, bandwidth, processors, _, _, hot = sheet
    compute, memory, start, tile, strain = constants
    batch, m, n, k = shape.T
    rate = peak * compute / processors
    arithmetic = np.full(len(shape), np.inf)
    for tm, tn in TILES:
        tiles = batch * np.ceil(m / tm) * np.ceil(n / tn)
        step = 2 * tm * tn * (tm * tn / 16384) ** -tile / rate
        for split in SPLITS:
            inner = (np.ceil(k / split / STEP) + 1) * STEP
            seconds = np.ceil(tiles * split / processors) * inner * step
            if split > 1:
                seconds = seconds + 2 * split * batch * m * n * bytes_an_element / (bandwidth * memory)
            arithmetic = np.minimum(arithmetic, seconds)
    if not hot:
        arithmetic = arithmetic * (1 + strain * np.maximum(0, 1 - ROW_BYTES / (k * bytes_an_element)))
    moved = bytes_an_element * batch * (m * k + n * k + m * n) / (bandwidth * memory)
    seconds = (arithmetic**SHARPNESS + moved**SHARPNESS) ** (1 / SHARPNESS)
    if hot:
        seconds = seconds * (1 + strain * seconds / (seconds + HEAT_SECONDS))
    return start + seconds


def passes(op, shape, sheet, constants, bytes_an_element=4):
    _, bandwidth, processors, cache, threads, _ = sheet
    _, memory, start, _, _ = constants
    rows, columns = shape.T
    of_row = 128 if op == "ln" else 1024
    live = np.minimum(rows, processors * (threads // of_row)) * columns * bytes_an_element
    missed = np.clip((live / cache - 0.25) / 0.35, 0, 1)
    if op == "ln":
        again = missed
    else:
        again = 2 * np.where(columns <= 4096, 0.25, np.maximum(0.25, missed))
    return start + rows * columns * bytes_an_element * (2 + again) / (bandwidth * memory)


def predict(op, shape, sheet, constants):
    return product(shape, sheet, constants) if op in ("linear", "bmm") else passes(op, shape, sheet, constants)


def read(folder):
    data = {}
    with open(pathlib.Path(folder) / "ops.csv", newline="") as file:
        for row in csv.DictReader(file):
            op = row["op"]
            # The inner dimension stands in column N.
            shape = [row[c] for c in ("B", "M", "K", "N")] if op in ("linear", "bmm") else [row["B"], row["H"]]
            data.setdefault((row["gpu"], op), []).append([float(x) for x in shape] + [float(row["ms"]) * 1e-3])
    return {key: np.array(rows) for key, rows in data.items()}


def error(op, rows, sheet, constants):
    return np.abs(predict(op, rows[:, :-1], sheet, constants) - rows[:, -1]) / rows[:, -1]


def fit(sheet, data):
    def loss(logs):
        constants = np.exp(np.clip(logs, -30, 5))
        total = 3 * np.log(constants[1] / USUAL_MEMORY_SHARE) ** 2 * 0.01
        for op, rows in data.items():
            total += WEIGHTS[op] * np.mean(error(op, rows, sheet, constants))
        return total + max(0.0, constants[3] - 1) + max(0.0, constants[0] - 1.1)

    return np.exp(minimize(loss, np.log([0.9, 0.8, 1e-5, 0.3, 0.1])))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", help="folder with ops.csv")
    parser.add_argument("--splits", type=int, default=0, help="fit on random halves, report on the others")
    options = parser.parse_args()
    data = read(options.measured)
    unknown = sorted({gpu for gpu, _ in data} - set(SHEETS))
    if unknown:
        sys.exit(f"no data sheet of {', '.join(unknown)} in tools/fit/ops.py")
    if not options.splits:
        print("// Written by tools/fit/ops.py. Name, compute_share, memory_share, start_seconds, tile_loss, strain.")
    totals = {op: [] for op in OPS}
    for number in range(max(1, options.splits)):
        random = np.random.default_rng(number)
        for gpu, sheet in SHEETS.items():
            mine = {op: data[gpu, op] for op in OPS if (gpu, op) in data}
            if not mine:
                continue
            given, held = mine, mine
            if options.splits:
                given, held = {}, {}
                for op, rows in mine.items():
                    order = random.permutation(len(rows))
                    given[op], held[op] = rows[order[::2]], rows[order[1::2]]
            constants = fit(sheet, given)
            errors = {op: error(op, rows, sheet, constants) for op, rows in held.items()}
            for op, each in errors.items():
                totals[op].append(each)
            if not options.splits:
                print("{{\"{}\", {{{}}}}},".format(gpu, ", ".join(f"{c:.4g}" for c in constants)))
            told = " ".join(f"{op} {100 * each.mean():5.2f} %" for op, each in errors.items())
            print(f"{gpu:24} {told}", file=sys.stderr)
    print("all", " ".join(f"{op} {100 * np.concatenate(each).mean():.2f} %" for op, each in totals.items() if each),
          file=sys.stderr)


if __name__ == "__main__":
    main()
