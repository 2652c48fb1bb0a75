"""Every case of the equality suite (equality.py) equals one device, or the planner refuses it by name. WHALE_EQUALITY=FILE in the environment
keeps the results, from which tools/generate/equality_table.py makes docs/equality.md."""

import concurrent.futures
import json
import os

import equality
import pytest


@pytest.fixture(scope="session")
def results(request):
    """Runs the chosen cases, as many at once as there are cores."""
    chosen = {item.callspec.params["case"]["name"]: item.callspec.params["case"] for item in request.session.items if "results" in item.fixturenames}
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        futures = {name: pool.submit(equality.run, {k: v for k, v in case.items() if k != "name"}) for name, case in chosen.items()}
        yield futures
    if path := os.environ.get("WHALE_EQUALITY"):
        with open(path, "w") as file:
            json.dump([f.result() for f in futures.values()], file, indent=1)


@pytest.mark.parametrize("case", [dict(c, name=equality.name_of(c)) for c in equality.cases()], ids=lambda c: c["name"])
def test_equal_to_one_device(results, case):
    told = results[case["name"]].result()
    if told["result"] == "refused":
        pytest.xfail("refused: " + told["message"])
    assert told["result"] == "equal", told["command"] + "\n" + told["message"]


def test_every_pair_of_choices_is_covered():
    rows = equality.covering(equality.FACTORS)
    for a in equality.FACTORS:
        for b in equality.FACTORS:
            if a != b:
                assert {(r[a], r[b]) for r in rows} == {(x, y) for x in equality.FACTORS[a] for y in equality.FACTORS[b]}
