"""The equality suite: cases of model x strategy x devices x optimizer x ZeRO x micro-batches x precision and more, and what one run of a case says.

Every pair of choices that can be planned is in some case (a covering array, made greedily); WHALE_FULL=1 in the environment takes the product of
models, strategies with their devices and ZeRO instead, the other choices by chance. Each case is 8 steps (there 20) against one device, by `whale verify`: in
float64 on reference devices, and in the case's own precision on its own devices. A case runs as its name says. What cannot be planned stands in
REFUSALS, with the words that the planner says; a refusal that is not there, and a case there that is not refused, are failures.

WHALE_EQUALITY_ON says what the plans run on: `cpu` (as above), `ref` and `lag` (in every precision), `worlds`: as above, in two or three ranks
that share flat messages and nothing else, or `processes`: as above, in up to eight processes, each of which compares."""

import collections
import errno
import functools
import hashlib
import itertools
import json
import os
import pathlib
import re
import subprocess
import tempfile

WHALE = os.environ.get("WHALE", str(pathlib.Path(__file__).resolve().parents[2] / "build" / "tools" / "whale" / "whale"))
FULL = bool(os.environ.get("WHALE_FULL"))
PLACES = ("cpu", "ref", "lag", "lag_cpu", "worlds", "processes")
ON = os.environ.get("WHALE_EQUALITY_ON", "cpu")
assert ON in PLACES, f"WHALE_EQUALITY_ON is '{ON}', expected one of {', '.join(PLACES)}"
STEPS = "20" if FULL else "8"
TEXT = ["--dim", "16", "--heads", "4", "--seq", "6", "--vocab", "25", "--batch", "6"]
MODELS = {
    "mlp": ["mlp", "--layers", "4", "--dim", "10", "--hidden", "14", "--classes", "7", "--batch", "12"],
    "gpt": ["gpt", "--layers", "2", *TEXT, "--clip", "1.0", "--dropout", "0.1"],
    "gpt-tied": ["gpt", "--tied", "--layers", "2", *TEXT],
    "bert": ["bert", "--layers", "1", *TEXT, "--dropout", "0.1"],
    "t5": ["t5", "--layers", "1", *TEXT],
    "moe-gpt": ["moe-gpt", "--layers", "2", *TEXT, "--experts", "4", "--capacity", "0.75"],
    "m6": ["m6", "--layers", "2", *TEXT, "--image", "3", "--experts", "4"],
    "llama": ["llama", "--layers", "2", *TEXT, "--kv-heads", "2", "--hidden", "24", "--clip", "1.0"],
    "deepseek": ["deepseek", "--layers", "2", *TEXT, "--dense-layers", "1", "--head-dim", "4", "--hidden", "6", "--experts", "4"],
    "m6-decoder": ["m6-10b", "--layers", "1", "--decoder", "1", *TEXT, "--image", "3"],
    "gnmt": ["gnmt", "--layers", "2", "--dim", "8", "--seq", "4", "--vocab", "25", "--batch", "6"],
    "resnet": ["resnet", "--layers", "8", "--dim", "4", "--image", "8", "--batch", "6", "--classes", "6"],
    "resnet-groups": ["resnet", "--layers", "8", "--dim", "4", "--image", "8", "--batch", "12", "--classes", "6", "--norm-groups", "6"],
    "classifier100k": ["classifier100k", "--dim", "6", "--classes", "30", "--batch", "8"],
    "cosmoflow": ["cosmoflow", "--layers", "2", "--dim", "4", "--image", "8", "--hidden", "12", "--batch", "6"],
    "unet3d": ["unet3d", "--layers", "2", "--dim", "4", "--image", "4", "--batch", "6"],
    "dlrm": ["dlrm", "--layers", "3", "--dim", "8", "--vocab", "30", "--seq", "2", "--hidden", "16", "--batch", "12"],
}
# By family, the device counts with the strategy for them; {m}: micro-batches of the case.
STRATEGIES = {
    "replica": {2: "replica", 5: "replica", 7: "replica", 3: "replica(3, shares=[3,2,1])", 4: "replica(4, shares=[2,0,1,3])"},
    "split": {2: "split(2)", 4: "split", 3: "split(3, shares=[3,2,1])", 5: "split"},
    "pipeline, gpipe": {2: "pipeline(2, micro_batches={m}, schedule=gpipe)", 3: "pipeline(3, micro_batches={m}, schedule=gpipe)"},
    "pipeline, 1f1b": {2: "pipeline(2, micro_batches={m})", 3: "pipeline(micro_batches={m})", 4: "pipeline(4, micro_batches={m})"},
    "pipeline, interleaved": {2: "pipeline(2, micro_batches={m}, schedule=interleaved, virtual_stages=2)"},
    "pipeline, zb_h1": {3: "pipeline(3, micro_batches={m}, schedule=zb_h1)"},
    "pipeline, zb_v": {2: "pipeline(2, micro_batches={m}, schedule=zb_v)"},
    "replica > split": {4: "replica(2) > split(2)", 6: "replica(2) > split(3)", 8: "replica > split(2)", 5: "replica(1) > split(5)"},
    "split > replica": {4: "split(2) > replica(2)", 6: "split(2) > replica(3)"},
    "replica > replica": {6: "replica(2, shares=[2,1]) > replica(3)"},
    "replica > split, ragged": {3: "replica(2) > split(shares=[[1,1],[1]])", 5: "replica > split(shares=[[2,1,1],[1,1]])", 4: "replica(2) > split(2, shares=[[3,1],[1,1]])", 6: "replica(2) > split(3, shares=[[2,0,1],[1,1,1]])",
                                8: "replica(2) > pipeline(2, micro_batches={m}) > split(2, shares=[[3,1],[1,2]])"},
    "replica > pipeline": {4: "replica(2) > pipeline(2, micro_batches={m})", 6: "replica(3, shares=[2,1,1]) > pipeline(2, micro_batches={m})"},
    "pipeline > replica": {4: "pipeline(2, micro_batches={m}) > replica(2)", 6: "pipeline(2, micro_batches={m}) > replica(3, shares=[1,2,1])",
                           7: "pipeline(2, micro_batches={m}) > replica"},
    "pipeline > split": {4: "pipeline(2, micro_batches={m}) > split(2)", 6: "pipeline(2, micro_batches={m}) > split(3)"},
    "replica > pipeline > split": {8: "replica(2) > pipeline(2, micro_batches={m}) > split(2)"},
}
FACTORS = {
    "model": list(MODELS),
    "strategy": list(STRATEGIES),
    "devices": list(range(5)),  # the n-th of the family's counts, round and round
    "optimizer": ["own", "sgd", "momentum", "adam", "adamw", "lamb", "adagrad", "adafactor"],
    "zero": [0, 1, 2, 3],
    "micro_batches": [1, 2, 3],
    "fusion": [True, False],
    "offload": ["", "state", "gradients", "parameters", "activations", "state,gradients,parameters,activations"],
    "precision": ["f64", "f32", "bf16", "f16"],  # f64: on reference devices, the others on cpu
    "recompute": ["none", "selective", "full"],
    "rows": [False, True],  # of tables: only those that a step looked up are updated
    "sums": ["", "bf16", "f16", "adasum"],  # of gradients
    "exact": [False, True],
}
RATES = {"adam": "0.001", "sgd": "0.02", "momentum": "0.01", "adamw": "0.001", "lamb": "0.002", "adagrad": "0.01", "adafactor": "0.002"}

