"""The equality suite: cases of model x strategy x devices x optimizer x ZeRO x micro-batches x fusion, and what one run of a case says.

Every pair of choices is in some case (a covering array, made greedily); WHALE_FULL=1 in the environment takes the product of models, strategies
with their devices and ZeRO instead. Each case is 20 steps on reference devices in float64 against one device, by `whale verify`."""

import errno
import functools
import itertools
import json
import os
import pathlib
import subprocess
import tempfile

WHALE = os.environ.get("WHALE", str(pathlib.Path(__file__).resolve().parents[2] / "build" / "tools" / "whale" / "whale"))
FULL = bool(os.environ.get("WHALE_FULL"))
STEPS = "20"
TEXT = ["--dim", "16", "--heads", "4", "--seq", "6", "--vocab", "25", "--batch", "6"]
MODELS = {
    "mlp": ["mlp", "--layers", "4", "--dim", "10", "--hidden", "14", "--classes", "7", "--batch", "12"],
    "gpt": ["gpt", "--layers", "2", *TEXT, "--clip", "1.0", "--dropout", "0.1"],
    "gpt-tied": ["gpt", "--tied", "--layers", "2", *TEXT],
    "bert": ["bert", "--layers", "1", *TEXT, "--dropout", "0.1"],
    "t5": ["t5", "--layers", "1", *TEXT],
    "moe-gpt": ["moe-gpt", "--layers", "2", *TEXT, "--experts", "4", "--capacity", "0.75"],
    "m6": ["m6", "--layers", "2", *TEXT, "--image", "3", "--experts", "4"],
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
    "pipeline, interleaved": {2: "pipeline(2, micro_batches={m}, schedule=interleaved, chunks=2)"},
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
    "optimizer": ["", "sgd", "momentum", "adamw", "lamb", "adagrad", "adafactor"],  # "": the model's own
    "zero": [0, 1, 2, 3],
    "micro_batches": [1, 2, 3],
    "fusion": [True, False],
    "offload": ["", "state", "gradients", "parameters", "activations", "state,gradients,parameters,activations"],
}
# Adafactor divides by the root of the mean square however small that is: where a true gradient is zero (biases of keys under softmax, biases
# before a norm, channels of a small ResNet that no sample activates) it turns rounding into steps, on one device as on many. These models take
# Adam instead.
ZERO_GRADIENTS = {"gpt", "gpt-tied", "bert", "moe-gpt", "m6", "gnmt", "unet3d", "resnet", "resnet-groups"}
# What the planner may refuse, by words of its message.
REFUSALS = {
    "batch_norm's attribute groups": "statistics of the whole batch cannot be cut into micro-batches; those of groups can (resnet-groups)",
    "needs all samples of": "an op needs all samples at once, which micro-batches do not have",
    "not implemented": "not implemented",
}
RATES = {"adam": "0.001", "sgd": "0.02", "momentum": "0.01", "adamw": "0.001", "lamb": "0.002", "adagrad": "0.01", "adafactor": "0.002"}


def covering(factors):
    """Rows so that every pair of values of two factors stands in one: the first open pair, then for each other factor the value that
    closes most."""
    names = list(factors)
    open_pairs = {(a, x, b, y): None for a, b in itertools.combinations(names, 2) for x in factors[a] for y in factors[b]}

    def pair(a, x, b, y):
        return (a, x, b, y) if names.index(a) < names.index(b) else (b, y, a, x)

    rows = []
    while open_pairs:
        a, x, b, y = next(iter(open_pairs))
        row = {a: x, b: y}
        for name in names:
            if name in row:
                continue
            closes = lambda value: sum(pair(name, value, other, row[other]) in open_pairs for other in row)
            turned = [factors[name][(i + len(rows)) % len(factors[name])] for i in range(len(factors[name]))]  # ties: in turn
            row[name] = max(turned, key=closes)
        for c, d in itertools.combinations(names, 2):
            open_pairs.pop((c, row[c], d, row[d]), None)
        rows.append({name: row[name] for name in names})
    return rows


