#!/usr/bin/env python3
"""How near the simulated step of a plan is to the measured one: by the rates of a machine that nobody measured, by those of a probe, and by
a profile of the model. Measures in turn and takes medians. Prints a table (docs/profiles.md)."""
import argparse
import json
import os
import pathlib
import statistics
import subprocess
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
MODELS = {
    "gpt d256": ["gpt", "--layers", "4", "--dim", "256", "--heads", "4", "--seq", "128", "--vocab", "256", "--batch", "16"],
    "ResNet-20": ["resnet", "--layers", "20", "--batch", "32"],
}
PLANS = [("cpu:1", "local"), ("cpu:2", "replica"), ("cpu:2", "replica(2, shares=[3,1])"), ("cpu:2", "pipeline(2, micro_batches=4)"), ("cpu:2", "split")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", default=str(ROOT / "build"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1, help="of each local batch")
    args = parser.parse_args()
    tool = str(pathlib.Path(args.build) / "tools" / "whale" / "whale")

    def whale(*arguments) -> str:
        return subprocess.run([tool, *map(str, arguments)], check=True, capture_output=True, text=True, env=os.environ).stdout

    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        print(f"{'':<44}{'measured':>12}{'rates':>18}{'probe':>18}{'profile':>18}")
        errors = {"rates": [], "probe": [], "profile": []}
        for name, model in MODELS.items():
            whale("model", *model, "-o", "m.whale")
            for devices, strategy in PLANS:
                if name == "ResNet-20" and strategy.startswith("split"):
                    continue
                plan = ["m.whale", "--devices", devices, "--strategy", strategy]
                seconds = {kind: [] for kind in ("measured", *errors)}
                for _ in range(args.rounds):
                    whale("devices", "--probe", "--devices", devices, "-o", "probe.json")
                    whale("profile", "m.whale", "--devices", devices, "--seconds", args.seconds, "-o", "m.profile.json")
                    for kind, profile in (("rates", []), ("probe", ["--profile", "probe.json"]), ("profile", ["--profile", "m.profile.json"])):
                        seconds[kind].append(json.loads(whale("simulate", *plan, *profile, "--json"))["seconds"])
                    seconds["measured"].append(json.loads(whale("bench", *plan, "--steps", "15", "--warmup", "3"))["step_seconds"])
                middle = {kind: statistics.median(list_) for kind, list_ in seconds.items()}
                line = f"{name + ', ' + devices + ', ' + strategy:<44}{middle['measured'] * 1e3:>9.1f} ms"
                for kind in errors:
                    error = statistics.median(abs(a / b - 1) for a, b in zip(seconds[kind], seconds["measured"]))
                    errors[kind].append(error)
                    line += f"{middle[kind] * 1e3:>9.1f} ms {error * 100:>4.0f}%"
                print(line, flush=True)
        print(f"{'mean':<56}" + "".join(f"{statistics.mean(list_) * 100:>17.0f}%" for list_ in errors.values()))


if __name__ == "__main__":
    main()
