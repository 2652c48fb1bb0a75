"""Every option of every command gets values that make no sense: the answer is an exit code and one message, within seconds."""

import os
import pathlib
import re
import resource
import subprocess

import pytest

WHALE = os.environ.get("WHALE", str(pathlib.Path(__file__).resolve().parents[2] / "build" / "tools" / "whale" / "whale"))
SECONDS = 120  # a hang, on the slowest machine
GARBAGE = {
    "empty": "",
    "space": " ",
    "word": "xyzzy",
    "negative": "-1",
    "zero": "0",
    "large": "1000000000",
    "huge": str(1 << 62),
    "beyond": "99999999999999999999999",
    "exponent": "1e300",
    "nan": "nan",
    "infinite": "-inf",
    "format": "%s%n{}{0}",
    "bytes": b"\xff\xfe\x80",
    "control": "a\nb\x1b[31m",
    "long": "7" * 100_000,
    "text": "cpu:" * 25_000,
    "folder": "/",
    "nested": "[" * 5000,
    "strategy": "replica(9223372036854775807) > split(" * 50,
}
INTERNALS = re.compile(r"std::|stoll|stoi|stod|basic_string|vector::|bad_alloc|nlohmann|json\.exception|terminate|what\(\)|bug in libwhale|[Aa]ssert")
# What each command needs besides the option. Steps and warm-up are work that was asked for: only refusals are tried there.
COMMANDS = {"model": ["mlp", "-o", "{out}"], "inspect": ["{model}"], "plan": ["{model}"], "run": ["{model}", "--steps", "1", "--quiet"],
            "verify": ["{model}", "--steps", "2", "--skip-float64"], "bench": ["{model}", "--steps", "1", "--warmup", "1"], "devices": []}
WORK = {"--steps", "--warmup", "--inner"}
WRITES = {"-o", "--output", "--save", "--trace", "--report"}


def options_of(command):
    text = subprocess.run([WHALE, command, "--help"], capture_output=True, text=True, check=True).stdout
    return [each for each in re.findall(r"^\s+(?:-\w,)?(--[\w-]+)", text, re.M) if each != "--help"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("garbage") / "mlp.whale"
    subprocess.run([WHALE, "model", "mlp", "--layers", "2", "--dim", "4", "--hidden", "4", "--classes", "3", "--batch", "4", "-o", path], check=True,
                   capture_output=True)
    return path


def ask(arguments, folder):
    done = subprocess.run([WHALE, *arguments], capture_output=True, timeout=SECONDS, cwd=folder)
    arguments = [str(each)[:60] for each in arguments]  # for what a failure shows
    said = (done.stderr + done.stdout).decode()  # whatever comes in, UTF-8 comes out
    assert done.returncode >= 0, f"{arguments}: killed by signal {-done.returncode}"
    assert not INTERNALS.search(said), f"{arguments}: {said[:2000]}"
    if done.returncode:
        assert done.stderr.strip(), f"{arguments}: exit {done.returncode} without a word"
        assert len(done.stderr) < 6000, f"{arguments}: {len(done.stderr)} bytes of message"
    return done


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option(command, model, tmp_path):
    needs = [each.format(model=model, out=tmp_path / "out.whale") for each in COMMANDS[command]]
    options = options_of(command)
    if command in ("run", "verify", "bench"):  # those of planning are tried there
        options = [each for each in options if each not in options_of("plan")]
    assert len(options) >= (1 if command == "devices" else 2)
    for option in options:
        for name, value in GARBAGE.items():
            if option in WORK and name in ("large", "huge") or option in WRITES and name in ("folder", "format", "word", "zero", "negative"):
                continue
            if isinstance(value, str) and "\0" in value:
                continue
            ask([command, *needs, option, value], tmp_path)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_file(command, model, tmp_path):
    for value in GARBAGE.values():
        done = ask([command, value, *COMMANDS[command][1:]] if command not in ("model", "devices") else [command, value], tmp_path)
        assert done.returncode != 0, (command, value)


def test_numbers_that_would_mean_the_default_are_refused(tmp_path):
    """-1 stands for "not given" inside: a user who writes it must hear of it."""
    for option in ("--layers", "--dim", "--batch", "--lr", "--dropout", "--clip", "--accumulation"):
        done = ask(["model", "mlp", "-o", tmp_path / "m.whale", option, "-1"], tmp_path)
        assert done.returncode != 0 and b"expected a" in done.stderr, (option, done.stderr)


def test_an_unknown_device_is_named(model, tmp_path):
    for command in ("plan", "run", "verify"):
        done = ask([command, model, "--devices", "xyzzy:2"], tmp_path)
        assert b"'xyzzy' is not a kind or type of device" in done.stderr and b"cpu:N" in done.stderr, done.stderr


def test_long_text_is_shown_once_by_both_ends(model, tmp_path):
    done = ask(["plan", model, "--devices", "cpu:1," + "z" * 100_000], tmp_path)
    assert b"bytes) ..." in done.stderr and done.stderr.count(b"zzzz") and len(done.stderr) < 1000, len(done.stderr)


def test_too_little_memory_names_the_call(tmp_path):
    """The caller's own thread, where no limit of the engine's options speaks first."""
    model = tmp_path / "m.whale"
    ask(["model", "mlp", "--layers", "2", "--dim", "4", "--hidden", "4", "--classes", "3", "--batch", str(1 << 22), "-o", model], tmp_path)
    done = subprocess.run([WHALE, "plan", model, "--devices", "null:1", "--accumulation", str(1 << 22)], capture_output=True, timeout=SECONDS,
                          preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (200 << 20, 200 << 20)))
    assert done.returncode > 0 and b"too little memory for whale_plan_create" in done.stderr, done.stderr
