"""The command line in several processes: what they print, save and load is one process's."""

import json
import os
import pathlib
import shutil
import signal
import subprocess

import pytest
from test_cli import WHALE, whale

pytestmark = [pytest.mark.alone, pytest.mark.skipif(not (pathlib.Path(WHALE).parents[2] / "capi" / "libwhale_ucx.so").exists(), reason="built without UCX")]


def launch(n, *arguments, code=0):
    done = subprocess.run([WHALE, "launch", "-n", str(n), "--", WHALE, *map(str, arguments)], capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stderr + done.stdout
    return done.stdout if code == 0 else done.stderr


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "gpt.whale"
    whale("model", "gpt", "--layers", 2, "--dim", 16, "--heads", 4, "--seq", 6, "--vocab", 25, "--batch", 12, "-o", path)
    return path


def losses(text):
    return [json.loads(line)["loss"] for line in text.splitlines()]


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun here")
@pytest.mark.parametrize("by", ["mpirun's variables", "PMIx alone"])
def test_under_mpirun_they_find_each_other(model, by):
    """By PMIx alone as under prterun, which says no more than that."""
    if by == "PMIx alone" and not (pathlib.Path(WHALE).parents[2] / "capi" / "libwhale_pmix.so").exists():
        pytest.skip("built without PMIx")
    only = ["sh", "-c", 'exec env $(env | sed -n "s/^\\(OMPI_[^=]*\\)=.*/-u \\1/p") "$@"', "sh"] if by == "PMIx alone" else []
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "4", *only, WHALE, "run", str(model), "--strategy", "replica", "--steps", "4", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, "WHALE_JOB_TOKEN": "secret", "OMPI_MCA_plm_rsh_agent": "sh"})  # there may be no ssh
    assert done.returncode == 0, done.stderr
    assert losses(done.stdout) == losses(whale("run", model, "--strategy", "replica", "--devices", "cpu:4", "--steps", 4, "--json"))


@pytest.mark.parametrize("strategy, n, devices", [("replica", 3, 3), ("replica(2) > split(2)", 2, 4), ("pipeline(3, micro_batches=3)", 3, 3)])
def test_rank_0_prints_what_one_process_prints(model, strategy, n, devices):
    alone = whale("run", model, "--strategy", strategy, "--devices", f"cpu:{devices}", "--steps", 4, "--json")
    more = [] if n == devices else ["--devices", f"cpu:{devices}"]
    assert losses(launch(n, "run", model, "--strategy", strategy, *more, "--steps", 4, "--json")) == losses(alone)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two cores are needed")
def test_processes_of_unlike_cores_run_one_plan(model):
    """As mpirun binds them: to a core each; and one that may use all."""
    cores = sorted(os.sched_getaffinity(0))
    alone = losses(whale("run", model, "--strategy", "replica", "--devices", "cpu:2", "--steps", 3, "--json"))
    for first, second in ((f"{cores[0]}", f"{cores[1]}"), (f"{cores[0]}", ",".join(map(str, cores)))):
        bound = f'exec taskset -c $([ $RANK = 0 ] && echo {first} || echo {second}) "$@"'
        done = subprocess.run([WHALE, "launch", "-n", "2", "--", "sh", "-c", bound, "sh", WHALE, "run", str(model), "--strategy", "replica", "--steps", "3", "--json"],
                              capture_output=True, text=True, timeout=300)
        assert done.returncode == 0 and losses(done.stdout) == alone, done.stderr


def test_what_processes_save_others_load(model, tmp_path):
    """Of two processes by three, by one, and back."""
    uninterrupted = losses(whale("run", model, "--strategy", "replica", "--devices", "cpu:2", "--exact", "--accumulation", 6, "--steps", 8, "--json", "--seed", 3))
    launch(2, "run", model, "--strategy", "replica", "--exact", "--accumulation", 6, "--zero", 1, "--steps", 2, "--json", "--seed", 3, "--save", tmp_path / "c")
    went_on = losses(launch(3, "run", model, "--strategy", "replica", "--exact", "--accumulation", 6, "--steps", 2, "--json", "--load", tmp_path / "c", "--save", tmp_path / "d"))
    went_on += losses(whale("run", model, "--steps", 2, "--exact", "--accumulation", 6, "--json", "--load", tmp_path / "d", "--save", tmp_path / "e"))
    went_on += losses(launch(2, "run", model, "--strategy", "replica", "--exact", "--accumulation", 6, "--steps", 2, "--json", "--load", tmp_path / "e"))
    assert went_on == uninterrupted[2:]