SPLITS = {strategy for strategy in STRATEGIES if "split" in strategy}
REPLICAS = {strategy for strategy in STRATEGIES if "replica" in strategy}
PIPELINES = {strategy for strategy in STRATEGIES if "pipeline" in strategy}
TABLES = {"gpt", "gpt-tied", "bert", "t5", "moe-gpt", "m6", "m6-decoder", "llama", "deepseek", "gnmt", "dlrm"}  # models that look rows up
TIED = {"gpt-tied", "bert", "t5", "moe-gpt", "m6", "m6-decoder"}  # whose table is multiplied by as well
# What the planner refuses: of cases with all of `when` (a value, or one of several), in these words, for this reason.
Refusal = collections.namedtuple("Refusal", "when words why")
REFUSALS = [
    Refusal({"rows": True, "optimizer": {"lamb", "adafactor"}}, "sparse updates of rows need sgd, adam, adamw or adagrad",
            "LAMB and Adafactor use norms of whole parameters, which updates of some rows do not know"),
    Refusal({"rows": True, "optimizer": "own", "model": {"t5", "m6-decoder"}}, "sparse updates of rows need sgd, adam, adamw or adagrad",
            "their own optimizer is Adafactor, as above"),
    Refusal({"rows": True, "model": set(MODELS) - TABLES}, "no trained parameter of this model is one", "the model has no table"),
    Refusal({"rows": True, "model": TIED}, "need that it is only looked up", "the output multiplies by the whole table, so every row has a gradient"),
    Refusal({"rows": True, "optimizer": "momentum", "model": TABLES - TIED}, "with momentum 0.9", "momentum moves rows that were not looked up"),
    Refusal({"rows": True, "model": {"gpt", "llama"}}, "needs the norm of the whole gradient", "clipping needs the norm of a gradient that is never made whole"),
    Refusal({"rows": True, "sums": "adasum"}, "Adasum with sparse updates", "Adasum combines gradients of one shape; rows of tables are none"),
    Refusal({"exact": True, "sums": {"bf16", "f16"}}, "exact mode with a gradient dtype", "rounded sums depend on the number of replicas"),
    Refusal({"exact": True, "sums": "adasum"}, "exact mode with Adasum", "Adasum depends on the number of replicas"),
    Refusal({"exact": True, "strategy": "replica > split, ragged"}, "shares that differ between replicas",
            "replicas that cut an op differently add up differently"),
    Refusal({"sums": "adasum", "strategy": SPLITS}, "Adasum with a split", "its products are over whole parameters, which no device has"),
    Refusal({"sums": "adasum", "strategy": "pipeline > replica", "devices": 2, "model": TIED | {"gnmt"}}, "which have 3 and 4 replicas",
            "the stages that use the tied table (GNMT: the encoder's weights, at each word) have 4 and 3 replicas: none of one is one of the other"),
    Refusal({"model": "resnet", "micro_batches": {2, 3}}, "mixes all samples of the batch",
            "statistics of the whole batch cannot be cut into micro-batches; those of groups can (resnet-groups)"),
]
# What is not run, though it could be planned: of cases with all of `when`, for this reason. They are in no list of cases; docs/equality.md names them.
NotRun = collections.namedtuple("NotRun", "when why")
NOT_RUN = [
    NotRun({"strategy": PIPELINES, "micro_batches": 1, "model": set(MODELS) - {"resnet"}}, "one micro-batch leaves a schedule nothing to order: only resnet, which can have no more, runs so"),
]


