"""tools/reproduce-paper: figures of the Whale paper that stand in docs/paper.md as within 10 %, and what its own arithmetic rests on."""

import importlib.machinery
import importlib.util
import itertools
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "reproduce-paper"
LOADER = importlib.machinery.SourceFileLoader("reproduce_paper", str(TOOL))
paper = importlib.util.module_from_spec(importlib.util.spec_from_loader("reproduce_paper", LOADER))
sys.modules["reproduce_paper"] = paper
sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
LOADER.exec_module(paper)
sys.dont_write_bytecode = before

# ResNet-50, milliseconds of a step by batch: JABAS (unist-ssl/JABAS, EuroSys '25, MIT), resnet50_v100_p100.csv, total_time without accumulation.
MEASURED = {"V100": {32: 108.75, 64: 199.59, 96: 287.18, 128: 378.30}, "P100": {32: 165.03, 64: 306.18, 96: 452.79, 128: 591.07, 160: 738.47}}


@pytest.fixture(scope="module")
def whale():
    made = paper.Whale(os.environ["WHALE"])
    yield made
    made.close()


# The largest batches that fit a P100 (docs/paper.md), and a smaller one, where the all-reduce leaves less to gain.
@pytest.mark.parametrize("name, batch, smaller", [("ResNet50", 176, 44), ("GNMT", 512, 64), ("BertLarge", 13, 4)])
def test_shares_by_speed_gain_what_the_paper_measured(whale, name, batch, smaller):
    model, figure = next((m, f) for n, m, f in paper.F17 if n == name)
    equal, aware = paper.hardware_aware(whale, model, batch)
    assert equal.samples == [batch] * 16 and sum(aware.samples) == 16 * batch and min(aware.samples[:8]) > max(aware.samples[8:])
    assert equal.seconds / aware.seconds == pytest.approx(figure, rel=paper.LIMIT)
    equal_small, aware_small = paper.hardware_aware(whale, model, smaller)
    assert 1 <= equal_small.seconds / aware_small.seconds < equal.seconds / aware.seconds


def test_the_simulated_resnet_is_as_much_faster_on_a_v100_as_measured(whale):
    times = [whale.plan("resnet50 --optimizer momentum --batch 64", f"1x{d}", "replica").seconds for d in ("P100-16GB", "V100-16GB")]
    assert times[0] / times[1] == pytest.approx(MEASURED["P100"][64] / MEASURED["V100"][64], rel=paper.LIMIT)


def test_stages_by_speed_gain_what_the_paper_measured(whale):
    for _, model, figure in paper.F18[:1]:
        even, aware, off = paper.even_and_aware(whale, model, 16, 8)
        assert even / aware == pytest.approx(figure, rel=paper.LIMIT) and off < .02


@pytest.mark.parametrize("batch, low, high", [(96, 1.27, 1.29), (112, 1.27, 1.29), (128, 1.27, 1.29)])
def test_measured_times_alone_give_the_papers_gain(batch, low, high):
    gain, v100 = paper.exact_balance(MEASURED, batch)
    assert low <= gain <= high and v100 > batch


def test_the_exact_balance_is_the_best_of_all_cuts():
    """Of three V100 and three P100 that may all have samples of their own, none is faster than two numbers."""
    times, batch = {"V100": {1: 2.0, 4: 5.0, 8: 11.0}, "P100": {1: 3.0, 4: 9.0, 8: 18.5}}, 4
    gain, _ = paper.exact_balance(times, batch)
    slowest = lambda cut: max(paper.between(times["V100" if i < 2 else "P100"], b) for i, b in enumerate(cut))
    best = min(slowest(cut) for cut in itertools.product(range(1, 4 * batch), repeat=4) if sum(cut) == 4 * batch)
    assert paper.between(times["P100"], batch) / gain == pytest.approx(best)


@pytest.mark.parametrize("stages, micro_batches", [(1, 3), (4, 2), (4, 4), (4, 16)])
def test_the_clock_of_1f1b_has_its_closed_form(stages, micro_batches):
    assert paper.one_f_one_b([1.0] * stages, [2.0] * stages, micro_batches) == 3 * (micro_batches + stages - 1)


def test_the_largest_batch_is_the_largest_of_its_steps():
    for limit in (8, 13, 100, 176, 1000):
        assert paper.largest_batch(lambda b: b <= limit) == max(b for k in range(3, 10) for b in (2**k * e // 8 for e in range(8, 16)) if b <= limit)


def test_an_unknown_item_is_said_with_those_there_are():
    done = subprocess.run([sys.executable, TOOL, "--only", "F99"], capture_output=True, text=True)
    assert done.returncode == 2 and "no item F99" in done.stderr and "F17-measured" in done.stderr
    done = subprocess.run([sys.executable, TOOL, "--only", "F17", "--write", "x.md"], capture_output=True, text=True)
    assert done.returncode == 2 and "--write needs all items" in done.stderr


def test_the_table_is_as_wide_as_a_terminal(tmp_path):
    done = subprocess.run([sys.executable, TOOL, "--only", "F17-measured", "--measured", tmp_path], capture_output=True, text=True, check=True)
    assert "0 of 0 figures" in done.stdout
    folder = tmp_path / "jabas"
    folder.mkdir()
    lines = ["model,gpu_type,lbs,num_models,total_time"]
    lines += [f"resnet50,Tesla {g}-PCIE-16GB,{b},1,{ms}" for g, of in MEASURED.items() for b, ms in of.items()]
    (folder / "resnet50_v100_p100.csv").write_text("\n".join(lines) + "\n")
    done = subprocess.run([sys.executable, TOOL, "--only", "F17-measured", "--measured", tmp_path], capture_output=True, text=True, check=True)
    assert "2 of 2 figures within 10 %" in done.stdout and max(map(len, done.stdout.splitlines())) <= 80
