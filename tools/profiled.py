#!/usr/bin/env python3
"""How near the simulated step of a plan is to the measured one: by the rates of a machine that nobody measured, and by a profile of the
model. Measured in turn; a step is the fastest of some, which other programs have not disturbed. Prints a table (docs/profiles.md)."""
import argparse
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "sdk" / "python"))
MODELS = {
    "gpt d256": ["gpt", "--layers", "2", "--dim", "256", "--heads", "4", "--seq", "128", "--vocab", "256", "--batch", "8"],
    "ResNet-20": ["resnet", "--layers", "20", "--batch", "16"],
}
PLANS = [("cpu:1", "local"), ("cpu:2", "replica"), ("cpu:2", "replica(2, shares=[3,1])"), ("cpu:2", "pipeline(2, micro_batches=2)")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", default=str(ROOT / "build"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=1, help="of each local batch")
    args = parser.parse_args()
    os.environ.setdefault("WHALE_LIBRARY", str(pathlib.Path(args.build) / "capi" / "libwhale.so"))
    import numpy as np
    import whale as wh
    tool = pathlib.Path(args.build) / "tools" / "whale" / "whale"
    print(f"{'':<44}{'measured':>12}{'rates':>18}{'profile':>18}")
    errors = {"rates": [], "profile": []}
    with tempfile.TemporaryDirectory() as folder:
        for name, model in MODELS.items():
            path = pathlib.Path(folder) / "m.whale"
            subprocess.run([tool, "model", *model, "-o", path], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            plans = [plan for plan in PLANS if not (name == "ResNet-20" and "micro_batches" in plan[1])]  # its statistics are of whole batches
            rows = {plan: {kind: [] for kind in ("measured", *errors)} for plan in plans}
            for _ in range(args.rounds):
                profiles = {devices: wh.profile(wh.load(path), devices, seconds=args.seconds) for devices in ("cpu:1", "cpu:2")}
                for (devices, strategy), row in rows.items():
                    for kind, profile in (("rates", None), ("profile", profiles[devices])):
                        plan = wh.plan(wh.load(path), devices, strategy=strategy, profile=profile)
                        row[kind].append(plan.simulate()["seconds"])
                    rng = np.random.default_rng(0)
                    with plan.start(seed=0) as job:
                        batch = {port.name: rng.standard_normal(port.dims).astype(np.float32) if port.dtype == wh.float32
                                 else rng.integers(0, 10, port.dims).astype(np.int32) for port in job.inputs()}
                        taken = []
                        for _ in range(args.steps):
                            start = time.perf_counter()
                            job.step(**batch)
                            taken.append(time.perf_counter() - start)
                    row["measured"].append(min(taken))
            for (devices, strategy), row in rows.items():
                middle = {kind: statistics.median(list_) for kind, list_ in row.items()}
                line = f"{name + ', ' + devices + ', ' + strategy:<44}{middle['measured'] * 1e3:>9.1f} ms"
                for kind in errors:
                    errors[kind].append(abs(middle[kind] / middle["measured"] - 1))
                    line += f"{middle[kind] * 1e3:>9.1f} ms {errors[kind][-1] * 100:>4.0f}%"
                print(line, flush=True)
    print(f"{'mean':<56}" + "".join(f"{statistics.mean(list_) * 100:>17.0f}%" for list_ in errors.values()))


if __name__ == "__main__":
    main()
