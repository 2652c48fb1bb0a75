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
pytestmark = pytest.mark.skipif(not (LIBRARY.parent / "libwhale_ucx.so").exists(), reason="built without UCX")
WHALE = os.environ.get("WHALE", str(LIBRARY.parents[1] / "tools" / "whale" / "whale"))

# Each rank goes through the points of a job. At `point` the victim does `fault` to itself, and says when. In the phases of a step a thread
# of its own does, when the flight recorder says that the device's compute queue is there.
PROGRAM = """
import os, signal, sys, threading, time
import numpy as np
import whale as wh
rank, victim, point, fault, folder = int(os.environ["RANK"]), *sys.argv[1:]
mine = rank == int(victim)

def at(here):
    if not mine or here != point:
        return
    with open(folder + ".when", "w") as file:
        file.write(str(time.monotonic()))
    if fault == "exception":
        raise ValueError("user code throws")
    if fault == "hang":
        time.sleep(1000)
    if fault in ("kill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)

def watch(job):
    while True:
        for queue in job.flight_record()["queues"]:
            if queue["queue"] == "compute" and queue["instructions"] and queue["instructions"][-1]["phase"] == point:
                at(point)

def names(error):
    print("when", time.monotonic())
    print("told", type(error).__name__, error.rank, error, flush=True)
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
        for i in range(10**9):
            if i == 20:
                at("steps")
                if mine and fault == "shape":
                    job.step(x=np.ones((12, 5), np.float32), y=np.zeros(12, np.int32))
            step()
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
         ("hang", "first step"), ("hang", "steps"), ("hang", "save")]
# WHALE_TIMEOUT of the ranks, and a file that gets a line for each row: how many seconds after the fault the last rank was told.
TIMEOUT, TIMES = os.environ.get("WHALE_FAULT_TIMEOUT", "2"), os.environ.get("WHALE_FAULT_TIMES")


def left():
    return {p.name for p in pathlib.Path("/dev/shm").iterdir()}


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("fault, point", TABLE)
def test_every_survivor_is_told_which_rank_it_was(fault, point, victim, tmp_path):
    port, before = free_port(), left()
    env = {**os.environ, "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WHALE_JOB_TOKEN": "secret", "WHALE_TIMEOUT": TIMEOUT,
           "WHALE_FLIGHT_RECORDER": str(tmp_path / "records"), **({"WHALE_RUN_TIMEOUT": TIMEOUT} if fault == "hang" else {})}
    ranks = [subprocess.Popen([sys.executable, "-c", PROGRAM, str(victim), point, fault, str(tmp_path / "c")], env={**env, "RANK": str(r)}, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True) for r in range(3)]
    try:
        told = [p.communicate(timeout=60) for r, p in enumerate(ranks) if r != victim]
    finally:
        for p in ranks:
            p.kill()
            p.communicate()
    for out, err in told:
        line = out.splitlines()[-1] if out else ""
        assert line.startswith("told "), out + err
        assert line.split()[2] == str(victim), line
        if point == "steps" and fault in ("kill", "stop"):
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
    if TIMES:
        acted = tmp_path / "c.when"
        late = [float(line.split()[1]) for out, _ in told for line in out.splitlines() if line.startswith("when ")]
        with open(TIMES, "a") as file:
            file.write(f"{fault} at {point}, rank {victim}: {max(late) - float(acted.read_text()):.2f}\n" if acted.exists() else "")
    deadline = time.monotonic() + 10
    while left() - before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left() - before
    assert not list(tmp_path.glob("**/*.XXXXXX")) and not (tmp_path / "c").exists()
    with socket.socket() as door:  # nobody listens there any more
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        door.bind(("127.0.0.1", port))
