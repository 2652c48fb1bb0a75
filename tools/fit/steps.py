#!/usr/bin/env python3
"""Fits the constants of a training stack (engine/simulate/stack.h) to measured steps.

    steps.py WHALE megatron SINGLE.csv MULTI.csv [--splits N] [-o engine/validate/megatron_fitted.inc]

Reads the work of each row from `whale validate FILE --form megatron_work --json`, and walks it as the simulator does a
plan without overlap: rows of the schedule one after the other, a message between stages when it has come. Fits on all
rows and writes the constants; with --splits, fits on N random halves and prints the error on the other halves."""
import argparse
import json
import subprocess

import numpy as np

WORK = ["flops", "edges", "odd_flops", "odd_edges", "bytes", "collectives", "inside_bytes", "network_bytes", "messages",
        "issued", "meetings"]
# Where a fit begins.
START = {"product_flops": 270e12, "product_edge": 200, "odd_factor": 3, "memory_bytes": 1300e9, "issue_seconds": 75e-6,
         "meeting_seconds": 50e-6, "collective_seconds": 50e-6, "inside_bytes": 230e9, "network_bytes": 100e9,
         "message_seconds": 200e-6}
NAMES = list(START)


def coefficients(x):
    """Seconds of the device and of its host for a unit of each kind of work."""
    s = dict(zip(NAMES, x))
    f, e, o = 1 / s["product_flops"], s["product_edge"], s["odd_factor"]
    device = [f, f * e, f * o, f * o * e, 1 / s["memory_bytes"], s["collective_seconds"], 1 / s["inside_bytes"],
              1 / s["network_bytes"], s["message_seconds"], 0, 0]
    host = [0] * 9 + [s["issue_seconds"], s["meeting_seconds"]]
    return np.array(device), np.array(host)


class Row:
    def __init__(self, row):
        self.measured = row["measured_s"]
        classes = sorted(row["classes"], key=lambda c: c["stage"])
        self.stages = []
        work, times, of, links, segments = [], [], [], [], 0
        for c in classes:
            names = [s[0] for s in c["segments"]]
            self.stages.append((segments, names, c["schedule"]))
            for s in c["segments"]:
                for how, count, numbers in s[1:]:
                    work.append(numbers)
                    times.append(count)
                    of.append(3 * segments + how)
                    links.append(how == 0)
                segments += 1
        self.work, self.times, self.of, self.links = np.array(work, dtype=float), np.array(times), np.array(of), np.array(links)
        self.sums = 3 * segments

    def seconds(self, device, host):
        d, h = self.work @ device, self.work @ host
        total = np.bincount(self.of, np.where(self.links, d, np.maximum(d, h)) * self.times, self.sums)
        p = len(self.stages)
        if p == 1:
            begin, _, schedule = self.stages[0]
            return sum(total[3 * (begin + s):3 * (begin + s) + 3].sum() for s in schedule)
        come = [{}, {}]  # forward, backward: (stage, micro-batch) -> when its message is there
        at = [0.0] * p
        place = [0] * p
        count = [[0, 0] for _ in range(p)]
        left = True
        while left:
            left = False
            for k, (begin, names, schedule) in enumerate(self.stages):
                while place[k] < len(schedule):
                    segment = schedule[place[k]]
                    name = names[segment]
                    way = 0 if name.startswith("forward") else 1 if name.startswith("backward") else None
                    t = at[k]
                    link, rest, after = total[3 * (begin + segment):3 * (begin + segment) + 3]
                    if name == "epilogue":
                        break
                    if way is not None:
                        u = count[k][way]
                        first = k == 0 if way == 0 else k == p - 1
                        if not first:
                            if (k, u) not in come[way]:
                                break
                            t = max(t, come[way][(k, u)])
                        t += rest + after + link
                        come[way][(k + 1 if way == 0 else k - 1, u)] = t
                        count[k][way] += 1
                    else:
                        t += rest + after + link
                    at[k] = t
                    place[k] += 1
                    left = True
        # The epilogue: sums, then all commit, then updates.
        before, behind = [], []
        for k, (begin, names, schedule) in enumerate(self.stages):
            segment = names.index("epilogue")
            link, rest, after = total[3 * (begin + segment):3 * (begin + segment) + 3]
            before.append(at[k] + link + rest)
            behind.append(after)
        return max(before) + max(behind)


def load(whale, path):
    if path.endswith(".json"):
        told = json.load(open(path))
    else:
        told = json.loads(subprocess.run([whale, "validate", path, "--form", "megatron_work", "--json"], check=True,
                                         capture_output=True).stdout)
    return [Row(r) for r in told["work"]]


def errors(rows, x):
    device, host = coefficients(x)
    return np.array([r.seconds(device, host) / r.measured - 1 for r in rows])


def fit(groups, steps=40, x=None):
    """Least absolute errors, each group of rows with the same weight: Gauss-Newton on reweighted squares."""
    z = np.log(np.array(list(START.values())) if x is None else x)
    rows = [r for g in groups for r in g]
    weight = np.concatenate([np.full(len(g), 1 / len(g)) for g in groups])
    cost = lambda e: (weight * abs(e)).sum()
    e, damping = errors(rows, np.exp(z)), 1e-3
    for _ in range(steps):
        jacobian = np.array([(errors(rows, np.exp(z + 1e-4 * unit)) - e) / 1e-4 for unit in np.eye(len(z))]).T
        w = weight / np.maximum(abs(e), 0.02)
        hessian, gradient = jacobian.T @ (jacobian * w[:, None]), jacobian.T @ (w * e)
        gain = 0
        for _ in range(7):
            step = np.clip(np.linalg.solve(hessian + damping * np.diag(np.diag(hessian) + 1e-9), -gradient), -0.7, 0.7)
            tried = errors(rows, np.exp(z + step))
            if cost(tried) < cost(e):
                gain, z, e, damping = cost(e) - cost(tried), z + step, tried, max(damping / 3, 1e-6)
                break
            damping *= 4
        if gain < 1e-5:
            break
    return np.exp(z)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("whale")
    parser.add_argument("form", choices=["megatron"])
    parser.add_argument("files", nargs="+")
    parser.add_argument("--splits", type=int, default=0)
    parser.add_argument("--every", type=int, default=1, help="fit on each n-th row of a random order")
    parser.add_argument("-o", "--output")
    args = parser.parse_args()
    groups = [load(args.whale, f) for f in args.files]
    random = np.random.default_rng(0)
    for split in range(args.splits):
        halves = [random.permutation(len(g)) for g in groups]
        x = fit([[g[i] for i in h[:len(g) // 2][::args.every if len(g) > 200 else 1]] for g, h in zip(groups, halves)])
        held = [100 * abs(errors([g[i] for i in h[len(g) // 2:]], x)).mean() for g, h in zip(groups, halves)]
        print(f"split {split}: held out", ", ".join(f"{e:.2f} %" for e in held), flush=True)
    orders = [random.permutation(len(g)) for g in groups]
    x = fit([[g[i] for i in h[::args.every if len(g) > 200 else 1]] for g, h in zip(groups, orders)])
    print("all rows", ", ".join(f"{100 * abs(errors(g, x)).mean():.2f} %" for g in groups))
    lines = "".join(f".{n} = {v:.4g},\n" for n, v in zip(NAMES, x))
    print(lines, end="")
    if args.output:
        open(args.output, "w").write(lines)
    return groups, x


if __name__ == "__main__":
    main()
