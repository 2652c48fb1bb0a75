"""How commands end: what was printed has arrived or the exit code says no; a signal ends training after a step, with its checkpoint."""

import os
import re
import signal
import subprocess
import time

import numpy as np
import pytest
from test_cli import WHALE, files, lines, whale  # noqa: F401


pytestmark = pytest.mark.alone

PRINT = {"plan": ["plan", "{f}/gpt.whale"], "inspect": ["inspect", "{f}/gpt.whale"], "inspect json": ["inspect", "{f}/gpt.whale", "--json"],
         "verify": ["verify", "{f}/mlp.whale", "--steps", "2", "--skip-float64"], "run json": ["run", "{f}/mlp.whale", "--steps", "2", "--json"],
         "run quiet": ["run", "{f}/mlp.whale", "--steps", "2", "--quiet"], "bench": ["bench", "{f}/mlp.whale", "--steps", "1", "--warmup", "1"],
         "devices": ["devices"], "help": ["--help"], "version": ["--version"], "model": ["model", "mlp", "-o", "{f}/again.whale"]}


def ended(command, files, **options):
    return subprocess.run([WHALE, *(each.replace("{f}", str(files)) for each in command)], stderr=subprocess.PIPE, text=True, timeout=120, **options)


@pytest.mark.parametrize("name", PRINT)
def test_output_that_is_lost_is_no_success(files, name):
    with open("/dev/full", "w") as full:
        done = ended(PRINT[name], files, stdout=full)
    assert done.returncode == 1 and "cannot write to the standard output" in done.stderr, done
    closed = ended(PRINT[name], files, preexec_fn=lambda: os.close(1))
    assert closed.returncode == 1 and "cannot write to the standard output" in closed.stderr, closed


def test_a_closed_pipe_is_quiet(files):
    for handler, codes in ((signal.SIG_DFL, (-signal.SIGPIPE,)), (signal.SIG_IGN, (1,))):
        reader, writer = os.pipe()
        os.close(reader)
        done = ended(PRINT["run json"], files, stdout=writer, preexec_fn=lambda: signal.signal(signal.SIGPIPE, handler), restore_signals=False)
        os.close(writer)
        assert done.returncode in codes and not done.stderr, done


def test_what_is_opened_is_no_standard_stream(files, tmp_path):
    """The lowest free number is that of the closed stream: what is printed must not go into a file that is being written."""
    for close in ((1,), (0, 1, 2)):
        subprocess.run([WHALE, "run", str(files / "mlp.whale"), "--steps", "2", "--json", "--save", str(tmp_path / "c")],
                       preexec_fn=lambda: [os.close(each) for each in close], timeout=120)
        assert "every checksum is right" in whale("inspect", tmp_path / "c")


def heard():
    """What a shell that started the tests in the background, or nohup, has told them to ignore."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def begun(files, *more):
    """A run that has made its first step, and goes on for ever."""
    run = subprocess.Popen([WHALE, "run", str(files / "mlp.whale"), "--steps", "1000000000", "--json", *map(str, more)], stdout=subprocess.PIPE,
                           stderr=subprocess.PIPE, text=True, preexec_fn=heard)
    return run, [run.stdout.readline()]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_run_after_its_step(files, tmp_path, number):
    run, first = begun(files, "--save", tmp_path / "c", "--trace", tmp_path / "t.json")
    run.send_signal(number)
    out, said = run.communicate(timeout=120)
    assert run.returncode == 128 + number, said
    last = lines("".join(first) + out)[-1]["step"]
    assert f"interrupted after step {last}, saved {tmp_path / 'c'}; no timeline was written" in said
    assert f"iteration {last}," in whale("inspect", tmp_path / "c") and not (tmp_path / "t.json").exists()
    assert lines(whale("run", files / "mlp.whale", "--steps", "1", "--json", "--load", tmp_path / "c"))[0]["step"] == last + 1


def test_without_save_nothing_is_saved_and_said(files):
    run, _ = begun(files)
    run.terminate()
    _, said = run.communicate(timeout=120)
    assert run.returncode == 128 + signal.SIGTERM and re.search(r"interrupted after step \d+, nothing was saved \(--save", said)


def test_who_reads_no_more_does_not_cost_the_checkpoint(files, tmp_path):
    run, _ = begun(files, "--save", tmp_path / "c")
    run.stdout.close()
    said = run.stderr.read()
    assert run.wait(120) == 128 + signal.SIGPIPE and "saved" in said and "iteration" in whale("inspect", tmp_path / "c")


def test_an_ignored_signal_stays_ignored(files):
    run = subprocess.Popen([WHALE, "run", str(files / "mlp.whale"), "--steps", "1000000000", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                           preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))  # nohup
    run.stdout.readline()
    run.send_signal(signal.SIGHUP)
    for _ in range(50):
        assert run.stdout.readline()
    run.kill()
    run.communicate()


def test_a_second_signal_ends_at_once_and_damages_nothing(files, tmp_path):
    whale("run", files / "mlp.whale", "--steps", "1", "--quiet", "--save", tmp_path / "c")
    codes = set()
    for k in range(20):
        run, _ = begun(files, "--save", tmp_path / "c")
        run.send_signal(signal.SIGTERM)
        time.sleep(k * 0.0005)
        run.send_signal(signal.SIGINT)
        run.communicate(timeout=120)
        codes.add(run.returncode)
        assert "every checksum is right" in whale("inspect", tmp_path / "c")
    assert codes <= {-signal.SIGINT, 128 + signal.SIGTERM} and -signal.SIGINT in codes


@pytest.mark.parametrize("name,why", [("label", "This batch was not run"), ("nan", "the step was not applied")])
def test_a_refused_step_leaves_what_the_steps_before_it_made(files, tmp_path, name, why):
    x, y = np.random.default_rng(0).standard_normal((40, 8)).astype(np.float32), np.zeros(40, np.int32)
    np.savez(tmp_path / "good.npz", x=x, y=y)
    if name == "label":
        y[25] = 7
    else:
        x[25] = np.nan
    np.savez(tmp_path / "bad.npz", x=x, y=y)
    bad, good = (["run", files / "mlp.whale", "--data", tmp_path / f"{data}.npz", "--quiet", "--steps"] for data in ("bad", "good"))
    said = whale(*bad, 4, "--save", tmp_path / "c", code=2)
    assert why in said and f"saved the state after 2 steps to {tmp_path / 'c'}" in said and "othing was run" not in said, said
    whale(*good, 2, "--save", tmp_path / "two")
    for tensors in "model.safetensors", "optimizer.safetensors":
        one, other = ((tmp_path / folder / tensors).read_bytes() for folder in ("c", "two"))
        assert one[-64:] == other[-64:] and len(one) == len(other)
    assert "rows 20 to 29 of" in said and "of inputs with samples the sample [0] is row 20" in said, said
    assert "the state after 2 steps was not saved (--save" in whale(*bad, 4, code=2)
    # The first step of the run is refused: there is nothing new to be saved.
    before = sorted((tmp_path / "c").iterdir()), (tmp_path / "c" / "whale.json").read_bytes()
    said = whale(*bad, 4, "--load", tmp_path / "c", "--save", tmp_path / "c", code=2)
    assert why in said and "saved" not in said
    assert (sorted((tmp_path / "c").iterdir()), (tmp_path / "c" / "whale.json").read_bytes()) == before
