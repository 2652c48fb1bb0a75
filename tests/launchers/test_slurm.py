"""A real Slurm of two nodes on this machine: munged, slurmctld and a slurmd for each node, in a folder, a mount and a process namespace of their own."""

import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types

import pytest
from conftest import EXAMPLE, ROOT, WHALE, block, environment, lines, losses, missing, needs, run, train_program

NODES = ("node1", "node2")  # of four CPUs, whatever there are

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
TmpFS={folder}/tmp.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
KillWait=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4
PartitionName=all Nodes=node1,node2 Default=YES
"""

# In namespaces, whose first process it is: all others end with it, and the names of the nodes are known there only.
DAEMONS = """
set -e
mount --bind hosts /etc/hosts
munged --foreground --force --key-file=$PWD/key --socket=$PWD/munge.socket --log-file=$PWD/munge.log --pid-file=$PWD/munge.pid --seed-file=$PWD/munge.seed &
until [ -S munge.socket ]; do sleep 0.05; done
slurmctld -D -f $SLURM_CONF &
for node in node1 node2; do slurmd -D -N $node -f $SLURM_CONF & done
wait
"""


def free_ports(n):
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(n)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def of(folder):
    """The processes that are in this folder, or were started for it."""
    found = []
    for each in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if int(each.name) != os.getpid() and f"SLURM_CONF={folder}/".encode() in (each / "environ").read_bytes():
                found.append(int(each.name))
        except OSError:
            pass
    return found


@pytest.fixture(scope="module")
def slurm():
    needs("munged", "slurmctld", "slurmd", "srun", package="munge slurmctld slurmd slurm-client")
    if os.getuid() != 0:
        pytest.skip("a Slurm with names of its own for nodes needs root")
    folder = pathlib.Path(tempfile.mkdtemp(prefix="slurm", dir="/tmp"))  # short: paths of sockets
    folder.chmod(0o755)
    for name in ("state", *(f"{kind}.{node}" for node in NODES for kind in ("spool", "tmp"))):
        (folder / name).mkdir()
    (folder / "key").write_bytes(os.urandom(128))
    (folder / "key").chmod(0o600)
    (folder / "hosts").write_text(pathlib.Path("/etc/hosts").read_text() + "\n127.0.0.1 node1 node2\n")
    (folder / "slurm.conf").write_text(CONFIGURATION.format(folder=folder, host=os.uname().nodename.split(".")[0], ports=free_ports(3)))
    env = environment(SLURM_CONF=str(folder / "slurm.conf"))
    log = open(folder / "daemons.log", "w")
    daemons = subprocess.Popen(["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "bash", "-c", DAEMONS], cwd=folder, env=env,
                               stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    try:
        until = time.monotonic() + 60
        while subprocess.run(["sinfo", "-h", "-t", "idle", "-o", "%D"], env=env, capture_output=True, text=True).stdout.strip() != "2":
            assert time.monotonic() < until and daemons.poll() is None, "".join(path.read_text() for path in folder.glob("*.log"))
            time.sleep(0.2)
        yield types.SimpleNamespace(env=env, folder=folder)
    finally:
        daemons.kill()
        daemons.wait()
        until = time.monotonic() + 10
        while of(folder) and time.monotonic() < until:
            time.sleep(0.05)
        left = of(folder)
        shutil.rmtree(folder)
        assert not left


@pytest.fixture(autouse=True)
def no_task_is_left(slurm):
    before = set(of(slurm.folder))
    yield
    until = time.monotonic() + 15
    while set(of(slurm.folder)) - before:
        assert time.monotonic() < until, [pathlib.Path(f"/proc/{pid}/cmdline").read_bytes() for pid in set(of(slurm.folder)) - before]
        time.sleep(0.1)


def test_it_has_two_nodes(slurm):
    """And what tasks find in their environment there is what docs/many-processes.md says."""
    told = run(["srun", "-N", "2", "-n", "4", "sh", "-c", "echo $SLURM_PROCID $SLURM_NTASKS $SLURM_NODEID $SLURM_STEP_NODELIST ${MASTER_ADDR-none}"], env=slurm.env)
    rows = [line.split() for line in sorted(told.splitlines())]
    assert [row[:2] + row[3:] for row in rows] == [[str(r), "4", "node[1-2]", "none"] for r in range(4)]
    assert {row[2] for row in rows} == {"0", "1"}


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_command_line_trains_what_one_process_trains(slurm, nodes, tmp_path):
    model = tmp_path / "gpt.whale"
    run([WHALE, "model", "gpt", "--layers", "2", "--dim", "16", "--heads", "4", "--seq", "6", "--vocab", "25", "--batch", "12", "-o", str(model)])
    command = [WHALE, "run", str(model), "--strategy", "replica(2) > split(2)", "--steps", "4", "--json"]
    of_steps = [[json.loads(line)["loss"] for line in run([*how, *more], env=slurm.env).splitlines()]
                for how, more in ((command, ["--devices", "cpu:4"]), (["srun", "-N", str(nodes), "-n", "4", *command], []))]
    assert len(of_steps[0]) == 4 and of_steps[0] == of_steps[1]


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_example_trains_what_one_process_trains(slurm, nodes, alone):
    out = run(["srun", "-N", str(nodes), "-n", "4", sys.executable, str(EXAMPLE / "train.py")], env={**slurm.env, "WHALE_JOB_TOKEN": "secret"})
    assert losses(out) == alone(4) and {of_ for _, _, of_ in lines(out)} == {"4"}


BY_PMIX = f"""
import sys
sys.path.insert(0, {str(EXAMPLE)!r})
import train, whale as wh
train.train(wh.world())
print("asked" if "libpmix" in open("/proc/self/maps").read() else "not asked")
"""


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("by", ["its own variables too", "PMIx alone"])
def test_ranks_meet_by_pmix(slurm, nodes, by, alone):
    """Without a token: it comes with the address. On one node Slurm's variables are enough."""
    if "pmix" not in run(["srun", "--mpi=list"], env=slurm.env):
        missing("no srun --mpi=pmix here (Debian: slurm-wlm-basic-plugins, libpmix2)")
    command = [sys.executable, "-c", BY_PMIX]
    if by == "PMIx alone":
        command = ["sh", "-c", 'for v in $(env | sed -n "s/^\\(SLURM_[^=]*\\)=.*/\\1/p"); do unset $v; done; exec "$@"', "sh", *command]
    out = run(["srun", "--mpi=pmix", "-N", str(nodes), "-n", "4", *command], env=slurm.env)
    assert losses(out) == alone(4) and {of_ for _, _, of_ in lines(out)} == {"4"}
    assert re.findall(r"^.*asked$", out, re.M) == 4 * ["asked" if nodes == 2 or by == "PMIx alone" else "not asked"]


