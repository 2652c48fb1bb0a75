"""The commands of examples/multi-process/README.md as printed, under the launchers that need no daemons; Slurm's and Ray's have files of their own."""

import os
import pathlib
import shutil
import subprocess
import sys

from conftest import MPI, ROOT, block, environment, lines, losses, missing, needs, run


def printed(section, folder, **options):
    """What the section's commands print."""
    return run(["bash", "-euo", "pipefail", "-c", block(section)], cwd=folder, **options)


def test_one_process(example, alone):
    out = printed("One process", example)
    assert losses(out) == alone(4) and {of for _, _, of in lines(out)} == {"1"}
    assert alone(4) != alone(1)  # else the others' comparisons would say little


def test_whale_launch(example, alone):
    out = printed("whale launch", example)
    assert losses(out) == alone(4) and {of for _, _, of in lines(out)} == {"4"}


def torch():
    """The folder of torchrun and its Python."""
    found = shutil.which("torchrun", path=f"{ROOT}/.venv-torch/bin:{os.environ['PATH']}")
    return pathlib.Path(found).parent if found else missing("no torchrun here (tools/check --full makes .venv-torch)")


def test_torchrun(example, alone):
    out = printed("torchrun", example, env=environment(torch()))
    assert losses(out) == alone(4) and {of for _, _, of in lines(out)} == {"4"}


def test_torchrun_of_two_and_a_worker_that_dies(example, alone):
    env = environment(torch(), WHALE_JOB_TOKEN="secret")
    assert losses(run(["torchrun", "--nproc-per-node", "2", "train.py"], cwd=example, env=env)) == alone(2)
    (example / "dies.py").write_text("import os, signal, train, whale as wh\nworld = wh.world()\ntrain.train(world, steps=3)\n"
                                     "if world.rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ntrain.train(world, steps=10**6)\n")
    done = subprocess.run(["torchrun", "--nproc-per-node", "2", "dies.py"], cwd=example, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and "rank 1 (host '" in done.stderr + done.stdout and "is lost" in done.stderr + done.stdout, done.stderr


def test_mpirun(example, alone):
    needs("mpirun", package="openmpi-bin")
    out = printed("OpenMPI", example, env=environment(**MPI, OMPI_MCA_plm_rsh_agent="sh"))  # there may be no ssh
    assert losses(out) == alone(4) and {of for _, _, of in lines(out)} == {"4"}


def test_prterun(example, alone):
    """Which says nothing but by PMIx: neither rank and size nor where to meet."""
    prterun = shutil.which("prterun", path=f"{ROOT}/.venv-prrte/bin:{os.environ['PATH']}") or missing("no prterun here (tools/check --full makes .venv-prrte)")
    env = environment(pathlib.Path(prterun).parent, PRTE_ALLOW_RUN_AS_ROOT="1", PRTE_ALLOW_RUN_AS_ROOT_CONFIRM="1", PRTE_MCA_plm_ssh_agent="sh")
    out = run(["prterun", "-n", "4", "--map-by", ":OVERSUBSCRIBE", sys.executable, "train.py"], cwd=example, env=env)
    assert losses(out) == alone(4) and {of for _, _, of in lines(out)} == {"4"}
