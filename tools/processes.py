#!/usr/bin/env python3
"""A model under replica(2) for `tools/bench --processes`: a rank under `whale launch -n 2`, or one process with both devices.

Every rank prints a JSON line: the median of the timed steps, every loss, and of traced steps the collectives with what its computation hid of
them (docs/benchmarks.md, "Several processes").
"""

import argparse
import json
import os
import statistics
import time

import numpy as np
import whale as wh

MOVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "adasum", "shift", "transfer", "send", "receive")


def union(spans):
    """The same time as spans that do not touch."""
    out = []
    for begin, end in sorted(spans):
        if out and begin <= out[-1][1]:
            out[-1][1] = max(out[-1][1], end)
        else:
            out.append([begin, end])
    return out


def collectives(events):
    """Of a traced step of one device, in the order that they began in: each collective's milliseconds, those that the compute queue worked meanwhile, of these on the
    backward pass, and those before the backward pass was over."""
    queues = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    records = sorted((e for e in events if e["ph"] == "X"), key=lambda e: e["ts"])
    work = [e for e in records if queues[e["tid"]] == "compute" and e["args"]["op"] not in MOVES]
    span = lambda e: (e["ts"], e["ts"] + e["dur"])
    spans = {"hidden": union(map(span, work)), "behind_backward": union(span(e) for e in work if e["cat"] == "backward")}
    spans["in_backward"] = [[0.0, max((end for _, end in spans["behind_backward"]), default=0.0)]]
    shared = lambda e, others: sum(max(0.0, min(span(e)[1], end) - max(span(e)[0], begin)) for begin, end in others) / 1e3
    return [dict(name=e["name"], phase=e["cat"], ms=e["dur"] / 1e3, **{name: shared(e, others) for name, others in spans.items()}) for e in records if e["args"]["op"] in MOVES]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("batches", help="int32 numbers: batches of samples of one token more than the model reads")
    parser.add_argument("--cores", required=True, help="of the two devices, joined by a comma")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--traced", type=int, default=5, help="steps after the timed ones, whose timeline is read")
    args = parser.parse_args()
    if "RANK" in os.environ:  # libwhale pins no rank of several, which know nothing of each other's cores
        os.sched_setaffinity(0, {int(args.cores.split(",")[int(os.environ["RANK"])])})
    graph, world = wh.Graph.load(args.model), wh.world()
    plan = wh.plan(graph, devices=",".join(f"cpu@{core}" for core in args.cores.split(",")), strategy="replica(2)", world=world)
    job = plan.start(seed=0)
    samples, length = next(port.dims for port in job.inputs() if port.name == "tokens")
    batches = [dict(tokens=np.ascontiguousarray(b[:, :-1]), targets=np.ascontiguousarray(b[:, 1:]))
               for b in np.fromfile(args.batches, np.int32).reshape(-1, samples, length + 1)]
    losses, times, traces = [], [], []
    for step in range(args.warmup + args.steps + args.traced):
        if step == args.warmup + args.steps:
            job.trace()
        begin = time.perf_counter()
        losses.append(job.step(**batches[step % len(batches)]))
        times.append(1e3 * (time.perf_counter() - begin))
        if step >= args.warmup + args.steps:
            traces.append(collectives(json.loads(job.timeline())["traceEvents"]))
    line = dict(rank=world.rank, ranks=world.size, ms_per_step=statistics.median(times[args.warmup:args.warmup + args.steps]), losses=losses, collectives=traces)
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
