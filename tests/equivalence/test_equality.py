"""Every case of the equality suite (equality.py) equals one device, or is refused as it says there. WHALE_EQUALITY=DIRECTORY in the environment
keeps the results, from which tools/generate/equality_table.py makes docs/equality.md."""

import collections
import concurrent.futures
import itertools
import os
import pathlib
import queue
import re

import equality
import pytest
import test_presets


@pytest.fixture(scope="session")
def results(request):
    """Runs the chosen cases, as many at once as there are cores, each on one of them: where several share the cores, most of the time goes into
    threads of one device that wait for each other. Every fourth case has all cores. So has each strategy in ranks and on devices that are late, of
    which as many run beside the others: most of their time nobody computes."""
    chosen = {key(item.callspec.params): item.callspec.params["case"] for item in request.session.items if "results" in item.fixturenames}
    cores = sorted(os.sched_getaffinity(0))
    free = queue.SimpleQueue()
    for core in cores:
        free.put(core)

    def run(turn, case):
        core = free.get()
        os.sched_setaffinity(0, cores if turn % 4 == 0 else [core])  # of this thread, and so of what it starts
        try:
            return equality.run(case)
        finally:
            free.put(core)

    with concurrent.futures.ThreadPoolExecutor(len(cores)) as pool, concurrent.futures.ThreadPoolExecutor(len(cores)) as late:
        futures = {}
        for turn, ((on, name), case) in enumerate(chosen.items()):
            futures[on, name] = late.submit(equality.run, case, on) if on != equality.ON else pool.submit(run, turn, case)
        yield futures
    if path := os.environ.get("WHALE_EQUALITY"):
        place = "" if equality.ON == "cpu" else f"-{equality.ON}"
        equality.keep(pathlib.Path(path) / f"{'product' if equality.FULL else 'pairs'}{place}.json",
                      {name: future.result() for (on, name), future in futures.items() if on == equality.ON})


def key(params):
    return params.get("on", equality.ON), equality.name_of(params["case"])


@pytest.mark.parametrize("on", ["worlds", "processes", "lag_cpu"] if equality.ON == "cpu" else [])
@pytest.mark.parametrize("case", equality.a_few(), ids=lambda case: equality.identifier(case["strategy"]))
def test_each_strategy_in_ranks_and_on_devices_that_are_late(results, on, case):
    """WHALE_EQUALITY_ON=worlds, =processes, =lag_cpu and =lag run all cases so."""
    told = results[key(dict(on=on, case=case))].result()
    assert told["result"] in ("equal", "partly"), told["command"] + "\n" + told["message"]


@pytest.mark.parametrize("case", equality.cases(), ids=equality.name_of)
def test_equal_to_one_device(results, case):
    told = results[key(dict(case=case))].result()
    if told["result"] == "not run":
        pytest.skip(told["reason"])
    assert told["result"] in ("equal", "refused", "partly"), told["command"] + "\n" + told["message"]


@pytest.mark.parametrize("case", equality.cases(), ids=equality.name_of)
def test_is_proven(case):
    """By `whale prove`, which runs nothing: no false alarm, and a rule for all that is in it."""
    if equality.obstacles(case):
        pytest.skip("not planned or not run, as test_equal_to_one_device says")
    model = equality.model_file(case["model"], case["optimizer"], case["rows"])
    command = [equality.WHALE, "prove", str(model), *equality.options_of(case)]
    told = equality.started(command)
    assert told.returncode == 0, " ".join(command) + "\n" + told.stdout + told.stderr


def test_every_name_selects_its_case():
    """Names are keys of the results and ids of the tests, which `pytest -k` takes in no other letters."""
    names = [equality.name_of(c) for c in equality.cases()] + [test_presets.name_of(*each) for each in test_presets.CASES]
    assert len(set(names)) == len(names)
    assert [name for name in names if not re.fullmatch(r"[\w.-]+", name)] == []


def test_every_pair_of_choices_is_covered():
    """By a case that runs, unless no case with both can be planned."""
    rows = equality.covering(equality.FACTORS)
    runs = [row for row in rows if not equality.obstacles(row)]
    for a in equality.FACTORS:
        for b in equality.FACTORS:
            if a == b:
                continue
            covered = {(r[a], r[b]) for r in runs}
            for x, y in {(x, y) for x in equality.FACTORS[a] for y in equality.FACTORS[b]} - covered:
                assert equality.filled({a: x, b: y}, equality.FACTORS, 0, lambda *_: 0) is None, f"{a}={x} with {b}={y} can be planned"
                assert any(r[a] == x and r[b] == y for r in rows), f"that {a}={x} with {b}={y} is refused is not seen"


def test_no_two_choices_go_together():
    """Every pair stands in some case, and none in most cases of its two values: what three choices do together has to be met too."""
    runs = [row for row in equality.covering(equality.FACTORS) if not equality.obstacles(row)]
    for a, b in itertools.combinations(("optimizer", "zero", "fusion", "offload", "precision", "recompute"), 2):  # no refusal has two of these
        even = len(runs) / len(equality.FACTORS[a]) / len(equality.FACTORS[b])
        for pair, times in collections.Counter((row[a], row[b]) for row in runs).items():
            assert times < max(2.5 * even, 8), f"{a}, {b} = {pair} in {times} of {len(runs)} cases, {even:.0f} would be even"


def test_every_refusal_is_met():
    """A line of REFUSALS that no case meets would be a claim that nothing checks."""
    rows = equality.covering(equality.FACTORS)
    for refusal in equality.REFUSALS:
        assert any(equality.obstacles(row)[:1] == [refusal] for row in rows), refusal


def test_every_partly_compared_case_is_met():
    rows = equality.covering(equality.FACTORS)
    for partly in equality.PARTLY:
        assert any(equality.holds(partly.when, row) and not equality.obstacles(row) for row in rows), partly
