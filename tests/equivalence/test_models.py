"""Every model of `whale model`, small, with `replica` on 1 to 4 devices, even and uneven: the plan equals one device, by the metric of
`whale verify` (float64 on reference devices, float32 on CPU devices). That the metric can fail is tested in test_verify.py."""

import json
import os
import pathlib
import subprocess

import equality
import pytest

WHALE = os.environ.get("WHALE", str(pathlib.Path(__file__).resolve().parents[2] / "build" / "tools" / "whale" / "whale"))
SMALL = {
    "gpt": ["gpt", "--layers", "2", "--dim", "32", "--heads", "4", "--seq", "12", "--vocab", "48", "--batch", "6", "--clip", "1.0"],
    "gpt-dropout": ["gpt", "--layers", "1", "--dim", "32", "--heads", "4", "--seq", "12", "--vocab", "48", "--batch", "6", "--dropout", "0.1"],
    "gpt2-tied": ["gpt2", "--layers", "1", "--dim", "32", "--heads", "4", "--seq", "12", "--vocab", "48", "--batch", "6"],
    "bert": ["bert", "--layers", "1", "--dim", "32", "--heads", "4", "--seq", "12", "--vocab", "48", "--batch", "6", "--dropout", "0.1"],
    "bert-lamb": ["bert-large", "--layers", "1", "--dim", "32", "--heads", "4", "--seq", "12", "--vocab", "48", "--batch", "6"],
    "t5": ["t5", "--layers", "1", "--dim", "32", "--heads", "4", "--seq", "12", "--vocab", "48", "--batch", "6"],
    "moe-gpt": ["moe-gpt", "--layers", "2", "--dim", "32", "--heads", "4", "--seq", "12", "--vocab", "48", "--batch", "6", "--experts", "5", "--capacity", "0.75", "--dropout", "0.1"],
    "moe-gpt-accumulation": ["moe-gpt", "--layers", "2", "--dim", "32", "--heads", "4", "--seq", "12", "--vocab", "48", "--batch", "7", "--experts", "4", "--top-k", "1", "--accumulation", "2"],
    "m6": ["m6", "--layers", "2", "--dim", "32", "--heads", "4", "--seq", "12", "--vocab", "48", "--batch", "6", "--image", "3", "--experts", "4"],
    "m6-decoder": ["m6-10b", "--layers", "1", "--decoder", "1", "--dim", "32", "--heads", "4", "--seq", "12", "--vocab", "48", "--batch", "6", "--image", "3"],
    "llama": ["llama", "--layers", "2", "--dim", "32", "--heads", "4", "--kv-heads", "2", "--hidden", "48", "--seq", "12", "--vocab", "48", "--batch", "6", "--clip", "1.0"],
    "deepseek": ["deepseek", "--layers", "3", "--dim", "32", "--heads", "4", "--head-dim", "4", "--hidden", "12", "--experts", "6", "--capacity", "0.75", "--seq", "12", "--vocab", "48", "--batch", "6"],
    "deepseek-accumulation": ["deepseek", "--layers", "2", "--dim", "32", "--heads", "4", "--head-dim", "4", "--hidden", "12", "--seq", "12", "--vocab", "48", "--batch", "7", "--accumulation", "2"],
    "gnmt": ["gnmt", "--layers", "3", "--dim", "16", "--seq", "5", "--vocab", "48", "--batch", "6"],
    "resnet": ["resnet", "--layers", "8", "--dim", "8", "--image", "12", "--batch", "6", "--lr", "0.01"],
    "resnet50": ["resnet50", "--image", "32", "--classes", "10", "--batch", "4", "--lr", "0.001"],
    "dlrm": ["dlrm", "--layers", "3", "--dim", "12", "--vocab", "30", "--seq", "2", "--hidden", "32", "--batch", "24"],
    "dlrm-adam": ["dlrm", "--layers", "2", "--dim", "8", "--vocab", "40", "--hidden", "16", "--batch", "12", "--optimizer", "adamw", "--lr", "0.001", "--weight-decay", "0.1"],
    "dlrm-dense": ["dlrm", "--layers", "2", "--dim", "8", "--vocab", "40", "--hidden", "16", "--batch", "12", "--no-sparse-updates", "--accumulation", "2"],
    "dlrm-split": ["dlrm", "--layers", "3", "--dim", "12", "--vocab", "30", "--hidden", "32", "--batch", "24", "--optimizer", "split_sgd", "--precision", "bf16"],
    "mlp": ["mlp", "--layers", "3", "--dim", "20", "--hidden", "24", "--batch", "12"],
    "mlp-adagrad": ["mlp", "--layers", "2", "--dim", "20", "--hidden", "24", "--batch", "12", "--optimizer", "adagrad", "--lr", "0.01"],
    "mlp-accumulation": ["mlp", "--layers", "2", "--dim", "20", "--hidden", "24", "--batch", "12", "--accumulation", "3", "--optimizer", "adamw", "--lr", "0.001"],
    "cosmoflow": ["cosmoflow", "--layers", "2", "--dim", "4", "--image", "8", "--hidden", "16", "--batch", "6"],
    "unet3d": ["unet3d", "--layers", "2", "--dim", "4", "--image", "4", "--batch", "6"],
    "classifier100k": ["classifier100k", "--dim", "12", "--classes", "50", "--batch", "12"],
    "gpt-accumulation-uneven": ["gpt", "--layers", "1", "--dim", "32", "--heads", "4", "--seq", "12", "--vocab", "48", "--batch", "7", "--accumulation", "3"],
}
# devices and strategy; pairs of model x strategy are covered so that each strategy meets several models, and each model at least two.
STRATEGIES = {"1": ("cpu:1", ""), "2": ("cpu:2", "replica"), "3-uneven": ("cpu:3", "replica(3, shares=[3,2,1])"), "4": ("cpu:4", "replica"),
              "2-one-idle": ("cpu:2", "replica(2, shares=[1,0])"), "3": ("cpu:3", "replica"), "2-uneven": ("cpu:2", "replica(2, shares=[3,1])"),
              "4-uneven": ("cpu:4", "replica(4, shares=[1,2,3,4])")}
SLOW = {"resnet50"}
FULL = bool(os.environ.get("WHALE_FULL"))  # every model under every strategy, 20 steps


def pairs():
    names = list(STRATEGIES)
    for i, model in enumerate(SMALL):
        chosen = names if FULL or model in ("gpt", "resnet", "mlp") else [names[1 + i % 7], names[1 + (i + 3) % 7]]
        for strategy in chosen[:1] if model in SLOW and not FULL else chosen:
            yield model, strategy


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("model,strategy", pairs(), ids=lambda v: v)
def test_equal_to_one_device(folder, model, strategy):
    path = folder / f"{model}.whale"
    if not path.exists():
        subprocess.run([WHALE, "model", *SMALL[model], "-o", str(path)], check=True, capture_output=True)
    devices, text = STRATEGIES[strategy]
    steps = "2" if model in SLOW else "20" if FULL else "6"
    command = [WHALE, "verify", str(path), "--devices", devices, "--steps", steps, "--json", *(["--strategy", text] if text else [])]
    done = equality.started(command)
    assert done.returncode in (0, 1, 3), done.stderr
    result = json.loads(done.stdout)
    assert result["passed"], json.dumps(result["comparisons"], indent=1)
    assert all(row["loss_error"] >= 0 for row in result["comparisons"])
