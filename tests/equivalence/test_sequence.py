"""`split(factor=sequence)`: keys and values go round (ring attention), and the plan equals one device: alone, with uneven shares, nested in every
other scope, with and without causal masks, with dropout, biases that are trained, recompute and ZeRO. By `whale verify`."""

import json
import os
import pathlib
import subprocess

import equality
import pytest

WHALE = os.environ.get("WHALE", str(pathlib.Path(__file__).resolve().parents[2] / "build" / "tools" / "whale" / "whale"))
TEXT = ["--dim", "16", "--heads", "4", "--seq", "13", "--vocab", "25", "--batch", "4"]
MODELS = {
    "gpt": ["gpt", "--layers", "2", *TEXT, "--dropout", "0.1", "--clip", "1.0"],  # causal, dropout
    "bert": ["bert", "--layers", "2", *TEXT, "--dropout", "0.1"],  # no mask
    "t5": ["t5", "--layers", "1", *TEXT],  # a trained bias; keys of another sequence
    "moe-gpt": ["moe-gpt", "--layers", "2", *TEXT, "--experts", "4"],
}
PLANS = {
    "2": ("cpu:2", "split(2, factor=sequence)"),
    "3-uneven": ("cpu:3", "split(3, factor=sequence, shares=[3,2,1])"),
    "5": ("cpu:5", "split(5, factor=sequence)"),
    "one-idle": ("cpu:3", "split(3, factor=sequence, shares=[1,0,1])"),
    "in-replica": ("cpu:4", "replica(2) > split(2, factor=sequence)"),
    "around-replica": ("cpu:4", "split(2, factor=sequence) > replica(2)"),
    "around-split": ("cpu:4", "split(2, factor=sequence) > split(2)"),
    "in-split": ("cpu:4", "split(2) > split(2, factor=sequence)"),
    "in-pipeline": ("cpu:4", "pipeline(2, micro_batches=2) > split(2, factor=sequence)"),
    "in-both": ("cpu:8", "replica(2) > pipeline(2, micro_batches=2) > split(2, factor=sequence)"),
    "recompute": ("cpu:3", "split(3, factor=sequence)", "--recompute", "full"),
    "accumulation": ("cpu:2", "split(2, factor=sequence)", "--accumulation", "3"),
    "zero": ("cpu:4", "replica(2) > split(2, factor=sequence)", "--zero", "3"),
    "bf16": ("cpu:2", "split(2, factor=sequence)", "--precision", "bf16"),
}


def pairs():
    """Every plan of gpt; of the others those that differ from it."""
    for model in MODELS:
        for plan in PLANS if model == "gpt" else ("2", "3-uneven", "in-replica", "in-pipeline"):
            yield model, plan


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sequence")


@pytest.mark.parametrize("model,plan", list(pairs()), ids=lambda v: v)
def test_equal_to_one_device(folder, model, plan):
    path = folder / f"{model}.whale"
    if not path.exists():
        subprocess.run([WHALE, "model", *MODELS[model], "-o", str(path)], check=True, capture_output=True)
    devices, strategy, *more = PLANS[plan]
    chosen = [str(path), "--devices", devices, "--strategy", strategy, *more]
    told = subprocess.run([WHALE, "plan", *chosen, "--all"], capture_output=True, text=True, check=True).stdout
    assert (" = shift(" in told) == (plan != "one-idle")  # a device without a share: gathered
    done = equality.started([WHALE, "verify", *chosen, "--steps", equality.STEPS, "--json"])
    assert done.returncode in (0, 1, 3), done.stderr
    result = json.loads(done.stdout)
    assert result["passed"], json.dumps(result["comparisons"], indent=1)
