"""What can happen to one rank of several processes, at any point of a job: every other one is told which rank it was, and nothing is left."""

import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import pytest
from test_world_of_processes import free_port

LIBRARY = pathlib.Path(os.environ.get("WHALE_LIBRARY", "x"))
pytestmark = [pytest.mark.alone, pytest.mark.skipif(not (LIBRARY.parent / "libwhale_ucx.so").exists(), reason="built without UCX")]
WHALE = os.environ.get("WHALE", str(LIBRARY.parents[1] / "tools" / "whale" / "whale"))

# Each rank goes through the points of a job. At `point` the victim does `fault` to itself, and says when. In the phases of a step a thread
# of its own does, when the flight recorder says that the device's compute queue is there.
PROGRAM = """
import os, signal, sys, threading, time
import numpy as np
import whale as wh
rank, victim, point, fault, folder = int(os.environ["RANK"]), *sys.argv[1:]
mine = rank == int(victim)
job = world = None

def sockets():
    found = set()
    for each in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink("/proc/self/fd/" + each))
        except OSError:  # that of the list itself
            pass
    return {name for name in found if name.startswith("socket:")}

before = sockets()

def at(here):
    if not mine or here != point:
        return
    with open(folder + ".when", "w") as file:
        file.write(str(time.monotonic()))
    if fault == "exception":
        raise ValueError("user code throws")
    if fault == "hang":
        time.sleep(1000)
    if fault == "slow":
        time.sleep(float(os.environ["WHALE_TIMEOUT"]) / 2)
    if fault == "close":
        job.close()
    if fault in ("kill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)

def watch(job):
    while True:
        for queue in job.flight_record()["queues"]:
            if queue["queue"] == "compute" and queue["instructions"] and queue["instructions"][-1]["phase"] == point:
                return at(point)

def names(error):
    print("when", time.monotonic())
    print("told", type(error).__name__, error.rank, error, flush=True)
    for each in (job, world):
        if each is not None:
            each.close()
    print("sockets left", sockets() - before)
    sys.exit(0)

phase = point in ("forward", "backward", "update")
width = 1024 if phase else 32 if mine and fault == "plan" else 16
try:
    at("rendezvous")
    world = wh.world(token="another" if mine and fault == "token" else "")
    g = wh.Graph()
    with g:
        x, y = wh.input("x", (12, 4)), wh.input("y", (12,), wh.int32)
        with wh.replica():
            loss = wh.nn.cross_entropy(wh.nn.linear(wh.ops.relu(wh.nn.linear(x, width)), 3), y)
        g.minimize(loss, wh.SGD(0.1))
    job = wh.plan(g, world=world).start(seed=3)
    at("first step")
    def step(rows=12):
        return job.step(x=np.ones((rows, 4), np.float32), y=np.zeros(rows, np.int32))
    step()
    if mine and phase:
        threading.Thread(target=watch, args=(job,), daemon=True).start()
    if point == "steps" or phase:
        for i in range(100 if fault == "slow" else 10**9):
            if i == 20:
                at("steps")
                if mine and fault == "shape":
                    job.step(x=np.ones((12, 5), np.float32), y=np.zeros(12, np.int32))
            step()
    if fault == "slow":
        print("warnings", [row["message"] for row in wh.drain_log() if row["severity"] == "warning"], "iteration", job.iteration)
    if mine and point == "save":
        time.sleep(0.3)  # the others are in it
    at("save")
    job.save(folder)
except wh.WhaleError as error:
    if fault == "exception" and mine:
        raise
    names(error)
print("nothing told", flush=True)
"""

TABLE = [("kill", "rendezvous"), ("stop", "rendezvous"), ("token", "rendezvous"), ("exception", "rendezvous"), ("plan", "first step"), ("kill", "first step"),
         ("stop", "first step"), ("exception", "first step"), ("kill", "steps"), ("stop", "steps"), ("exception", "steps"), ("shape", "steps"), ("kill", "save"),
         ("stop", "save"), ("exception", "save"), ("kill", "forward"), ("kill", "backward"), ("kill", "update"), ("stop", "backward"),
         ("stop", "forward"), ("stop", "update"), ("close", "forward"), ("close", "backward"),
         ("hang", "first step"), ("hang", "steps"), ("hang", "save")]
# WHALE_TIMEOUT of the ranks, and a file that gets a line for each row: how many seconds after the fault the last rank was told.
TIMEOUT, TIMES = os.environ.get("WHALE_FAULT_TIMEOUT", "2"), os.environ.get("WHALE_FAULT_TIMES")


MOST_SECONDS = 30 + float(TIMEOUT)  # from the fault to the error that names the rank, on however busy a machine