def test_one_rank_says_that_it_has_saved(model, tmp_path):
    done = subprocess.run([WHALE, "launch", "-n", "3", "--", WHALE, "run", model, "--strategy", "replica", "--steps", "2", "--quiet", "--save", tmp_path / "c"], capture_output=True,
                          text=True, timeout=300)
    assert done.returncode == 0 and done.stderr == f"saved {tmp_path / 'c'}\n"


def test_a_bench_of_processes_is_one_bench(model):
    line = json.loads(launch(2, "bench", model, "--strategy", "replica", "--steps", 2, "--warmup", 1, "--report"))
    assert line["devices"] == "cpu:2" and line["first_loss"] == json.loads(whale("bench", model, "--strategy", "replica", "--devices", "cpu:2", "--steps", 2, "--warmup", 1))["first_loss"]


def test_a_refusal_is_every_ranks_and_said_by_each(model):
    told = launch(2, "run", model, "--strategy", "replica(5)", "--steps", 1, code=2)
    assert told.count("replica(5)") >= 2
    assert "one of several already" in launch(2, "run", model, "--ranks", 2, "--devices", "cpu:2", "--steps", 1, code=2)


def test_processes_that_do_not_run_the_same_are_told_so(model):
    script = f'exec {WHALE} run {model} --strategy replica --steps 1 --lr 0.$((RANK + 1)) --accumulation $((RANK + 1))'
    done = subprocess.run([WHALE, "launch", "-n", "2", "--", "sh", "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert done.stderr.count("the ranks do not run the same: rank 0 has '") == 2


def test_who_has_died_is_named_and_the_state_before_is_kept(model, tmp_path):
    """Where the step cannot have been made, the others have it as it was. They cannot save it without the lost rank's parts."""
    job = subprocess.Popen([WHALE, "launch", "-n", "3", "--", "sh", "-c", f'echo $RANK $$ >> {tmp_path}/pids; exec {WHALE} run {model} --strategy replica --steps 1000000 --json'],
                           stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ, TMPDIR=str(tmp_path)))
    for _ in range(5):
        json.loads(job.stdout.readline())
    pids = dict(line.split() for line in (tmp_path / "pids").read_text().splitlines())
    os.kill(int(pids["1"]), signal.SIGKILL)
    _, told = job.communicate(timeout=60)
    assert job.returncode == 128 + signal.SIGKILL
    assert told.count(f"rank 1 (host '{os.uname().nodename}', process {pids['1']}) is lost: its process has ended") == 2
    for pid in pids.values():
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)
    # The last line is how to see what the others were at.
    shown = subprocess.run(["sh", "-c", told.splitlines()[-1].removeprefix("whale: what each rank was at: whale").replace("inspect", f"exec {WHALE} inspect", 1)],
                           capture_output=True, text=True, timeout=60)
    assert shown.returncode == 0 and "rank 0" in shown.stdout and "rank 2" in shown.stdout, told + shown.stdout + shown.stderr


@pytest.mark.parametrize("after", range(4))
def test_interrupted_processes_save_the_state_of_one_step(model, tmp_path, after):
    """Whichever of them hears of it first, or is in a step that the others do not begin."""
    job = subprocess.Popen([WHALE, "launch", "-n", "3", "--", WHALE, "run", model, "--strategy", "replica", "--steps", "1000000", "--json", "--save", tmp_path / "c"],
                           stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                           preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # ignored where a shell started the tests in the background
    for _ in range(3 + after):
        job.stdout.readline()
    job.send_signal(signal.SIGINT)
    _, told = job.communicate(timeout=120)
    assert job.returncode in (130, 2), told
    assert "every checksum is right" in whale("inspect", tmp_path / "c") and "by 3 ranks" in whale("inspect", tmp_path / "c"), told