def full():
    turn = {name: itertools.cycle(FACTORS[name]) for name in ("optimizer", "micro_batches", "fusion", "offload")}
    for model, strategy in itertools.product(FACTORS["model"], FACTORS["strategy"]):
        for devices, zero in itertools.product(range(len(STRATEGIES[strategy])), FACTORS["zero"]):
            yield {"model": model, "strategy": strategy, "devices": devices, "optimizer": next(turn["optimizer"]), "zero": zero,
                   "micro_batches": next(turn["micro_batches"]), "fusion": next(turn["fusion"]),
                   "offload": next(turn["offload"])}


@functools.cache
def cases():
    return list(full()) if FULL else covering(FACTORS)


def micro_batches_of(case):
    """Batch norm needs the whole batch: that more is refused is seen under two strategies."""
    return 1 if case["model"] == "resnet" and case["strategy"] not in ("replica", "pipeline, 1f1b") else case["micro_batches"]


def plan_of(case):
    """Devices and strategy as text."""
    family = list(STRATEGIES[case["strategy"]].items())
    count, text = family[case["devices"] % len(family)]
    return f"ref:{count}", text.format(m=micro_batches_of(case))


def name_of(case):
    devices, text = plan_of(case)
    more = [case["optimizer"], f"zero{case['zero']}" if case["zero"] else "", f"m{micro_batches_of(case)}", "" if case["fusion"] else "unfused",
            "-".join(["offload", *(each[:2] for each in case["offload"].split(","))]) if case["offload"] else ""]
    return "-".join([case["model"], devices.replace(":", ""), text.replace(" ", "")] + [m for m in more if m])


@functools.cache
def model_file(model, optimizer):
    if optimizer == "adafactor" and model in ZERO_GRADIENTS:
        optimizer = "adam"
    folder = pathlib.Path(tempfile.gettempdir()) / f"whale-equality-{os.getpid()}"
    folder.mkdir(exist_ok=True)
    path = folder / f"{model}-{optimizer or 'own'}.whale"
    more = ["--optimizer", optimizer, "--lr", RATES[optimizer]] if optimizer else []
    if model == "dlrm" and optimizer in ("momentum", "lamb", "adafactor"):  # the others update the rows that were looked up
        more.append("--no-lazy")
    started([WHALE, "model", *MODELS[model], *more, "-o", str(path)]).check_returncode()
    return path


def command_of(case):
    devices, text = plan_of(case)
    command = [WHALE, "verify", str(model_file(case["model"], case["optimizer"])), "--devices", devices, "--strategy", text, "--steps", STEPS, "--json"]
    if case["zero"]:
        command += ["--zero", str(case["zero"])]
    if case["offload"]:
        command += ["--offload", case["offload"]]
    if "pipeline" not in case["strategy"]:
        command += ["--accumulation", str(micro_batches_of(case))]
    return command if case["fusion"] else [*command, "--no-fusion"]


def started(command):
    """Starting a process beside busy threads fails at times with EFAULT, on some kernels; a second attempt does not."""
    for attempt in range(5):
        try:
            return subprocess.run(command, capture_output=True, text=True, timeout=600)
        except OSError as e:
            if e.errno != errno.EFAULT or attempt == 4:
                raise


def run(case):
    """The case with its result: "equal", "differs" (both with the largest deviation), "refused" (with what it said), or "failed"."""
    command = command_of(case)
    told = dict(case, command=" ".join(f"'{c}'" if " " in c else c for c in ["whale", *command[1:]]))
    try:
        done = started(command)
    except subprocess.TimeoutExpired:
        return dict(told, result="failed", message="no end after 600 s")
    if done.returncode in (0, 1):
        row = next(r for r in json.loads(done.stdout)["comparisons"] if r["precision"] == "float64")
        error = max(row["loss_error"], row["parameter_error"])
        return dict(told, result="equal" if row["passed"] else "differs", error=error, message=f"{row}")
    message = done.stderr.strip()
    for words, reason in REFUSALS.items():
        if words in message and "after pass" not in message:
            return dict(told, result="refused", reason=reason, message=message[-600:])
    return dict(told, result="failed", message=message[-600:])