def left():
    return {p.name for p in pathlib.Path("/dev/shm").iterdir() if not p.name.startswith("whale_test_")}  # of unit tests beside this


def segments(pids):
    """Of System V shared memory, made by these processes."""
    rows = [line.split() for line in pathlib.Path("/proc/sysvipc/shm").read_text().splitlines()]
    return [row for row in rows[1:] if int(row[rows[0].index("cpid")]) in pids]


def started(fault, point, victim, folder, **more):
    port = free_port()
    env = {**os.environ, "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WHALE_JOB_TOKEN": "secret", "WHALE_TIMEOUT": TIMEOUT, **more}
    return port, [subprocess.Popen([sys.executable, "-c", PROGRAM, str(victim), point, fault, str(folder)], env={**env, "RANK": str(r)}, stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, text=True) for r in range(3)]


@pytest.mark.parametrize("victim", [0, 2])
def test_nobody_is_told_of_a_rank_that_is_slow(victim, tmp_path):
    """It sleeps for less than the time that it is given, and the job goes on to its end."""
    _, ranks = started("slow", "steps", victim, tmp_path / "c")
    for p in ranks:
        out, err = p.communicate(timeout=60)
        assert p.returncode == 0 and out.splitlines() == ["warnings [] iteration 101", "nothing told"], out + err
    assert (tmp_path / "c" / "whale.json").exists()


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("fault, point", TABLE)
def test_every_survivor_is_told_which_rank_it_was(fault, point, victim, tmp_path):
    before = left()
    port, ranks = started(fault, point, victim, tmp_path / "c", WHALE_FLIGHT_RECORDER=str(tmp_path / "records"),
                          **({"WHALE_RUN_TIMEOUT": TIMEOUT} if fault == "hang" else {}))
    try:
        told = [p.communicate(timeout=60) for r, p in enumerate(ranks) if r != victim]
    finally:
        for p in ranks:
            p.kill()
            p.communicate()
    for out, err in told:
        line = next((line for line in out.splitlines() if line.startswith("told ")), "")
        assert line.split()[2:3] == [str(victim)], out + err
        assert out.splitlines()[-1] == "sockets left set()", out + err
        if fault in ("kill", "stop") and point != "rendezvous":  # who never came, nobody knows
            assert f"rank {victim} (host '{socket.gethostname()}', process {ranks[victim].pid}) is lost" in line, line
        if fault == "close":
            assert re.search(f"rank {victim}: (its|the) (session is closed|session was closed|run was cancelled)", line), line
        if point == "steps" and (fault == "stop" or "; in step" in line):  # one that is killed may be missed between two steps
            assert re.search(r"; in step \d+ ranks? \d[^;]* ((wait|waits) for|is|are) \w", line), line
        if fault == "hang":
            assert line.split()[1] == "DeadlineExceeded" and re.search(rf"rank {victim} has not begun (step \d+, which|to save, as)", line), line
        if point == "steps" and fault in ("stop", "hang"):  # they had the time to come to what they wait for
            assert re.search(r"; in step \d+ ranks \d,\d wait for all_reduce of \w+ in replica \(forward\) among ranks 0-2", line), line
    if point == "steps" and fault in ("kill", "stop"):
        files = sorted((tmp_path / "records").iterdir())
        assert [f.name for f in files] == [f"rank-{r}.json" for r in range(3) if r != victim]
        shown = subprocess.run([WHALE, "inspect", *map(str, files)], capture_output=True, text=True, check=True).stdout
        assert f"no record of rank {victim}\n" in shown and "last instructions" in shown and "replica  " in shown, shown
        for file in files:
            record = json.loads(file.read_text())
            assert f"rank {victim}" in record["error"] and {q["queue"] for q in record["queues"]} >= {"compute", "replica"}
            assert all(i["seconds"] is None or i["seconds"] >= 0 for q in record["queues"] for i in q["instructions"])
    acted = tmp_path / "c.when"
    late = [float(line.split()[1]) for out, _ in told for line in out.splitlines() if line.startswith("when ")]
    if acted.exists():
        seconds = max(late) - float(acted.read_text())
        assert seconds < MOST_SECONDS
        if TIMES:
            with open(TIMES, "a") as file:
                file.write(f"{fault} at {point}, rank {victim}: {seconds:.2f}\n")
    assert not segments([p.pid for p in ranks])
    deadline = time.monotonic() + 10
    while left() - before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left() - before
    assert not list(tmp_path.glob("**/*.XXXXXX")) and not (tmp_path / "c").exists()
    with socket.socket() as door:  # nobody listens there any more
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        door.bind(("127.0.0.1", port))