# Cases whose plan is compared without an option, and not with it: of cases with all of `when`, where verify says why in these words.
Partly = collections.namedtuple("Partly", "when words why")
PARTLY = [
    Partly({"model": {"resnet", "resnet-groups"}, "sums": "adasum", "strategy": REPLICAS}, "batch norm mixes",
           "Adasum is compared with the gradients of each replica's samples alone, and batch norm mixes those of all"),
]


def values_of(wanted):
    return sorted(wanted) if isinstance(wanted, set) else [wanted]


def holds(when, case):
    """Whether a case, which may lack choices yet, has all of these."""
    return all(name in case and case[name] in values_of(wanted) for name, wanted in when.items())


def obstacles(case):
    """Why the case cannot be planned or is not run."""
    return [each for each in (*NOT_RUN, *REFUSALS) if holds(each.when, case)]


def covering(factors):
    """Rows so that every pair of values of two factors stands in one: the first open pair, then for each other factor the value that
    closes most. A row avoids what cannot be planned; a pair that always meets it gets a row that does, and so does each line of REFUSALS."""
    names = list(factors)
    open_pairs = {(a, x, b, y): None for a, b in itertools.combinations(names, 2) for x in factors[a] for y in factors[b]}

    def pair(a, x, b, y):
        return (a, x, b, y) if names.index(a) < names.index(b) else (b, y, a, x)

    rows = []
    while open_pairs:
        a, x, b, y = next(iter(open_pairs))
        closes = lambda row, name, value: sum(pair(name, value, other, row[other]) in open_pairs for other in row)
        row = filled({a: x, b: y}, factors, len(rows), closes)
        if row:
            for c, d in itertools.combinations(names, 2):
                open_pairs.pop((c, row[c], d, row[d]), None)
        else:
            del open_pairs[(a, x, b, y)]
        rows.append(row or refused({a: x, b: y}, factors))
    for refusal in REFUSALS:
        start = {name: values_of(wanted)[0] for name, wanted in refusal.when.items()}
        if all(value in factors.get(name, ()) for name, value in start.items()) and not any(obstacles(row)[:1] == [refusal] for row in rows):
            rows.append(refused(start, factors))
    return [{name: row[name] for name in names} for row in rows]


