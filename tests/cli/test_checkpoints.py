"""Checkpoints on the command line and in Python: checked, shown, refused, saved from several processes and threads at once."""

import json
import os
import pathlib
import subprocess
import threading
import warnings

import numpy as np
import pytest
from test_cli import WHALE, files, lines, whale  # noqa: F401

import whale as wh

GRAPHS = pathlib.Path(__file__).resolve().parents[1] / "graphs"
FORMAT1 = pathlib.Path(__file__).resolve().parents[1] / "checkpoints" / "format1"  # written by libwhale 0.1.0 before there were checksums
MODEL = ["mlp", "--layers", "2", "--dim", "4", "--hidden", "4", "--classes", "2", "--batch", "4", "--optimizer", "adam"]


@pytest.fixture
def model(tmp_path):
    whale("model", *MODEL, "-o", tmp_path / "m.whale")
    return tmp_path / "m.whale"


def job(path, **options):
    return wh.plan(wh.load(str(path)), devices="ref:1").start(**options)


def test_inspect_checks_and_prints(model, tmp_path):
    whale("run", model, "--steps", "2", "--save", tmp_path / "c")
    out = whale("inspect", tmp_path / "c")
    assert "iteration 2" in out and "layer0.weight" in out and "layer0.weight/" in out and "every checksum is right" in out
    row = json.loads(whale("inspect", tmp_path / "c", "--json"))
    assert row == wh.inspect_checkpoint(tmp_path / "c")
    assert row["iteration"] == 2 and row["checksums"] and row["format"] == 2 and row["library"] == wh.__version__
    assert {"name": "layer0.weight", "file": "model.safetensors", "dtype": "f32", "dims": [4, 4], "bytes": 64} in row["tensors"]
    raw = bytearray((tmp_path / "c" / "optimizer.safetensors").read_bytes())
    raw[-1] ^= 4
    (tmp_path / "c" / "optimizer.safetensors").write_bytes(raw)
    for command in (("inspect", tmp_path / "c"), ("run", model, "--steps", "1", "--load", tmp_path / "c")):
        message = whale(*command, code=2)
        assert "optimizer.safetensors' is damaged: tensor '" in message and "Load another checkpoint" in message
    with pytest.raises(wh.WhaleError, match="is damaged: tensor '") as caught:
        job(model).load(tmp_path / "c")
    assert caught.value.code == "DATA_LOSS"


def test_a_damaged_checkpoint_changes_nothing(model, tmp_path):
    one, two = job(model, seed=1), job(model, seed=2)
    one.save(tmp_path / "c")
    before = {v["name"]: np.array(two.read(v["name"])) for v in two.variables()}
    raw = bytearray((tmp_path / "c" / "model.safetensors").read_bytes())
    raw[-3] ^= 1
    (tmp_path / "c" / "model.safetensors").write_bytes(raw)
    with pytest.raises(wh.WhaleError):
        two.load(tmp_path / "c")
    assert all((np.array(two.read(name)) == value).all() for name, value in before.items())


def test_optimizer_state_that_is_left_out_is_said(model, tmp_path):
    one = job(model)
    one.save(tmp_path / "c")
    state = sorted(v["name"] for v in one.variables() if v["role"] == "state")
    whale("model", *MODEL[:-1], "sgd", "-o", tmp_path / "sgd.whale")
    plain = job(tmp_path / "sgd.whale")
    with pytest.warns(UserWarning, match=f"holds optimizer state of adam \\({len(state)} tensors, such as '.*left out"):
        plain.load(tmp_path / "c")
    assert sorted(plain.report()["loaded"]["left_out"]) == state
    done = subprocess.run([WHALE, "run", tmp_path / "sgd.whale", "--steps", "1", "--quiet", "--load", tmp_path / "c"], capture_output=True, text=True)
    assert done.returncode == 0 and f"optimizer state of adam ({len(state)} tensors" in done.stderr
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one.load(tmp_path / "c")
        plain.save(tmp_path / "plain"), plain.load(tmp_path / "plain")
    assert one.report()["loaded"]["left_out"] == [] and plain.report()["loaded"]["left_out"] == []


