"""tools/processes.py, which `tools/bench --processes` runs: what it counts as hidden, and that processes change no loss."""

import array
import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest
from test_cli import WHALE, whale

PROGRAM = pathlib.Path(__file__).resolve().parents[2] / "tools" / "processes.py"


def record(device, queue, op, begin, end, phase="backward"):
    return {"ph": "X", "pid": device, "tid": queue, "ts": 1e3 * begin, "dur": 1e3 * (end - begin), "cat": phase, "args": {"op": op}}


def test_hidden_is_what_the_same_device_computes_meanwhile():
    spec = importlib.util.spec_from_file_location("processes", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    queues = [{"ph": "M", "pid": d, "tid": q, "name": "thread_name", "args": {"name": name}} for d in (0, 1) for q, name in enumerate(("compute", "replica"))]
    found = module.overlap([
        *queues,
        record(0, 0, "matmul", 0, 10), record(0, 0, "adam", 12, 20, "update"), record(0, 0, "all_reduce", 20, 21),  # on the queue itself: not hidden
        record(0, 1, "all_reduce", 8, 13), record(0, 1, "all_reduce", 30, 34), record(0, 1, "all_reduce", 2, 3, "forward"), record(0, 1, "vote", 14, 15, "update"),
        record(1, 0, "matmul", 30, 34)])  # another device's
    assert found == pytest.approx({"all": 11, "all_hidden": 4, "gradients": 10, "gradients_hidden": 2})


@pytest.mark.skipif(not (pathlib.Path(WHALE).parents[2] / "capi" / "libwhale_ucx.so").exists(), reason="built without UCX")
def test_two_processes_and_one_say_the_same_losses(tmp_path):
    whale("model", "gpt", "--layers", 1, "--dim", 16, "--heads", 2, "--seq", 6, "--vocab", 25, "--batch", 4, "-o", tmp_path / "gpt.whale")
    with open(tmp_path / "batches", "wb") as file:
        array.array("i", [i * i % 25 for i in range(2 * 4 * 7)]).tofile(file)
    core = min(os.sched_getaffinity(0))
    program = [sys.executable, str(PROGRAM), str(tmp_path / "gpt.whale"), str(tmp_path / "batches"), "--devices", f"cpu@{core}*2", "--steps", "2", "--warmup", "1", "--traced", "2"]

    def rows(*launch):
        done = subprocess.run([*launch, *program], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    alone, = rows()
    both = rows(WHALE, "launch", "-n", "2", "--output", "all", "--")
    assert sorted(row["rank"] for row in both) == [0, 1] and all(row["losses"] == alone["losses"] for row in both)
    for row in both:
        spent = row["communication_ms"]
        assert spent["all"] > spent["gradients"] > 0 and 0 <= spent["all_hidden"] <= spent["all"] and spent["gradients_hidden"] <= spent["gradients"]