def filled(row, factors, turn, gain):
    """The row with the other factors: of the values that meet no obstacle the one that gains most, ties in an order that each factor has of its
    own in each turn (one order for all would put the same values together again and again). None: there is no such row."""
    if obstacles(row):
        return None
    name = next((name for name in factors if name not in row), None)
    if name is None:
        return row
    for value in sorted(factors[name], key=lambda value: (-gain(row, name, value), hashlib.sha1(f"{turn} {name} {value}".encode()).digest())):
        if whole := filled({**row, name: value}, factors, turn, gain):
            return whole
    return None


def refused(row, factors):
    """The row with the other factors so that as few lines as can be refuse it."""
    for name in factors:
        if name not in row:
            row = {**row, name: min(factors[name], key=lambda value: len(obstacles({**row, name: value})))}
    return row


def full():
    """The product of what decides the plan's form; the other choices by chance, of those that can be planned with it."""
    product = ("model", "strategy", "devices", "zero")
    turns = itertools.count()
    for model, strategy in itertools.product(FACTORS["model"], FACTORS["strategy"]):
        for devices, zero in itertools.product(range(len(STRATEGIES[strategy])), FACTORS["zero"]):
            chosen = dict(zip(product, (model, strategy, devices, zero)))
            yield filled(chosen, FACTORS, next(turns), lambda *_: 0)


@functools.cache
def cases():
    return list(full()) if FULL else covering(FACTORS)


@functools.cache
def a_few():
    """A case of each strategy, of those of the pairs that run, and take little time: gpt for embeddings, ties and dropout, mlp where it cannot."""
    few = []
    for strategy in STRATEGIES:
        chosen = [case for case in covering(FACTORS) if case["strategy"] == strategy and not obstacles(case)]
        few.append(min(chosen, key=lambda case: (not case["model"].startswith(("gpt", "mlp", "moe")), case["precision"] == "f64")))
    return few


def plan_of(case, on=ON):
    """Devices and strategy as text."""
    family = list(STRATEGIES[case["strategy"]].items())
    count, text = family[case["devices"] % len(family)]
    text = text.format(m=case["micro_batches"])
    if on.startswith("lag"):  # a third of the seeds each are late in a way of their own
        kind = "lag" if case["precision"] == "f64" else on
        return f"{kind}@{int(hashlib.sha1(repr(sorted(case.items())).encode()).hexdigest(), 16) % 1000}*{count}", text
    return f"{'ref' if case['precision'] == 'f64' or on == 'ref' else 'cpu'}:{count}", text


def ranks_of(case):
    return 2 if list(STRATEGIES[case["strategy"]])[case["devices"] % len(STRATEGIES[case["strategy"]])] < 5 else 3


def processes_of(case):
    """Two to eight, some with several devices."""
    devices = list(STRATEGIES[case["strategy"]])[case["devices"] % len(STRATEGIES[case["strategy"]])]
    return min(devices, 2 + int(hashlib.sha1(repr(sorted(case.items())).encode()).hexdigest(), 16) % (devices - 1)) if devices > 2 else devices


def identifier(text):
    """Of a test: words with "-" between, which a shell and the options of pytest (`-k`, `FILE::TEST[...]`) take as they are."""
    return re.sub(r"[^\w.]+", "-", text).strip("-")


def name_of(case):
    devices, text = plan_of(case, "cpu")
    short = lambda each: "-".join(part[:2] for part in each.split(","))
    more = [case["precision"], case["optimizer"] if case["optimizer"] != "own" else "", f"zero{case['zero']}" if case["zero"] else "",
            f"m{case['micro_batches']}", "" if case["fusion"] else "unfused", f"offload-{short(case['offload'])}" if case["offload"] else "",
            f"recompute-{case['recompute']}" if case["recompute"] != "none" else "", "rows" if case["rows"] else "",
            f"sums-{case['sums']}" if case["sums"] else "", "exact" if case["exact"] else ""]
    return identifier("-".join([case["model"], devices.replace(":", ""), text] + [m for m in more if m]))


