#!/usr/bin/env python3
"""One plan, simulated and run, for `tools/bench --simulator`: in this process, or a rank of several under `whale launch`.

Rank 0 prints a JSON line: milliseconds of steps (all of them), of the simulator by a profile of the model's ops and by rates alone; bytes of each device as
planned and as its session has them; by how much the process grew (docs/profiles.md).
"""

import argparse
import json
import os
import time

import numpy as np
import whale as wh


def resident() -> int:
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--devices", required=True)
    parser.add_argument("--strategy", required=True)
    parser.add_argument("--profile", required=True, help="file of `whale profile`")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    args = parser.parse_args()
    world = None
    if "RANK" in os.environ:  # libwhale pins no rank of several, which know nothing of each other's cores
        world, cores = wh.world(), [int(device.partition("@")[2]) for device in args.devices.split(",")]
        os.sched_setaffinity(0, {cores[world.rank]})
    graph = wh.load(args.model)
    plans = {name: wh.plan(graph, args.devices, strategy=args.strategy, profile=profile, world=world) for name, profile in (("rates", None), ("profile", args.profile))}
    plan, before = plans["profile"], resident()
    random = np.random.default_rng(0)
    with plan.start(seed=0) as job:
        batch = {port.name: random.standard_normal(port.dims).astype(np.float32) if port.dtype == wh.float32 else random.integers(0, 10, port.dims).astype(np.int32)
                 for port in job.inputs()}
        taken = []
        for step in range(args.warmup + args.steps):
            begin = time.perf_counter()
            job.step(**batch)
            if step >= args.warmup:
                taken.append(1e3 * (time.perf_counter() - begin))
        grown, held = resident() - before, [device["bytes"]["total"] - device["bytes"]["workspace"] for device in job.report()["devices"]]
    mine = range(len(held)) if world is None else [world.rank]  # each rank has one
    planned = [plan.memory(device).total for device in mine]
    if world is None or world.rank == 0:
        print(json.dumps({"measured": taken, **{name: 1e3 * each.simulate()["seconds"] for name, each in plans.items()}, "planned_bytes": planned, "held_bytes": held,
                          "grown_bytes": grown, "ranks": world.size if world else 1}), flush=True)


if __name__ == "__main__":
    main()
