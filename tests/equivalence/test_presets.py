"""Every model of `whale model` under two strategies: those that fit 8 GB at their default size (on one device), the larger ones (LARGER) with their whole structure (every kind
of layer, the real numbers of layers, heads and experts where a machine holds them) and smaller widths. Reference devices are plain loops: where
they would take hours in float64 at default size, the default size runs in float32 and float64 at a smaller one. Long: all of it with WHALE_FULL=1,
otherwise the quickest row. WHALE_EQUALITY=DIRECTORY keeps the results for docs/equality.md."""

import collections
import os
import pathlib
import re
import time

import equality
import pytest

# arguments: of `whale model`; none: the default size. precision: f32 on cpu devices, f64 on reference devices.
Row = collections.namedtuple("Row", "preset size arguments precision steps plans")
REPLICA, UNEVEN, SPLIT = ("2", "replica"), ("3", "replica(3, shares=[3,2,1])"), ("2", "split(2)")
PIPELINE, BOTH = ("2", "pipeline(2, micro_batches=2)"), ("4", "replica(2) > split(2)")
TEXT = "--seq 8 --vocab 64 --batch 4"
ROWS = [
    Row("mlp", "default", "", "f64", 2, (REPLICA, SPLIT)),
    Row("mlp", "default", "", "f32", 5, (UNEVEN, PIPELINE)),
    Row("gpt", "default", "", "f32", 3, (UNEVEN, SPLIT)),
    Row("gpt", "dim 32", f"--dim 32 {TEXT}", "f64", 10, (UNEVEN, SPLIT)),
    Row("gpt2", "default", "", "f32", 2, (REPLICA, SPLIT)),
    Row("gpt2", "dim 48, all 12 layers and heads", f"--dim 48 {TEXT}", "f64", 5, (REPLICA, SPLIT)),
    Row("bert", "default", "", "f32", 3, (REPLICA, SPLIT)),
    Row("bert", "dim 32", f"--dim 32 {TEXT}", "f64", 10, (REPLICA, SPLIT)),
    Row("bert-large", "dim 64, all 24 layers and 16 heads", f"--dim 64 {TEXT}", "f64", 3, (PIPELINE, BOTH)),
    Row("t5", "default", "", "f32", 3, (REPLICA, PIPELINE)),
    Row("t5", "dim 32", f"--dim 32 {TEXT}", "f64", 10, (REPLICA, PIPELINE)),
    Row("t5-large", "dim 64, all 48 layers and 16 heads", f"--dim 64 {TEXT}", "f64", 2, (PIPELINE, SPLIT)),
    Row("gpt3-175b", "dim 96, all 96 layers and heads", f"--dim 96 {TEXT}", "f64", 2, (PIPELINE, BOTH)),
    Row("moe-gpt", "default", "", "f32", 3, (REPLICA, SPLIT)),
    Row("moe-gpt", "dim 32", f"--dim 32 {TEXT}", "f64", 10, (REPLICA, SPLIT)),
    Row("m6", "default", "", "f32", 3, (UNEVEN, SPLIT)),
    Row("m6", "dim 32", f"--dim 32 --image 4 {TEXT}", "f64", 10, (UNEVEN, SPLIT)),
    Row("m6-10b", "dim 80, all 48 layers and 40 heads", f"--dim 80 --image 4 {TEXT}", "f64", 2, (PIPELINE, BOTH)),
    Row("m6-1t", "dim 16, hidden 8, all 24 layers and 960 experts", f"--dim 16 --hidden 8 --image 4 {TEXT}", "f64", 2, (REPLICA, SPLIT)),
    Row("m6-10t", "dim 16, hidden 2, all 48 layers and 10,240 experts", f"--dim 16 --hidden 2 --image 4 {TEXT}", "f32", 2, (REPLICA, SPLIT)),
    Row("m6-10t", "dim 16, hidden 2, 4 of 48 layers, all 10,240 experts", f"--dim 16 --hidden 2 --layers 4 --image 4 {TEXT}", "f64", 2, (REPLICA, SPLIT)),
    Row("llama", "default", "", "f32", 3, (UNEVEN, SPLIT)),
    Row("llama", "dim 32", f"--dim 32 --hidden 48 {TEXT}", "f64", 10, (UNEVEN, SPLIT)),
    Row("llama3-405b", "dim 256, hidden 64, all 126 layers and 128 heads of 8 groups", f"--dim 256 --hidden 64 {TEXT}", "f64", 2, (PIPELINE, BOTH)),
    Row("deepseek", "default", "", "f32", 3, (UNEVEN, SPLIT)),
    Row("deepseek", "dim 32", f"--dim 32 --head-dim 4 --hidden 12 {TEXT}", "f64", 10, (UNEVEN, SPLIT)),
    Row("deepseek-v3", "dim 128, heads of 4, hidden 2, all 61 layers, 128 heads and 256 experts", f"--dim 128 --head-dim 4 --hidden 2 {TEXT}", "f64", 2, (PIPELINE, BOTH)),
    Row("gnmt", "default", "", "f32", 2, (SPLIT, PIPELINE)),
    Row("gnmt", "dim 256, all 16 layers and words", "--dim 256 --vocab 32000", "f32", 2, (REPLICA, PIPELINE)),
    Row("gnmt", "dim 16, all 16 layers", "--dim 16 --seq 6 --vocab 64 --batch 4", "f64", 5, (REPLICA, PIPELINE)),
    Row("resnet", "default", "", "f32", 3, (REPLICA, UNEVEN)),
    Row("resnet", "image 16", "--image 16 --batch 12", "f64", 5, (REPLICA, UNEVEN)),
    Row("resnet20", "default", "", "f32", 3, (REPLICA, SPLIT)),
    Row("resnet20", "image 16", "--image 16 --batch 12", "f64", 3, (REPLICA, SPLIT)),
    Row("resnet50", "default", "", "f32", 2, (REPLICA, SPLIT)),
    Row("resnet50", "image 32, all 50 layers", "--image 32 --classes 10 --batch 4", "f64", 2, (REPLICA, SPLIT)),
    Row("dlrm", "default", "", "f32", 3, (REPLICA, SPLIT)),
    Row("dlrm", "all 26 tables, of 500 rows", "--vocab 500 --batch 64 --hidden 64", "f64", 5, (REPLICA, SPLIT)),
    Row("cosmoflow", "default", "", "f32", 3, (REPLICA, SPLIT)),
    Row("cosmoflow", "image 32", "--image 32", "f64", 2, (REPLICA, SPLIT)),
    Row("unet3d", "default", "", "f32", 3, (SPLIT, ("2", "pipeline(2)"))),
    Row("unet3d", "image 16, batch 2", "--image 16 --batch 2", "f64", 2, (REPLICA, SPLIT)),
    Row("classifier100k", "default", "", "f32", 3, (REPLICA, SPLIT)),
    Row("classifier100k", "1,000 classes", "--classes 1000 --dim 64", "f64", 5, (REPLICA, SPLIT)),
]
# What one device needs for a model that is larger than FITS, in GB. Each runs with its whole structure and smaller widths.
FITS = 8
LARGER = {"bert-large": 11.2, "t5-large": 15.8, "gpt3-175b": 240_700, "m6-10b": 2_100, "m6-1t": 6_400, "m6-10t": 64_200, "llama3-405b": 670_200, "deepseek-v3": 1_062_000}
CASES = [(row, plan) for row in ROWS for plan in row.plans]


