"""Old words (docs/words.md): the command line refuses them and says the new one; graph files that were written with them load."""

import json
import pathlib

import pytest

from test_cli import whale  # noqa: F401

GRAPHS = pathlib.Path(__file__).resolve().parents[1] / "graphs"  # of format 1, as libwhale wrote them with the old words


@pytest.mark.parametrize("arguments,said", [
    (["plan", "--bridges"], "`whale plan` has no option '--bridges'; it is called --reshards now"),
    (["model", "dlrm", "--lazy"], "no option '--lazy'; it is called --sparse-updates now"),
    (["model", "dlrm", "--no-lazy"], "no option '--no-lazy'; it is called --no-sparse-updates now"),
    (["model", "mlp", "--schedule", "cosine"], "no option '--schedule'; it is called --lr-schedule now"),
    (["model", "mlp", "--schedule=cosine"], "no option '--schedule'; it is called --lr-schedule now")])
def test_options(arguments, said):
    assert said in whale(*arguments, code=2)


def test_an_option_of_another_command_is_unknown_as_before():
    assert "`whale run` has no option '--bridges'; there are " in whale("run", "--bridges", code=2)


@pytest.mark.parametrize("strategy,said", [
    ("pipeline(2, micro_batches=2, schedule=interleaved, chunks=2)", "parameter 'chunks' of pipeline is called 'virtual_stages' now"),
    ("cluster(layout=row) > replica(2)", "parameter 'layout' of cluster is called 'device_order' now"),
    ("replica(2, layout=row)", "parameter 'layout' of replica is called 'device_order' now")])
def test_strategies(strategy, said):
    assert said in whale("plan", GRAPHS / "version1-scopes.whale", "--devices", "null:4", "--strategy", strategy, code=2)


@pytest.mark.parametrize("name,strategy", [
    ("scopes", "replica(2, device_order=row) > pipeline(2, micro_batches=2, schedule=interleaved, virtual_stages=2)"),
    ("strategy", "cluster(device_order=row) > pipeline(2, micro_batches=2, schedule=interleaved, virtual_stages=2) > replica(2)")])
def test_older_graphs_load(name, strategy, tmp_path):
    path = GRAPHS / f"version1-{name}.whale"
    assert f"plan of version1-{name}: {strategy} on 4 device(s)" in whale("plan", path, "--devices", "cpu:4", "-o", tmp_path / "m.plan")
    described = json.loads(whale("inspect", path, "--json"))
    assert described["training"]["lr_schedule"] == "cosine" and described["training"]["warmup_steps"] == 10
    assert described["default_strategy"] == (strategy if name == "strategy" else "")
    whale("run", tmp_path / "m.plan", "--steps", "1")
    training = whale("inspect", path, "--level", "train")
    assert "table/low" in training  # split master weights, of tables by their rows