@pytest.mark.parametrize("section", ["Slurm", "Slurm, as a batch"])
def test_the_example_runs_as_printed(slurm, section, example, alone):
    out = run(["bash", "-euo", "pipefail", "-c", block(section)], cwd=example, env=slurm.env)
    assert losses(out) == alone(4) and {of_ for _, _, of_ in lines(out)} == {"4"}


def test_the_batch_script_of_the_docs_runs_as_printed(slurm, tmp_path, alone):
    script = re.search(r"```bash\n(#!/bin/bash\n#SBATCH.*?)```", (ROOT / "docs/many-processes.md").read_text(), re.S).group(1)
    (tmp_path / "train.sh").write_text(script)
    train_program(tmp_path)
    run(["sbatch", "--wait", "train.sh"], cwd=tmp_path, env=slurm.env)
    out = "".join(path.read_text() for path in tmp_path.glob("slurm-*.out"))
    assert losses(out) == alone(8) and {of_ for _, _, of_ in lines(out)} == {"8"}


DIES = f"""
import os, signal, sys
sys.path.insert(0, {str(EXAMPLE)!r})
import train, whale as wh
world = wh.world()
train.train(world, steps=3)
if world.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
train.train(world, steps=10**6)
"""


@pytest.mark.parametrize("kill", [0, 1])
def test_a_task_that_is_killed_is_named(slurm, kill):
    """By the others, which have time for it where Slurm does not end them; and all end."""
    began = time.monotonic()
    done = subprocess.run(["srun", "-N", "2", "-n", "3", f"--kill-on-bad-exit={kill}", sys.executable, "-c", DIES], env=slurm.env, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and time.monotonic() - began < 60
    assert re.search(r"srun: error: \S+: task 1: Killed", done.stderr), done.stderr
    if not kill:
        assert len(re.findall(r"whale\S*Unavailable: .*rank 1 \(host '[^']+', process \d+\) is lost: its process has ended", done.stderr)) == 2, done.stderr
