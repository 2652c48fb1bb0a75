#!/usr/bin/env python3
"""Fits the constants of a training stack (engine/simulate/stack.h) to measured steps.

    steps.py WHALE megatron SINGLE.csv MULTI.csv [--splits N] [-o engine/validate]
    steps.py WHALE amp mixed_trials.csv [--splits N] [-o engine/validate]

Reads the work of each row from `whale validate FILE --form FORM_work --json`, and walks it as the simulator does a
plan without overlap: rows of the schedule one after the other, a message between stages when it has come. Fits on all
rows and writes the constants; with --splits, fits on N random halves and prints the error on the other halves."""
import argparse
import json
import subprocess

import numpy as np

WORK = ["flops", "edges", "odd_flops", "odd_edges", "bytes", "collectives", "inside_bytes", "network_bytes", "messages",
        "issued", "meetings"]
FIGURES = ["product_flops", "product_edge", "odd_factor", "memory_bytes", "issue_seconds", "meeting_seconds",
           "collective_seconds", "inside_bytes", "network_bytes", "message_seconds"]


# Of each form: the constants with where a fit begins, and the stack of each type of devices that they make.
class Megatron:
    prior = 0.002  # of the mean error, for a constant that is e times its start
    start = {"product_flops": 270e12, "product_edge": 200, "odd_factor": 3, "memory_bytes": 1300e9,
             "issue_seconds": 75e-6, "meeting_seconds": 50e-6, "collective_seconds": 50e-6, "inside_bytes": 230e9,
             "network_bytes": 100e9, "message_seconds": 200e-6}
    outputs = {"A100-80GB": "megatron_fitted.inc"}

    @staticmethod
    def stacks(c):
        return {"A100-80GB": c}


class Amp:
    prior = 0.02  # few rows
    # Links as the runs' scripts name them, times a share that is achieved inside nodes and between them.
    start = {"t4_flops": 20e12, "v100_flops": 50e12, "t4_memory": 200e9, "v100_memory": 700e9, "t4_issue": 250e-6,
             "v100_issue": 250e-6, "meeting_seconds": 50e-6, "share_inside": 0.7, "share_between": 0.7,
             "message_seconds": 1e-3}
    outputs = {"T4": "amp_t4_fitted.inc", "V100-16GB": "amp_v100_fitted.inc"}

    @staticmethod
    def stacks(c):
        same = {"product_edge": 200, "odd_factor": 1, "collective_seconds": 50e-6,
                "meeting_seconds": c["meeting_seconds"], "message_seconds": c["message_seconds"]}
        inside, between = c["share_inside"], c["share_between"]
        return {"T4": same | {"product_flops": c["t4_flops"], "memory_bytes": c["t4_memory"],
                              "issue_seconds": c["t4_issue"], "inside_bytes": inside * 50e9 / 8,
                              "network_bytes": between * 50e9 / 8},
                "V100-16GB": same | {"product_flops": c["v100_flops"], "memory_bytes": c["v100_memory"],
                                     "issue_seconds": c["v100_issue"], "inside_bytes": inside * 170e9 / 8,
                                     "network_bytes": between * 10e9 / 8}}


FORMS = {"megatron": Megatron, "amp": Amp}
FORM = Megatron


def coefficients(x):
    """Of each type: seconds of the device, of its messages and of its host for a unit of each kind of work."""
    out = {}
    stacks = FORM.stacks(dict(zip(FORM.start, x)))
    for name, s in stacks.items():
        f, e, o = 1 / s["product_flops"], s["product_edge"], s["odd_factor"]
        device = [f, f * e, f * o, f * o * e, 1 / s["memory_bytes"], s["collective_seconds"], 1 / s["inside_bytes"],
                  1 / s["network_bytes"], s["message_seconds"], 0, 0]
        host = [0] * 9 + [s["issue_seconds"], s["meeting_seconds"]]
        out[name] = np.array(device), np.array(host)
    return out


class Row:
    def __init__(self, row):
        self.measured = row["measured_s"]
        self.experiment = row.get("experiment", "")
        classes = sorted(row["classes"], key=lambda c: c["stage"])
        self.types = [c["type"] for c in classes]
        self.slowest = set(self.types)
        self.stages = []
        work, times, of, links, segments, begins = [], [], [], [], 0, []
        for c in classes:
            begins.append(len(work))
            # Replicas of a stage on another type of devices: pipelines of their own, up to the sums of gradients.
            again = bool(self.stages) and self.stages[-1][3] == c["stage"]
            if not again:
                self.stages.append((segments, [s[0] for s in c["segments"]], c["schedule"], c["stage"], []))
            self.stages[-1][4].append(segments)
            for s in c["segments"]:
                for how, count, numbers in s[1:]:
                    work.append(numbers)
                    times.append(count)
                    of.append(3 * segments + how)
                    links.append(how == 0)
                segments += 1
        self.ranges = list(zip(self.types, begins, begins[1:] + [len(work)]))
        self.work, self.times, self.of = np.array(work, dtype=float), np.array(times), np.array(of)
        self.links = np.array(links)
        self.sums = 3 * segments

    def seconds(self, stacks):
        network = max(stacks[t][0][7] for t in self.slowest)
        d, h = np.empty(len(self.work)), np.empty(len(self.work))
        for name, begin, end in self.ranges:
            device, host = stacks[name]
            message = device.copy()
            message[7] = network
            d[begin:end] = np.where(self.links[begin:end], self.work[begin:end] @ message, self.work[begin:end] @ device)
            h[begin:end] = self.work[begin:end] @ host
        total = np.bincount(self.of, np.where(self.links, d, np.maximum(d, h)) * self.times, self.sums)
        part = lambda begin, s: total[3 * (begin + s):3 * (begin + s) + 3]
        if len(self.stages) == 1:
            _, _, schedule, _, copies = self.stages[0]
            return (max(sum(part(c, s).sum() for s in schedule[:-1]) for c in copies) +
                    np.max([part(c, schedule[-1]) for c in copies], axis=0).sum())
        chains = [self.pipeline(total, [copies[min(k, len(copies) - 1)] for *_, copies in self.stages])
                  for k in range(max(len(s[4]) for s in self.stages))]
        # The epilogue: sums, which all copies of a stage make together, then all commit, then updates.
        before, behind = [], []
        for k, (_, names, _, _, copies) in enumerate(self.stages):
            link, rest, after = np.max([part(c, names.index("epilogue")) for c in copies], axis=0)
            before.append(max(at[k] for at in chains) + link + rest)
            behind.append(after)
        return max(before) + max(behind)

    def pipeline(self, total, begins):
        """When each stage is through with its micro-batches."""
        p = len(self.stages)
        come = [{}, {}]  # forward, backward: (stage, micro-batch) -> when its message is there
        at = [0.0] * p
        place = [0] * p
        count = [[0, 0] for _ in range(p)]
        left = True
        while left:
            left = False
            for k, (_, names, schedule, _, _) in enumerate(self.stages):
                begin = begins[k]
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
        return at