def name_of(row, plan):
    return equality.identifier(f"{row.preset}-{row.precision}-{'default' if row.size == 'default' else 'smaller'}-{plan[1]}")


def keep(name, row):
    """For docs/equality.md, at once: the whole takes an hour or more."""
    if path := os.environ.get("WHALE_EQUALITY"):
        equality.keep(pathlib.Path(path) / "presets.json", {name: row})


def gigabytes(preset, folder):
    """Of one device at the default size: planned for a null device, which holds nothing."""
    path = str(folder / "model.whale")
    equality.started([equality.WHALE, "model", preset, "-o", path]).check_returncode()
    done = equality.started([equality.WHALE, "plan", path, "--devices", "null:1", "--strategy", "local"])
    number, unit = re.search(r"memory of one device: ([0-9.]+) (\w+)", done.stdout).groups()
    return float(number) * {"kB": 1e-6, "MB": 1e-3, "GB": 1, "TB": 1e3}[unit]


@pytest.mark.parametrize("preset", dict.fromkeys(row.preset for row in ROWS))
def test_the_default_size_runs_where_it_fits(tmp_path, preset):
    assert (preset in LARGER) == all(row.size != "default" for row in ROWS if row.preset == preset)
    assert gigabytes(preset, tmp_path) == pytest.approx(LARGER[preset], rel=0.05) if preset in LARGER else gigabytes(preset, tmp_path) <= FITS


def test_every_preset_is_in_the_table():
    """By what `whale model` says of one that it does not know."""
    done = equality.started([equality.WHALE, "model", "none", "-o", "none.whale"])
    assert set(done.stderr.strip().split("there are ")[1].split(", ")) == {row.preset for row in ROWS}


@pytest.mark.parametrize("row,plan", CASES if equality.FULL else CASES[:1], ids=[name_of(*each) for each in (CASES if equality.FULL else CASES[:1])])
def test_preset_equals_one_device(tmp_path, row, plan):
    path = str(tmp_path / "model.whale")
    equality.started([equality.WHALE, "model", row.preset, *row.arguments.split(), "-o", path]).check_returncode()
    kind = "ref" if row.precision == "f64" else "cpu"
    command = [equality.WHALE, "verify", path, "--devices", f"{kind}:{plan[0]}", "--strategy", plan[1], "--precision", row.precision, "--steps", str(row.steps), "--json"]
    command += ["--skip-float64"] if row.precision == "f32" else []
    began = time.monotonic()
    done = equality.started(command, 3600)
    told = equality.told_by(done, {})
    keep(name_of(row, plan), dict(row._asdict(), plan=plan, seconds=round(time.monotonic() - began), **told))
    assert told["result"] == "equal", told["message"]
