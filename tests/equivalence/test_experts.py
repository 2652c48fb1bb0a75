"""Experts cut, and all else replicated, in every place that a strategy has for them: alone, inside a pipeline whose stages nobody has written, inside
replicas of it, with splits of other layers, ZeRO, recompute and every schedule. Each plan equals one device, by `whale verify`; of both models in the
full suite, of one of them otherwise."""

import json
import os
import pathlib
import subprocess

import equality
import pytest

WHALE = os.environ.get("WHALE", str(pathlib.Path(__file__).resolve().parents[2] / "build" / "tools" / "whale" / "whale"))
TEXT = ["--dim", "16", "--heads", "4", "--seq", "6", "--vocab", "25", "--batch", "8"]
MODELS = {
    "deepseek": ["deepseek", "--layers", "5", "--dense-layers", "2", *TEXT, "--head-dim", "4", "--hidden", "6", "--experts", "4"],
    "moe-gpt": ["moe-gpt", "--layers", "4", *TEXT, "--experts", "4", "--capacity", "0.75", "--dropout", "0.1"],
}
EXPERTS = "; experts: split({}, factor=experts)"
PLANS = {
    "beside-replicas": ("ref:4", "replica(4)" + EXPERTS.format(4)),
    "beside-uneven": ("cpu:3", "replica(3)" + "; experts: split(3, factor=experts, shares=[2,1,1])"),
    "in-pipeline": ("ref:4", "pipeline(2, micro_batches=2) > replica(2)" + EXPERTS.format(2)),
    "in-four-stages": ("cpu:8", "pipeline(4, micro_batches=4) > replica(2)" + EXPERTS.format(2)),  # of deepseek, a stage without experts
    "counts-left-out": ("ref:8", "pipeline(2, micro_batches=2) > replica; experts: split(factor=experts)"),
    "in-replicas-of-a-pipeline": ("ref:8", "replica(2) > pipeline(2, micro_batches=2) > replica(2)" + EXPERTS.format(2)),
    "fewer-ways": ("ref:8", "pipeline(2, micro_batches=2) > replica(4); experts: replica(2) > split(2, factor=experts)"),
    "beside-a-split": ("ref:8", "pipeline(2, micro_batches=2) > replica(2) > split(2); experts: split(4, factor=experts)"),
    "as-whole-nests": ("ref:4", "pipeline(2, micro_batches=2) > replica(2); experts: pipeline(2, micro_batches=2) > split(2, factor=experts)"),
    "zero1-recompute": ("cpu:4", "pipeline(2, micro_batches=4) > replica(2)" + EXPERTS.format(2), "--zero", "1", "--recompute", "full"),
    "zero3": ("ref:4", "pipeline(2, micro_batches=2) > replica(2)" + EXPERTS.format(2), "--zero", "3"),
    "gpipe": ("cpu:4", "pipeline(2, micro_batches=4, schedule=gpipe) > replica(2)" + EXPERTS.format(2)),
    "interleaved": ("ref:4", "pipeline(2, micro_batches=4, virtual_stages=2) > replica(2)" + EXPERTS.format(2)),
    "zb_h1": ("ref:4", "pipeline(2, micro_batches=4, schedule=zb_h1) > replica(2)" + EXPERTS.format(2), "--recompute", "full"),
    "offload": ("cpu:4", "pipeline(2, micro_batches=2) > replica(2)" + EXPERTS.format(2), "--offload", "state,activations"),
}


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("experts")
    for model, arguments in MODELS.items():
        subprocess.run([WHALE, "model", *arguments, "-o", str(path / f"{model}.whale")], check=True, capture_output=True)
    return path


@pytest.mark.parametrize("model,plan", [(model, plan) for n, plan in enumerate(PLANS) for m, model in enumerate(MODELS) if equality.FULL or n % len(MODELS) == m])
def test_equal_to_one_device(folder, model, plan):
    devices, strategy, *more = PLANS[plan]
    chosen = [str(folder / f"{model}.whale"), "--devices", devices, "--strategy", strategy, *more]
    told = subprocess.run([WHALE, "plan", *chosen, "--all"], capture_output=True, text=True, check=True).stdout
    assert " = all_to_all(" in told, "tokens go to experts on other devices"
    done = equality.started([WHALE, "verify", *chosen, "--steps", "8", "--json"])
    assert done.returncode in (0, 1, 3), done.stderr
    result = json.loads(done.stdout)
    assert result["passed"], json.dumps(result["comparisons"], indent=1)


@pytest.mark.parametrize("schedule,zero,memory", [("1f1b", "0", "1600000"), ("1f1b", "3", "1600000"), ("zb_h1", "3", "2000000")])
def test_what_experts_exchanged_is_exchanged_again(folder, schedule, zero, memory):
    """With blocks recomputed and memory short: the plan that fits has all-to-alls in the backward pass whose results others keep, and equals one device."""
    path, plan = folder / "many.whale", folder / f"{schedule}-{zero}.plan"
    model = "--layers 6 --dense-layers 1 --dim 32 --heads 2 --head-dim 8 --hidden 8 --seq 64 --vocab 32 --batch 32 --experts 8 --top-k 4"
    subprocess.run([WHALE, "model", "deepseek", *model.split(), "-o", str(path)], check=True, capture_output=True)
    options = ["--strategy", f"pipeline(2, micro_batches=8, schedule={schedule}) > replica(2)" + EXPERTS.format(2), "--recompute", "full", "--zero", zero]
    again = [subprocess.run([WHALE, "plan", str(path), "--devices", devices, *options, "--all"], capture_output=True, text=True, check=True).stdout.count("exchanged.again")
             for devices in ("cpu:4", f"cpu-{memory}B:4")]
    assert again[0] == 0 and again[1] > 0
    subprocess.run([WHALE, "plan", str(path), "--devices", f"cpu-{memory}B:4", *options, "-o", str(plan)], check=True, capture_output=True)
    done = equality.started([WHALE, "verify", str(path), "--plan", str(plan), "--steps", "2", "--json"])
    assert done.returncode == 0, done.stderr + done.stdout[-2000:]
