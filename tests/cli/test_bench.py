"""tools/processes.py, which `tools/bench --processes` runs: what it counts as hidden, and that processes change no loss."""

import array
import importlib.machinery
import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest
from test_cli import WHALE, whale

PROGRAM = pathlib.Path(__file__).resolve().parents[2] / "tools" / "processes.py"


def load(path):
    loader = importlib.machinery.SourceFileLoader(path.stem, str(path))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(path.stem, loader))
    sys.modules[path.stem] = module  # dataclasses look there
    loader.exec_module(module)
    return module


def record(queue, op, begin, end, phase="backward"):
    return {"ph": "X", "pid": 0, "tid": queue, "name": f"{op} {begin}", "ts": 1e3 * begin, "dur": 1e3 * (end - begin), "cat": phase, "args": {"op": op}}


def test_hidden_is_what_the_rank_computes_meanwhile():
    queues = [{"ph": "M", "pid": 0, "tid": q, "name": "thread_name", "args": {"name": name}} for q, name in enumerate(("compute", "replica"))]
    found = load(PROGRAM).collectives([
        *queues, record(0, "matmul", 0, 10), record(0, "adam", 9, 20, "update"), record(0, "all_reduce", 20, 21),  # on the queue itself: not hidden
        record(1, "all_reduce", 8, 13), record(1, "all_reduce", 18, 34), record(1, "all_reduce", 2, 3, "forward"), record(1, "vote", 14, 15, "update")])
    assert [(c["phase"], c["ms"], c["hidden"], c["behind_backward"], c["in_backward"]) for c in found] == [
        ("forward", 1, 1, 1, 1), ("backward", 5, 5, 2, 2), ("backward", 16, 2, 0, 0), ("backward", 1, 0, 0, 0)]


def test_hidden_shares_are_of_all_ranks_or_of_the_one_that_came_last():
    made = lambda *rows: [dict(phase=phase, ms=ms, hidden=hidden, behind_backward=behind, in_backward=inside) for phase, ms, hidden, behind, inside in rows]
    shares = load(PROGRAM.parent / "bench").hidden_shares([[made(("forward", 8, 0, 0, 8), ("backward", 6, 3, 1, 5), ("backward", 2, 2, 0, 1))],
                                                           [made(("forward", 1, 1, 0, 1), ("backward", 2, 1, 1, 2), ("backward", 6, 2, 1, 0))]])
    assert list(shares.values()) == [9 / 25, 8 / 16, 3 / 16, 8 / 16, 3 / 4]


@pytest.mark.skipif(not (pathlib.Path(WHALE).parents[2] / "capi" / "libwhale_ucx.so").exists(), reason="built without UCX")
def test_two_processes_and_one_say_the_same_losses(tmp_path):
    whale("model", "gpt", "--layers", 1, "--dim", 16, "--heads", 2, "--seq", 6, "--vocab", 25, "--batch", 4, "-o", tmp_path / "gpt.whale")
    with open(tmp_path / "batches", "wb") as file:
        array.array("i", [i * i % 25 for i in range(2 * 4 * 7)]).tofile(file)
    core = min(os.sched_getaffinity(0))
    program = [sys.executable, str(PROGRAM), str(tmp_path / "gpt.whale"), str(tmp_path / "batches"), "--cores", f"{core},{core}", "--steps", "2", "--warmup", "1", "--traced", "2"]

    def rows(*launch):
        done = subprocess.run([*launch, *program], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    alone, = rows()
    both = rows(WHALE, "launch", "-n", "2", "--output", "all", "--")
    assert sorted(row["rank"] for row in both) == [0, 1] and all(row["losses"] == alone["losses"] for row in both)
    for row in both:
        assert len(row["collectives"]) == 2
        for step in row["collectives"]:
            assert any(c["phase"] == "backward" for c in step) and all(0 <= c["behind_backward"] <= c["hidden"] <= c["ms"] for c in step)
    assert [[c["name"] for c in step] for step in both[0]["collectives"]] == [[c["name"] for c in step] for step in both[1]["collectives"]]