@functools.cache
def folder():
    path = pathlib.Path(tempfile.gettempdir()) / f"whale-equality-{os.getpid()}"
    path.mkdir(exist_ok=True)
    return path


@functools.cache
def model_file(model, optimizer, rows):
    path = folder() / f"{model}-{optimizer}{'-rows' if rows else ''}.whale"
    more = ["--optimizer", optimizer, "--lr", RATES[optimizer]] if optimizer != "own" else []
    done = started([WHALE, "model", *MODELS[model], *more, "--sparse-updates" if rows else "--no-sparse-updates", "-o", str(path)])
    return path if done.returncode == 0 else done


def options_of(case, on=ON):
    devices, text = plan_of(case, on)
    options = ["--ranks", str(ranks_of(case))] if on == "worlds" else []
    options += ["--devices", devices, "--strategy", text, "--precision", case["precision"]]
    options += ["--zero", str(case["zero"])] if case["zero"] else []
    options += ["--offload", case["offload"]] if case["offload"] else []
    options += ["--recompute", case["recompute"]] if case["recompute"] != "none" else []
    options += ["--adasum"] if case["sums"] == "adasum" else ["--gradient-dtype", case["sums"]] if case["sums"] else []
    options += ["--accumulation", str(case["micro_batches"])] if "pipeline" not in text else []
    options += [] if case["fusion"] else ["--no-fusion"]
    return options + (["--exact"] if case["exact"] else [])


def started(command, timeout=900):
    """Starting a process beside busy threads fails at times with EFAULT, on some kernels; a second attempt does not."""
    for attempt in range(5):
        try:
            return subprocess.run(command, capture_output=True, text=True, timeout=timeout)
        except OSError as e:
            if e.errno != errno.EFAULT or attempt == 4:
                raise


def keep(file, results):
    """Results by name; those of an earlier run of other cases stay in the file."""
    before = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**before, **results}, indent=1))


def told_by(done, case):
    """A case's result: "equal", "differs" or "not compared" (with the comparisons), "partly" equal, "refused" as was expected, or "failed"."""
    wanted = obstacles(case)
    if done.returncode in (0, 1, 3):
        if wanted:
            return {"result": "failed", "message": f"was planned, and REFUSALS says that it is refused: {wanted[0].words}"}
        rows = json.loads(done.stdout)["comparisons"]
        open_rows = [row for row in rows if not row["passed"]]
        partly = next((each for each in PARTLY if holds(each.when, case)), None)
        if done.returncode == 3 and partly and len(open_rows) < len(rows) and all(partly.words in row["reason"] for row in open_rows):
            return {"result": "partly", "comparisons": rows, "reason": partly.why, "message": partly.why}
        return {"result": {0: "equal", 1: "differs", 3: "not compared"}[done.returncode], "comparisons": rows, "reason": "", "message": json.dumps(rows, indent=1)}
    message = done.stderr.strip()[-900:]
    said = next((each for each in wanted if each.words in message), None)
    if said and "after pass" not in message:
        return {"result": "refused", "reason": said.why, "message": message}
    return {"result": "failed", "message": message or f"ended with {done.returncode}"}


def run(case, on=ON, command="verify", more=("--steps", STEPS, "--json")):
    if left := next((each for each in obstacles(case) if isinstance(each, NotRun)), None):
        return dict(case, result="not run", reason=left.why, message=left.why, command="")
    model = model_file(case["model"], case["optimizer"], case["rows"])
    if not isinstance(model, pathlib.Path):
        return dict(case, command=" ".join(model.args), **told_by(model, case))
    arguments = [WHALE, command, str(model), *options_of(case, on), *more]
    if on == "processes":
        arguments = [WHALE, "launch", "-n", str(processes_of(case)), "--", *arguments]
    text = " ".join(f"'{c}'" if set(c) & set(" ([>") else c for c in ["whale", *arguments[1:]])
    try:
        return dict(case, command=text, **told_by(started(arguments), case))
    except subprocess.TimeoutExpired:
        return dict(case, command=text, result="failed", message="no end after 900 s")
