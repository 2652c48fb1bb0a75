"""The zoo's models, which no preset of the command line knows, under the pairs of the equality suite's strategies and of options: each plan equals
one device, by `whale verify` on the saved graph. And with the annotations that they are written with; and each model in float32 and in bfloat16, on
cpu devices, under strategies of which each is in a case."""

import concurrent.futures
import os
import pathlib
import sys

import pytest
import zoo

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "equivalence"))
import equality

FACTORS = {
    "model": list(zoo.SIZES),
    "strategy": list(equality.STRATEGIES),
    "devices": list(range(5)),  # the n-th of the family's counts, round and round
    "zero": [0, 1, 2, 3],
    "micro_batches": [1, 2, 3],
    "fusion": [True, False],
    "offload": ["", "state", "gradients", "parameters", "activations", "state,gradients,parameters,activations"],
    "recompute": ["none", "selective", "full"],
    "bitwise": [False, True],  # exact mode
}
BATCH, STEPS = 6, "4"
LOW = [equality.filled({"model": model, "strategy": list(equality.STRATEGIES)[n % len(equality.STRATEGIES)], "precision": precision, "micro_batches": 2 + n % 2,
                        "bitwise": False}, FACTORS, n, lambda *_: 0)
       for n, (model, precision) in enumerate((model, precision) for model in zoo.SIZES for precision in ("f32", "bf16"))]
ANNOTATED = {"vit": 2, "convnext": 3, "llama": 4, "mixer": 2, "unet": 2, "lstm": 3, "tied": 2, "vae": 5}  # devices


def plan_of(case):
    family = list(equality.STRATEGIES[case["strategy"]].items())
    count, text = family[case["devices"] % len(family)]
    return f"{'cpu' if 'precision' in case else 'ref'}:{count}", text.format(m=case["micro_batches"])


def name_of(case):
    return "-".join([case["model"], *plan_of(case), *[f"{k}:{v}" for k, v in case.items() if v and k not in ("model", "strategy", "devices")]]).replace(" ", "")


def command(file, case):
    devices, text = plan_of(case)
    options = ["--zero", str(case["zero"]), "--recompute", case["recompute"], "--offload", case["offload"]] if case["offload"] else [
        "--zero", str(case["zero"]), "--recompute", case["recompute"]]
    options += [] if "pipeline" in text else ["--accumulation", str(case["micro_batches"])]
    options += ([] if case["fusion"] else ["--no-fusion"]) + (["--exact"] if case["bitwise"] else [])
    options += ["--precision", case["precision"], "--skip-float64"] if "precision" in case else ["--precision", "f64"]
    return [str(file), "--devices", devices, "--strategy", text, *options]


def must_be_refused(case):
    """Replicas that cut an op differently add up differently, which exact mode does not allow."""
    return case["bitwise"] and case["strategy"] == "replica > split, ragged"


@pytest.fixture(scope="session")
def results(request, tmp_path_factory):
    """Runs the chosen cases, as many at once as there are cores."""
    folder = tmp_path_factory.mktemp("zoo")
    for name in zoo.SIZES:
        zoo.graph(name, BATCH).seal().save(folder / f"{name}.whale")
        zoo.graph(name, 8, annotated=True).seal().save(folder / f"{name}-annotated.whale")

    def verify(arguments):
        return equality.started([equality.WHALE, "verify", *arguments, "--steps", STEPS, "--json"])

    chosen = [item.callspec.params for item in request.session.items if "results" in item.fixturenames]
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        yield {key(p): pool.submit(verify, command(folder / f"{p['case']['model']}.whale", p["case"]) if "case" in p else
                                   [str(folder / f"{p['name']}-annotated.whale"), "--devices", f"ref:{ANNOTATED[p['name']]}", "--precision", "f64"]) for p in chosen}


def key(params):
    return name_of(params["case"]) if "case" in params else params["name"]


@pytest.mark.parametrize("case", equality.covering(FACTORS), ids=name_of)
def test_equal_to_one_device(results, case):
    done = results[key(dict(case=case))].result()
    if must_be_refused(case):
        assert done.returncode not in (0, 1, 3) and "shares that differ between replicas" in done.stderr, done.stderr[-2000:] + done.stdout[-2000:]
    else:
        assert done.returncode == 0, " ".join(done.args) + "\n" + done.stderr[-2000:] + done.stdout[-4000:]


@pytest.mark.parametrize("case", LOW, ids=name_of)
def test_equal_in_fewer_bits(results, case):
    done = results[key(dict(case=case))].result()
    assert done.returncode == 0, " ".join(done.args) + "\n" + done.stderr[-2000:] + done.stdout[-4000:]


@pytest.mark.parametrize("name", zoo.SIZES)
def test_as_annotated(results, name):
    done = results[name].result()
    assert done.returncode == 0, " ".join(done.args) + "\n" + done.stderr[-2000:] + done.stdout[-4000:]