def test_another_optimizers_state_is_refused_and_both_are_named(model, tmp_path):
    """AdamW's and LAMB's state have the same names."""
    whale("run", model, "--steps", "1", "--save", tmp_path / "c")
    assert wh.inspect_checkpoint(tmp_path / "c")["optimizer"] == "adam" and "\noptimizer adam\n" in whale("inspect", tmp_path / "c")
    for optimizer, name in (("adamw", "adamw"), ("lamb", "lamb"), ("adagrad", "adagrad"), ("momentum", "sgd with momentum")):
        whale("model", *MODEL[:-1], optimizer, "-o", tmp_path / "other.whale")
        said = f"the optimizer differs (checkpoint '{tmp_path / 'c'}': adam; this job: {name})"
        assert said in whale("run", tmp_path / "other.whale", "--steps", "1", "--load", tmp_path / "c", code=2)
        with pytest.raises(wh.InvalidArgument) as caught:
            job(tmp_path / "other.whale").load(tmp_path / "c")
        assert said in str(caught.value) and f"as initial values from '{tmp_path / 'c'}/model.safetensors'" in str(caught.value)


def test_split_weights_are_joined_and_cut(tmp_path):
    """The halves are the float32 number's bits: for numpy, for a model that has whole weights, and back."""
    from safetensors.numpy import load_file
    paths = {}
    for name, *options in (("split", "--optimizer", "split_sgd", "--precision", "bf16"), ("whole", "--optimizer", "sgd")):
        paths[name] = tmp_path / f"{name}.whale"
        whale("model", *MODEL[:-2], *options, "-o", paths[name])
    start = lambda name: wh.plan(wh.load(str(paths[name])), devices="cpu:1").start()
    whale("run", paths["split"], "--steps", "3", "--save", tmp_path / "halves")
    low = load_file(tmp_path / "halves/optimizer.safetensors")
    raw = (tmp_path / "halves/model.safetensors").read_bytes()  # numpy has no bf16
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:8 + size])
    whole = start("whole")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole.load(tmp_path / "halves")
        whole.save(tmp_path / "whole")
        split = start("split")
        split.load(tmp_path / "whole")
        split.save(tmp_path / "again")
    lost = 0
    for variable in whole.variables():
        name = variable["name"]
        begin, end = header[name]["data_offsets"]
        high = np.frombuffer(raw[8 + size + begin:8 + size + end], np.uint16).astype(np.uint32)
        bits = (high << 16 | low[name + "/low"].ravel()).view(np.float32)
        assert (whole.read(name).ravel().view(np.uint32) == bits.view(np.uint32)).all(), name
        lost += int((low[name + "/low"] != 0).sum())
    assert lost > 20, "there is something in the lower halves"
    for file in ("model", "optimizer"):
        sums = [json.loads((tmp_path / folder / "whale.json").read_text())["files"][f"{file}.safetensors"]["tensors"] for folder in ("halves", "again")]
        assert sums[0] == sums[1]
    done = subprocess.run([WHALE, "run", paths["whole"], "--steps", "1", "--quiet", "--load", tmp_path / "halves"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "", done.stderr


def test_null_devices_are_not_saved_and_the_run_does_not_begin(model, tmp_path):
    whale("run", model, "--steps", "1", "--save", tmp_path / "c")
    before = (tmp_path / "c" / "model.safetensors").read_bytes()
    message = whale("run", model, "--devices", "null:2", "--steps", "2", "--load", tmp_path / "c", "--save", tmp_path / "c", code=2)
    assert "null devices" in message and "step" not in message
    assert (tmp_path / "c" / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("what", ["checkpoint", "plan", "graph", "trace"])
def test_a_file_size_limit_is_an_error_that_names_the_file(what, model, tmp_path):
    big = [*MODEL]
    big[big.index("--dim") + 1] = big[big.index("--hidden") + 1] = "64"
    whale("model", *big, "-o", tmp_path / "big.whale")
    out = tmp_path / "out"
    out.mkdir()
    command = {"checkpoint": ["run", tmp_path / "big.whale", "--steps", "1", "--quiet", "--save", out / "c"],
               "plan": ["plan", tmp_path / "big.whale", "-o", out / "p.plan"],
               "graph": ["model", "mlp", "--layers", "40", "-o", out / "g.whale"],
               "trace": ["run", tmp_path / "big.whale", "--steps", "1", "--quiet", "--trace", out / "t.json"]}[what]
    for limit in (0, 1):
        done = subprocess.run(["bash", "-c", f'ulimit -f {limit}; exec "$0" "$@"', WHALE, *map(str, command)], capture_output=True, text=True)
        assert done.returncode == 2 and "File too large" in done.stderr and str(out) in done.stderr
        assert not [f for f in out.rglob("*") if f.is_file()]


def test_older_checkpoints_load_and_are_reported(model, tmp_path):
    out = whale("inspect", FORMAT1)
    assert "without checksums" in out and "iteration 3" in out
    assert json.loads(whale("inspect", FORMAT1, "--json"))["checksums"] is False
    done = subprocess.run([WHALE, "run", model, "--steps", "1", "--json", "--load", FORMAT1], capture_output=True, text=True)
    assert lines(done.stdout)[0]["step"] == 4 and "no checksums" in done.stderr
    old = job(model)
    with pytest.warns(UserWarning, match="no checksums"):
        old.load(FORMAT1)
    assert old.iteration == 3 and old.report()["loaded"]["checksums"] is False
    old.save(tmp_path / "new")
    new = job(model)
    new.load(tmp_path / "new")
    assert new.report()["loaded"]["checksums"] is True
    for variable in old.variables():
        assert (np.array(old.read(variable["name"])) == np.array(new.read(variable["name"]))).all()
    # What the fixture holds, by the format's own package.
    from safetensors.numpy import load_file
    for file in ("model", "optimizer"):
        for name, value in load_file(FORMAT1 / f"{file}.safetensors").items():
            assert (np.array(new.read(name)) == value).all()


def test_a_newer_format_is_refused_with_both_versions(model, tmp_path):
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "whale.json").write_text('{\n  "format": 4,\n  "library": "9.1.0"\n}\n')
    message = whale("inspect", tmp_path / "c", code=2)
    assert "format 4, written by libwhale 9.1.0" in message and f"libwhale {wh.__version__}" in message and "newer" in message


def test_the_working_directory_and_foreign_files(model, tmp_path, monkeypatch):
    (tmp_path / "work").mkdir()
    (tmp_path / "work.saving").mkdir()
    (tmp_path / "work.saving" / "thesis.txt").write_text("mine")
    (tmp_path / "work" / "tokenizer.json").write_text("mine")
    monkeypatch.chdir(tmp_path / "work")
    trained = job(model)
    for place in (".", tmp_path / "work", "./"):
        trained.save(place)
        job(model).load(place)
    assert pathlib.Path("tokenizer.json").read_text() == "mine" and (tmp_path / "work.saving" / "thesis.txt").read_text() == "mine"
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "model.safetensors").write_text("another program's")
    with pytest.raises(wh.WhaleError, match="not part of a checkpoint.*another directory"):
        trained.save(tmp_path / "hub")
    assert os.listdir(tmp_path / "hub") == ["model.safetensors"]


def test_two_sessions_in_two_threads(model, tmp_path):
    jobs = [job(model, seed=k) for k in range(2)]
    first = [np.array(j.read("layer0.weight")) for j in jobs]
    reader = job(model)
    jobs[0].save(tmp_path / "c")
    aborted, wrong = [], []

    def save(k):
        for _ in range(50):
            try:
                jobs[k].save(tmp_path / "c")
            except wh.WhaleError as e:
                (aborted if e.code == "ABORTED" else wrong).append(str(e))

    threads = [threading.Thread(target=save, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        reader.load(tmp_path / "c")
        value = np.array(reader.read("layer0.weight"))
        assert any((value == one).all() for one in first)
    assert not wrong and all("another save" in message for message in aborted)
    assert sorted(os.listdir(tmp_path / "c")) == ["model.safetensors", "optimizer.safetensors", "whale.json"]


def test_two_programs(model, tmp_path):
    command = [WHALE, "run", model, "--steps", "1", "--quiet", "--save", tmp_path / "c"]
    for _ in range(5):
        pair = [subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for _ in range(2)]
        for one in pair:
            _, said = one.communicate()
            assert one.returncode == 0 or "another save" in said
        assert "every checksum is right" in whale("inspect", tmp_path / "c")


def test_models_and_plans_are_written_whole(model, tmp_path):
    (tmp_path / "link.whale").symlink_to("target.whale")
    (tmp_path / "target.whale").write_text("before")
    whale("model", *MODEL, "-o", tmp_path / "link.whale")
    assert (tmp_path / "link.whale").is_symlink() and "parameters" in whale("inspect", tmp_path / "target.whale")
    for place, word in (("/dev/null", "a device"), (tmp_path, "a directory")):
        assert word in whale("model", *MODEL, "-o", place, code=2)
    assert os.path.exists("/dev/null") and not os.path.isfile("/dev/null")
    graph, wrong = wh.load(str(model)), []
    plan = wh.plan(graph, devices="null:2")

    def write(k):
        try:
            for _ in range(50):
                graph.save(str(tmp_path / "shared.whale"))
                plan.save(str(tmp_path / "shared.plan"))
                wh.load(str(tmp_path / "shared.whale"))
                wh.Plan.load(str(tmp_path / "shared.plan"))
        except wh.WhaleError as e:
            wrong.append(str(e))

    threads = [threading.Thread(target=write, args=(k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_a_resumed_run_goes_on_in_its_data(files, tmp_path):
    """6 steps are 3, a checkpoint and 3 more: with a rate of 0 a loss is the batch's own."""
    losses = lambda name, *more: [r["loss"] for r in lines(whale("run", files / name, "--json", *more))]
    for name, data in (("gpt.whale", ["--data", files / "book.txt"]), ("mlp.whale", ["--data", files / "data.npz"]),
                       ("mlp.whale", ["--data", files / "data.safetensors"]), ("mlp.whale", []), ("gpt.whale", [])):
        for rate in (["--lr", "0"], []):
            whole = losses(name, *data, *rate, "--seed", "3", "--steps", "6")
            first = losses(name, *data, *rate, "--seed", "3", "--steps", "3", "--save", tmp_path / "c")
            assert len(set(whole[:3] + whole[3:])) >= 3  # batches differ
            assert first + losses(name, *data, *rate, "--steps", "3", "--load", tmp_path / "c") == whole, (name, data, rate)
            assert first + losses(name, *data, *rate, "--seed", "3", "--steps", "3", "--load", tmp_path / "c") == whole
    # Of the data alone: the checkpoint's seed stays that of parameters and dropout.
    other = losses("gpt.whale", "--data", files / "book.txt", "--steps", "3", "--seed", "4", "--load", tmp_path / "c")
    assert other != losses("gpt.whale", "--data", files / "book.txt", "--steps", "3", "--load", tmp_path / "c")


def test_a_changed_bit_or_a_lost_byte_of_a_model_or_plan_file_is_an_error(files, tmp_path):
    whale("plan", files / "mlp.whale", "--devices", "ref:2", "-o", tmp_path / "p.plan")
    for path, load in ((files / "mlp.whale", wh.load), (tmp_path / "p.plan", wh.Plan.load)):
        good = path.read_bytes()
        assert "its checksum is right" in whale("inspect", path) and json.loads(whale("inspect", path, "--json"))["checksum"] is True
        bad = tmp_path / f"bad{path.suffix}"
        assert good[8:12] == b"WHC2"
        for at in [*range(28), *range(28, len(good), 1 + len(good) // 300), *range(len(good) - 12, len(good))]:
            changed = bytearray(good)
            changed[at] ^= 1 << at % 8
            bad.write_bytes(changed)
            with pytest.raises(wh.WhaleError, match="damaged|first bytes"):
                load(str(bad))
        assert "its checksum is not that of its" in whale("inspect", bad, code=2)
        for size in [*range(24, 64), *range(64, len(good), 1 + len(good) // 100), *range(len(good) - 32, len(good)), len(good) + 1]:
            bad.write_bytes((good + b"x")[:size])
            with pytest.raises(wh.DataLoss, match=f"damaged: it has {size} bytes, and was written with {len(good)}"):
                load(str(bad))
        bad.write_bytes(good[:8] + bytes(4) + good[12:])  # as other producers write it
        assert "without a checksum" in whale("inspect", bad) and json.loads(whale("inspect", bad, "--json"))["checksum"] is False
        load(str(bad)).save(str(tmp_path / "again"))
        assert (tmp_path / "again").read_bytes() == good


def test_the_checksum_behind_a_model_file_of_before_is_compared(tmp_path):
    for path in GRAPHS.glob("version1-*.whale"):
        old = path.read_bytes()
        assert old[-8:-4] == b"WHC1" and "its checksum is right" in whale("inspect", path)
        for at in (30, len(old) // 2, len(old) - 9, len(old) - 1):
            (tmp_path / "bad.whale").write_bytes(old[:at] + bytes([old[at] ^ 4]) + old[at + 1:])
            with pytest.raises(wh.DataLoss, match="its checksum is not that of its"):
                wh.load(str(tmp_path / "bad.whale"))