def load(whale, form, path):
    if path.endswith(".json"):
        told = json.load(open(path))
    else:
        told = json.loads(subprocess.run([whale, "validate", path, "--form", form + "_work", "--json"], check=True,
                                         capture_output=True).stdout)
    return [Row(r) for r in told["work"]]


def errors(rows, x):
    stacks = coefficients(x)
    return np.array([r.seconds(stacks) / r.measured - 1 for r in rows])


def fit(groups, steps=40, x=None):
    """Least absolute errors, each group of rows with the same weight: Gauss-Newton on reweighted squares. Constants are
    held near the start, weakly: what the rows do not tell apart keeps its physical size."""
    start = np.log(np.array(list(FORM.start.values())))
    z = start if x is None else np.log(x)
    rows = [r for g in groups for r in g]
    weight = np.concatenate([np.full(len(g), 1 / len(g)) for g in groups])
    if FORM is Megatron:
        weight[:len(groups[0])] *= 2  # the rows of one node are fifteen times as many
    else:  # trials of one batch: who plans wants to know the fast ones best
        weight *= np.concatenate([(lambda fast: fast / fast.mean())(np.array([r.measured for r in g]) ** -0.5)
                                  for g in groups])
    cost = lambda e, z: (weight * abs(e)).sum() + FORM.prior * ((z - start) ** 2).sum()
    e, damping = errors(rows, np.exp(z)), 1e-3
    for _ in range(steps):
        jacobian = np.array([(errors(rows, np.exp(z + 1e-4 * unit)) - e) / 1e-4 for unit in np.eye(len(z))]).T
        w = weight / np.maximum(abs(e), 0.02)
        hessian = jacobian.T @ (jacobian * w[:, None]) + 2 * FORM.prior * np.eye(len(z))
        gradient = jacobian.T @ (w * e) + 2 * FORM.prior * (z - start)
        gain = 0
        for _ in range(7):
            step = np.clip(np.linalg.solve(hessian + damping * np.diag(np.diag(hessian) + 1e-9), -gradient), -0.7, 0.7)
            tried = errors(rows, np.exp(z + step))
            if cost(tried, z + step) < cost(e, z):
                gain, z, e, damping = cost(e, z) - cost(tried, z + step), z + step, tried, max(damping / 3, 1e-6)
                break
            damping *= 4
        if gain < 1e-5:
            break
    return np.exp(z)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("whale")
    parser.add_argument("form", choices=list(FORMS))
    parser.add_argument("files", nargs="+")
    parser.add_argument("--splits", type=int, default=0)
    parser.add_argument("--every", type=int, default=1, help="fit on each n-th row of a random order")
    parser.add_argument("-o", "--output", help="folder to write the constants to")
    args = parser.parse_args()
    global FORM
    FORM = FORMS[args.form]
    groups = [load(args.whale, args.form, f) for f in args.files]
    if args.form == "amp":
        groups = [[r for r in groups[0] if r.experiment == e] for e in ("het_cluster", "homogeneous")]
    random = np.random.default_rng(0)
    for split in range(args.splits):
        halves = [random.permutation(len(g)) for g in groups]
        x = fit([[g[i] for i in h[:len(g) // 2][::args.every if len(g) > 200 else 1]] for g, h in zip(groups, halves)])
        held = [100 * abs(errors([g[i] for i in h[len(g) // 2:]], x)).mean() for g, h in zip(groups, halves)]
        print(f"split {split}: held out", ", ".join(f"{e:.2f} %" for e in held), flush=True)
    orders = [random.permutation(len(g)) for g in groups]
    x = fit([[g[i] for i in h[::args.every if len(g) > 200 else 1]] for g, h in zip(groups, orders)])
    print("all rows", ", ".join(f"{100 * abs(errors(g, x)).mean():.2f} %" for g in groups))
    for name, value in zip(FORM.start, x):
        print(f"  {name} {value:.4g}")
    for name, stack in FORM.stacks(dict(zip(FORM.start, x))).items():
        if args.output:
            lines = "".join(f".{n} = {stack[n]:.4g},\n" for n in FIGURES)
            open(f"{args.output}/{FORM.outputs[name]}", "w").write(lines)
    return groups, x


if __name__ == "__main__":
    main()
