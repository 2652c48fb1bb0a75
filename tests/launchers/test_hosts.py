"""Ranks on four hosts, which are namespaces of this machine (hosts.py): the same result as one process, and who is lost when links are cut."""

import os
import subprocess
import sys
import time

import pytest
from conftest import needs, run
from hosts import Network

TIMEOUT = 3  # seconds that a rank may be silent
# Time to notice beyond that: the meeting asks twice in this time, and this machine may be busy.
SLACK = 5

PROGRAM = """
import hashlib, sys, time
import numpy as np
import whale as wh
def start(world=None, devices=None, width=64):
    g = wh.Graph()
    with g:
        x, y = wh.input("x", (16, 32)), wh.input("y", (16,), wh.int32)
        with wh.replica():
            h = wh.ops.relu(wh.nn.linear(x, width))
            loss = wh.nn.cross_entropy(wh.nn.linear(wh.ops.relu(wh.nn.linear(h, width)), 4), y)
        g.minimize(loss, wh.Adam(0.01))
    return wh.plan(g, world=world, devices=devices, zero=1).start(seed=3)
def step(job, i):
    return job.step(x=np.random.default_rng(i).normal(size=(16, 32)).astype(np.float32), y=np.arange(16, dtype=np.int32) % 4)
def train(job, steps=10):
    losses = [step(job, i).hex() for i in range(steps)]
    return *losses, hashlib.sha256(b"".join(value.tobytes() for _, value in sorted(job.parameters().items()))).hexdigest()
"""


def ends(processes, seconds=60):
    return [(*process.communicate(timeout=seconds), process.returncode) for process in processes]


@pytest.fixture(scope="module")
def alone():
    known = {}
    return lambda width: known.setdefault(width, run([sys.executable, "-c", PROGRAM + f"print(*train(start(devices='cpu:4', width={width})))"]))


def test_hosts_share_neither_memory_nor_names(network):
    told = [network.start(host, "sh", "-c", "hostname; readlink /proc/self/ns/ipc; readlink /proc/self/ns/net; ls -d /proc/[0-9]* | wc -l", env=os.environ) for host in range(4)]
    rows = [out.split() for out, _, _ in ends(told)]
    assert [row[0] for row in rows] == [f"node{host}" for host in range(4)]
    assert len({row[1] for row in rows}) == len({row[2] for row in rows}) == 4 and all(int(row[3]) < 10 for row in rows)


def test_four_hosts_train_what_one_process_trains(network, alone):
    for out, err, code in ends(network.job(PROGRAM + "print(*train(start(wh.world())))", WHALE_TIMEOUT=str(TIMEOUT))):
        assert (out, err, code) == (alone(64), "", 0), err


# Says when it has begun and when it has heard of the loss, in seconds of the machine's clock.
ENDLESS = PROGRAM + """
world = wh.world()
job = start(world)
step(job, 0)
print("ready", flush=True)
try:
    for i in range(10**9):
        step(job, i)
except wh.WhaleError as error:
    print(time.monotonic(), type(error).__name__, error.rank, error, flush=True)
"""


def lost(network, cut, more=0):
    """By rank: (seconds after the cut, type, rank, text) of the error of each."""
    processes = network.job(ENDLESS, WHALE_TIMEOUT=str(TIMEOUT))
    for process in processes:
        assert process.stdout.readline() == "ready\n", process.communicate()[1]
    time.sleep(0.5)
    began = time.monotonic()
    cut()
    told = []
    for rank, (out, err, code) in enumerate(ends(processes)):
        assert code == 0, f"rank {rank}: {err}"
        when, kind, of, text = out.split(maxsplit=3)
        told.append((float(when) - began, kind, int(of), text))
    assert all(kind == "Unavailable" and seconds < TIMEOUT + SLACK + more for seconds, kind, _, _ in told), told
    return told


@pytest.mark.parametrize("victim", [0, 2])
def test_a_host_whose_link_is_down_is_named_by_all_others(network, victim):
    told = lost(network, lambda: network.link(victim, "down"))
    for rank, (_, _, of, text) in enumerate(told):
        if rank != victim:
            assert of == victim and f"rank {victim} (host 'node{victim}', process " in text, told
    assert told[victim][2] != victim  # it does not take itself for the lost one
    print(f"\nlink of node{victim} down, WHALE_TIMEOUT={TIMEOUT}: named after", *[f"{seconds:.1f}" for seconds, *_ in told], "s")


def test_a_partition_is_named_on_both_sides(network):
    told = lost(network, lambda: network.part([2, 3]))
    assert told[0][2] in (2, 3) and told[1][2] in (2, 3), told
    assert all(of in (0, 1) for _, _, of, _ in told[2:]), told
    print(f"\nnode2, node3 cut off, WHALE_TIMEOUT={TIMEOUT}: named after", *[f"{seconds:.1f}" for seconds, *_ in told], "s")


def test_two_hosts_that_do_not_reach_each_other_are_named_once_tcp_gives_up(network):
    """Rank 0 hears both, so that nobody is silent: of two that wait, one notices that the other answers nothing. Who has left first may be named by
    those that hear of it last."""
    told = lost(network, lambda: network.separate(2, 3), more=TIMEOUT + 20)
    assert told[2][2] == 3 or told[3][2] == 2, told
    assert {of for _, _, of, _ in told[:2]} <= {2, 3}, told
    print("\nnode2 and node3 do not reach each other: named after", *[f"{seconds:.1f}" for seconds, *_ in told], "s")


def test_the_next_job_runs_after_a_link_is_up_again(network, alone):
    lost(network, lambda: network.link(3, "down"))
    network.link(3, "up")
    for out, err, code in ends(network.job(PROGRAM + "print(*train(start(wh.world())))")):
        assert (out, err, code) == (alone(64), "", 0), err


def test_a_slow_network_changes_nothing_but_time(network, alone, capsys):
    """2.5 MB of gradients a step. What the rates give is printed, not asserted."""
    program = PROGRAM + """
job = start(wh.world(), width=768)
print(*train(job))
began = time.monotonic()
for i in range(5):
    step(job, i)
print(f"{(time.monotonic() - began) / 5 * 1000:.0f}")
"""
    for rate in (None, "1gbit", "200mbit"):
        network.shape(rate)
        told = ends(network.job(program))
        for out, err, code in told:
            assert code == 0 and out.splitlines(keepends=True)[0] == alone(768), err
        with capsys.disabled():
            print(f"\nfour hosts at {rate or 'full speed'}: {told[0][0].splitlines()[1]} ms a step", end="")
