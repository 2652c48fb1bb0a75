#!/usr/bin/env python3
"""A model under replica(2) for `tools/bench --processes`: a rank under `whale launch -n 2`, or one process with both devices.

Every rank prints a JSON line: the median of the timed steps, every loss, and from traced steps the milliseconds of communication, and of
those that its computation hid (docs/benchmarks.md, "Several processes").
"""

import argparse
import json
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


def shared(some, others):
    """The time that is in both of two unions."""
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in some for b in others)


def overlap(events):
    """Of one traced step: milliseconds of communication, and of those that the same device's compute queue worked; then of gradients alone, beside the backward pass."""
    queues = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    found = dict.fromkeys(("all", "all_hidden", "gradients", "gradients_hidden"), 0.0)
    for device in {pid for pid, _ in queues}:
        moves, work = [], []
        for e in events:
            if e["ph"] == "X" and e["pid"] == device:
                queue = queues[device, e["tid"]]
                if e["args"]["op"] in MOVES:
                    moves.append(e)
                elif queue == "compute":
                    work.append(e)
        span = lambda chosen: union((e["ts"], e["ts"] + e["dur"]) for e in chosen)
        backward = lambda chosen: [e for e in chosen if e["cat"] == "backward"]
        for name, some, others in ("all", moves, work), ("gradients", backward(moves), backward(work)):
            found[name] += sum(end - begin for begin, end in span(some)) / 1e3
            found[name + "_hidden"] += shared(span(some), span(others)) / 1e3
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("batches", help="int32 numbers: batches of samples of one token more than the model reads")
    parser.add_argument("--devices", required=True)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--traced", type=int, default=5, help="steps after the timed ones, whose timeline is read")
    args = parser.parse_args()
    graph, world = wh.Graph.load(args.model), wh.world()
    plan = wh.plan(graph, devices=args.devices, strategy="replica(2)", world=world)
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
            traces.append(overlap(json.loads(job.timeline())["traceEvents"]))
    line = dict(rank=world.rank, ranks=world.size, ms_per_step=statistics.median(times[args.warmup:args.warmup + args.steps]), losses=losses)
    print(json.dumps({**line, "communication_ms": {name: sum(t[name] for t in traces) for name in traces[0]} if traces else None}), flush=True)


if __name__ == "__main__":
    main()
