#!/usr/bin/env python3
"""Real mixed devices: one with a core of its own beside two that share the other. Shares that the planner finds from a probe, beside equal
shares and the best of all legal cuts, each timed in turn. Prints a table (docs/clusters.md)."""
import argparse
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "sdk" / "python"))
DEVICES = "cpu@0,cpu@1*2"
MODELS = {  # batch, arguments of `whale model`
    "gpt": ["gpt", "--layers", "2", "--dim", "256", "--heads", "4", "--seq", "128", "--vocab", "256", "--batch", "24"],
    "resnet": ["resnet", "--layers", "20", "--batch", "48"],
}


def shares_of(plan) -> list:
    return [axis["shares"] for axis in plan.to_dict()["meshes"][0]["axes"] if axis.get("shares")]


def timed(job, batch) -> float:
    start = time.perf_counter()
    job.step(**batch)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", default=str(ROOT / "build"))
    parser.add_argument("--pairs", type=int, default=10)
    args = parser.parse_args()
    os.environ.setdefault("WHALE_LIBRARY", str(pathlib.Path(args.build) / "capi" / "libwhale.so"))
    import numpy as np
    import whale as wh
    tool = pathlib.Path(args.build) / "tools" / "whale" / "whale"
    with tempfile.TemporaryDirectory() as folder:
        probed = pathlib.Path(folder) / "here.json"
        found = wh.probe(DEVICES)
        probed.write_text(json.dumps(found))
        for d in found["devices"]:
            print(f"probed {d['device_text']}: {max(d['flops_per_second']['f32'].values()) / 1e9:.1f} GFLOP/s")
        print(f"{'':<16}{'planned shares':<20}{'equal':>10}{'planned':>10}{'best cut':>10}{'':>12}{'of the best':>13}")
        for (name, arguments), strategy in itertools.product(MODELS.items(), ("replica", "split")):
            if (name, strategy) == ("resnet", "split"):
                continue
            path = pathlib.Path(folder) / f"{name}.whale"
            subprocess.run([tool, "model", *arguments, "-o", path], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            units = 4 if strategy == "split" else int(arguments[-1])
            step = 1 if strategy == "split" else units // 24
            cuts = [(a, b, units - a - b) for a in range(step, units, step) for b in range(step, units - a, step) if units - a - b >= 1]
            cuts = [c for c in cuts if c[1] == c[2] or strategy == "split"] or cuts
            plans = {"equal": wh.plan(wh.load(path), devices=DEVICES, strategy=f"{strategy}(3, shares=[1,1,1])"),
                     "planned": wh.plan(wh.load(path), devices=f"file:{probed}", strategy=strategy)}
            shares = shares_of(plans["planned"])
            rng = np.random.default_rng(0)
            batch = {}
            with plans["equal"].start(seed=0) as job:
                for port in job.inputs():
                    floats = port.dtype == wh.float32
                    batch[port.name] = (rng.standard_normal(port.dims).astype(np.float32) if floats
                                        else rng.integers(0, 10, port.dims).astype(np.int32))
            best, best_seconds = None, float("inf")
            for cut in cuts:
                with wh.plan(wh.load(path), devices=DEVICES, strategy=f"{strategy}(3, shares=[{','.join(map(str, cut))}])").start(seed=0) as job:
                    timed(job, batch)
                    seconds = statistics.median(timed(job, batch) for _ in range(3))
                if seconds < best_seconds:
                    best, best_seconds = cut, seconds
            plans["best"] = wh.plan(wh.load(path), devices=DEVICES, strategy=f"{strategy}(3, shares=[{','.join(map(str, best))}])")
            times = {kind: [] for kind in plans}
            for pair in range(args.pairs):
                for kind, plan in plans.items():
                    with plan.start(seed=0) as job:
                        timed(job, batch)
                        times[kind].append(statistics.median(timed(job, batch) for _ in range(3)))
            ratios = sorted(b / a for a, b in zip(times["planned"], times["best"]))
            speed = sorted(e / a for a, e in zip(times["planned"], times["equal"]))
            middle = {kind: statistics.median(t) * 1e3 for kind, t in times.items()}
            q = len(ratios) // 4
            print(f"{name + ' ' + strategy:<16}{str([int(s) for s in shares[0]]) if shares else 'equal':<20}{middle['equal']:>7.1f} ms{middle['planned']:>7.1f} ms{middle['best']:>7.1f} ms"
                  f"{str(best):>12}{statistics.median(ratios):>7.2f} ({ratios[q]:.2f}-{ratios[-1 - q]:.2f}), {statistics.median(speed):.2f} x equal")


if __name__ == "__main__":
    main()
