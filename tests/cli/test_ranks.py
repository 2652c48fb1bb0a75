"""`--ranks`: a plan run and verified as several ranks of one process; `lag` devices, which are late at random."""

import json

import numpy as np
import pytest

from test_cli import WHALE, files, whale  # noqa: F401 (a fixture)


def losses(*arguments):
    return [json.loads(line)["loss"] for line in whale("run", *arguments, "--json").splitlines()]


@pytest.mark.parametrize("devices, strategy", [("ref:4", "replica(2) > split(2)"), ("ref:2", "pipeline(2, micro_batches=2)"), ("lag:3", "replica")])
def test_ranks_run_what_one_process_runs(files, devices, strategy):
    options = [files / "mlp.whale", "--data", files / "data.npz", "--devices", devices, "--strategy", strategy, "--steps", 5, "--seed", 3]
    alone = losses(*options)
    assert losses(*options, "--ranks", 2) == alone and len(set(alone)) == 5


def test_exact_mode_is_equal_to_the_bit_in_ranks(files):
    options = [files / "gpt.whale", "--exact", "--accumulation", 6, "--steps", 3]
    one = losses(*options, "--devices", "cpu:1")
    for devices, ranks in (("cpu:2", 2), ("cpu:3", 2), ("cpu:3", 3)):
        assert losses(*options, "--devices", devices, "--strategy", "replica", "--ranks", ranks) == one


def test_ranks_load_a_checkpoint(files, tmp_path):
    whale("run", files / "mlp.whale", "--steps", 2, "--save", tmp_path / "c", "--quiet")
    options = [files / "mlp.whale", "--load", tmp_path / "c", "--steps", 2, "--devices", "ref:2", "--lr", 0.01]
    assert losses(*options, "--ranks", 2) == losses(*options)


@pytest.mark.parametrize("devices, strategy, ranks", [("ref:4", "replica(2) > split(2)", 3), ("ref:2", "pipeline(2, micro_batches=2)", 2)])
def test_ranks_save_what_others_go_on_from(files, tmp_path, devices, strategy, ranks):
    options = [files / "mlp.whale", "--data", files / "data.npz", "--devices", devices, "--strategy", strategy, "--seed", 3]
    whole = losses(*options, "--steps", 6)
    first = losses(*options, "--steps", 3, "--ranks", ranks, "--save", tmp_path / "c")
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == sorted(
        [f"{kind}-{r:05}-of-{ranks:05}.safetensors" for kind in ("model", "optimizer") for r in range(1, ranks + 1)] + ["whale.json"])
    told = whale("inspect", tmp_path / "c")
    assert f"by {ranks} ranks" in told and "every checksum is right" in told and "layer0.weight" in told
    row = json.loads(whale("inspect", tmp_path / "c", "--json"))
    assert row["format"] == 3 and row["ranks"] == ranks and all(tensor["parts"] for tensor in row["tensors"])
    for again in (1, 2):
        assert first + losses(*options, "--steps", 3, "--ranks", again, "--load", tmp_path / "c") == whole
    # By one rank, over it: ordinary files again, and nothing else.
    whale("run", *options, "--steps", 1, "--load", tmp_path / "c", "--save", tmp_path / "c", "--quiet")
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["model.safetensors", "optimizer.safetensors", "whale.json"]
    assert json.loads(whale("inspect", tmp_path / "c", "--json"))["format"] == 2


def test_in_exact_mode_ranks_go_on_as_the_one_device_would_have(files, tmp_path):
    """To the bit, from three ranks to two, and back."""
    options = [files / "gpt.whale", "--exact", "--accumulation", 6]
    one = losses(*options, "--devices", "cpu:1", "--steps", 6)
    three = [*options, "--devices", "cpu:3", "--strategy", "replica", "--ranks", 3]
    two = [*options, "--devices", "cpu:2", "--strategy", "pipeline(2, micro_batches=6)", "--ranks", 2]
    first = losses(*three, "--steps", 2, "--save", tmp_path / "c")
    second = losses(*two, "--steps", 1, "--load", tmp_path / "c", "--save", tmp_path / "c")
    assert first + second + losses(*three, "--steps", 3, "--load", tmp_path / "c") == one


@pytest.mark.parametrize("model, devices, strategy, more", [
    (["moe-gpt", "--layers", "2", "--dim", "16", "--vocab", "64", "--seq", "8", "--experts", "4", "--batch", "8"], "ref:4", "replica(2) > split(2)", []), (["moe-gpt", "--layers", "2", "--dim", "16", "--vocab", "64", "--seq", "8", "--experts", "4", "--batch", "8"], "ref:2", 'split(2, factor="experts")', []),
    (["mlp"], "cpu:3", "replica(shares=[3,2,1])", ["--zero", 1]), (["mlp"], "cpu:2", "replica", ["--precision", "f16"]),
    (["mlp", "--optimizer", "split_sgd", "--precision", "bf16"], "cpu:2", "split", [])])
