"""`whale devices --probe`, and plans by what it found."""

import json
import os
import pathlib
import subprocess

import pytest
from test_cli import WHALE, whale


def test_what_a_probe_writes_a_plan_reads(tmp_path):
    table = whale("devices", "--probe", "--devices", "ref:2", "-o", tmp_path / "here.json")
    assert table.startswith("device  rank  kind") and "\n0, 1 " in table and "all, a gather" in table
    found = json.loads((tmp_path / "here.json").read_text())
    assert len(found["devices"]) == 2 and len(found["links"]) == 1 and found["profile"]["link.bytes_per_second"] > 0
    assert json.loads(whale("devices", "--probe", "--devices", "ref:1", "--json"))["links"] == []
    whale("model", "mlp", "-o", tmp_path / "mlp.whale")
    seconds = []
    for profile in ((), ("--profile", tmp_path / "here.json"), ("--profile", tmp_path / "slow.json")):
        (tmp_path / "slow.json").write_text('{"device.flops_per_second": 1e3}')
        seconds.append(json.loads(whale("plan", tmp_path / "mlp.whale", "--devices", "ref:2", "--strategy", "replica", "--estimate", "--json", *profile))["seconds"])
    assert len(set(seconds)) == 3 and seconds[2] == max(seconds)
    whale("plan", tmp_path / "mlp.whale", "--devices", "ref:2", "--strategy", "replica", "--profile", tmp_path / "here.json", "-o", tmp_path / "p.plan")
    assert "loss" in whale("run", tmp_path / "p.plan", "--steps", "1", "--json")


@pytest.mark.parametrize("arguments, said", [
    (("devices", "--probe", "--devices", "null:2"), "null devices are not probed"),
    (("devices", "--devices", "cpu:2"), "--devices requires --probe"),
    (("plan", "M", "--profile", "M"), "no profile: expected a JSON object"),
    (("plan", "M", "--profile", "nothing.json"), "nothing.json"),
])
def test_what_is_wrong_is_said(tmp_path, arguments, said):
    whale("model", "mlp", "-o", tmp_path / "M")
    done = subprocess.run([WHALE, *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0 and said in done.stderr, done.stderr


@pytest.mark.skipif(not (pathlib.Path(WHALE).parents[2] / "capi" / "libwhale_ucx.so").exists(), reason="built without UCX")
def test_processes_are_measured_together(tmp_path):
    done = subprocess.run([WHALE, "launch", "-n", "2", "--", WHALE, "devices", "--probe", "--devices", "ref:2", "-o", tmp_path / "two.json"], capture_output=True, text=True,
                          timeout=120, env={**os.environ})
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "two.json").read_text())
    assert [d["rank"] for d in found["devices"]] == [0, 1] and found["links"][0]["latency_seconds"] > 0
    assert done.stdout.count("device  rank") == 1