def test_ranks_save_mixtures_scales_and_halves(tmp_path, model, devices, strategy, more):
    whale("model", *model, "-o", tmp_path / "m.whale")
    options = [tmp_path / "m.whale", "--devices", devices, "--strategy", strategy, "--seed", 3, *more]
    whole = losses(*options, "--steps", 5)
    first = losses(*options, "--steps", 2, "--ranks", 2, "--save", tmp_path / "c")
    for again in (1, 2):
        assert first + losses(*options, "--steps", 3, "--ranks", again, "--load", tmp_path / "c") == whole
    if "f16" in more:
        assert json.loads(whale("inspect", tmp_path / "c", "--json"))["loss_scale"] > 0


def test_a_damaged_shard_is_named(files, tmp_path):
    options = [files / "mlp.whale", "--devices", "ref:2", "--ranks", 2, "--strategy", "split", "--steps", 1, "--quiet"]
    whale("run", *options, "--save", tmp_path / "c")
    path = tmp_path / "c" / "model-00002-of-00002.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    told = whale("run", *options, "--load", tmp_path / "c", code=2)
    assert "rank 1: " in told and "model-00002-of-00002.safetensors' is damaged: tensor '" in told


def test_ranks_refuse_what_they_cannot_do(files, tmp_path):
    assert "rank 1 of 2 has none of the plan's 1 device: launch at most 1 rank" in whale("run", files / "mlp.whale", "--ranks", 2, code=2)
    assert "or plan for at least 3 devices, one for each rank" in whale("verify", files / "mlp.whale", "--devices", "cpu:2", "--ranks", 3, code=2)
    for wrong in (0, -1, 1.5, "two", 5000):
        assert "--ranks" in whale("run", files / "mlp.whale", f"--ranks={wrong}", code=2)
    assert not any(tmp_path.iterdir())


def test_each_rank_writes_its_timeline(files, tmp_path):
    options = ["--strategy", "replica", "--steps", 2, "--quiet", "--trace"]
    whale("run", files / "mlp.whale", "--devices", "cpu:2", "--ranks", 2, *options, tmp_path / "in.json")
    whale("launch", "-n", 2, "--", WHALE, "run", files / "mlp.whale", *options, tmp_path / "by.json")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["by.rank0.json", "by.rank1.json", "in.rank0.json", "in.rank1.json"]
    for path in tmp_path.iterdir():
        devices = {event["pid"] for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"}
        assert devices == {int(path.stem[-1])}


def test_a_label_out_of_range_ends_the_run_of_all_ranks(files, tmp_path):
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "bad.npz", x=rng.standard_normal((10, 8)).astype(np.float32), y=np.full(10, 77, np.int32))
    for ranks in (1, 2):
        told = whale("run", files / "mlp.whale", "--data", tmp_path / "bad.npz", "--devices", "ref:2", "--ranks", ranks, code=2)
        assert "77" in told and "is an index" in told


@pytest.mark.parametrize("options, said", [
    (["--devices", "cpu:4", "--strategy", "pipeline(2, micro_batches=2) > replica(2)", "--ranks", 2], "cpu:4 in 2 ranks against cpu:1"),
    (["--devices", "ref:3", "--strategy", "replica(3, shares=[3,2,1])", "--zero", 3, "--ranks", 3], "ref:3 in 3 ranks against ref:1"),
    (["--devices", "cpu:2", "--gradient-dtype", "bf16", "--ranks", 2], "cpu:2 in 2 ranks against cpu:1"),
    (["--devices", "lag@7*2", "--strategy", "pipeline(2, micro_batches=2)"], "lag@7*2 against ref:1"),
    (["--devices", "lag:4", "--strategy", "replica(2) > split(2)", "--ranks", 2], "lag:4 in 2 ranks against ref:1")])
def test_verify_in_ranks_and_on_lag(files, options, said):
    told = whale("verify", files / "mlp.whale", *options, "--steps", 3)
    assert said in told and "The plan does not change the result" in told


def test_verify_in_ranks_compares_every_copy(files):
    rows = json.loads(whale("verify", files / "mlp.whale", "--devices", "ref:4", "--ranks", 2, "--steps", 3, "--json"))["comparisons"]
    for row in rows:
        assert row["ranks"] == 2 and row["passed"] and row["parameters"]["copies"] == 4 * row["parameters"]["tensors"]


def test_verify_of_a_plan_file_in_ranks(files, tmp_path):
    whale("plan", files / "mlp.whale", "--devices", "cpu:2", "--strategy", "pipeline(2, micro_batches=2)", "-o", tmp_path / "m.plan")
    assert "in 2 ranks" in whale("verify", files / "mlp.whale", "--plan", tmp_path / "m.plan", "--ranks", 2, "--steps", 3)
