"""whale.ray with a real Ray on this machine. Runs in an environment that has ray (.venv-ray)."""

import os
import pathlib
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import pytest
from conftest import EXAMPLE, block, environment, losses, missing

sys.path.insert(0, str(EXAMPLE))
# Ray listens on the network: with a secret, which is not kept in the home folder. It tells nobody of its use.
QUIET = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


@pytest.fixture(scope="module")
def ray():
    """Ray with four CPUs, whatever there are, in a folder that is removed; paths of its sockets have to be short."""
    old = dict(os.environ)
    os.environ.update(environment(**QUIET))  # some of it is read while ray is imported
    try:
        import ray
    except ImportError:
        missing("no ray here (pip install ray; tools/check --full runs these in .venv-ray)")
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=100 << 20, _temp_dir=folder, log_to_driver=False,
             runtime_env={"env_vars": {"PYTHONPATH": f"{os.environ['PYTHONPATH']}:{EXAMPLE}:{pathlib.Path(__file__).parent}"}})
    yield ray
    ray.shutdown()
    os.environ.clear()
    os.environ.update(old)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def nothing_is_left(request):
    """Neither actors nor what they have reserved."""
    yield
    if "ray" not in request.fixturenames:
        return
    ray, until = request.getfixturevalue("ray"), time.monotonic() + 20
    while ray.available_resources().get("CPU") != 4:
        assert time.monotonic() < until, ray.available_resources()
        time.sleep(0.1)


def test_four_actors_train_what_one_process_trains(ray, alone):
    import train
    import whale.ray
    results = whale.ray.launch(train.train, 4)
    assert len(results) == 4 and all(of_rank == results[0] for of_rank in results)
    assert [(step, f"{results[0][step - 1]:.9g}") for step in (10, 20, 30)] == alone(4)


def test_devices_arguments_and_order(ray, alone):
    import train
    import whale.ray
    results = whale.ray.launch(train.train, 2, "cpu:4", devices_per_rank=2, placement="SPREAD")
    assert [(step, f"{results[1][step - 1]:.9g}") for step in (10, 20, 30)] == alone(4)
    assert whale.ray.launch(lambda world, a, b: (world.rank, world.size, a, b), 3, "a", 7, resources={"CPU": 0.1}) == [(r, 3, "a", 7) for r in range(3)]
    assert whale.ray.launch(lambda world: world.size, 1) == [1]


def fails(world, how):
    import train
    train.train(world, steps=2)
    if world.rank == 1:
        if how == "raises":
            raise ValueError("no more data")
        if how == "raises what cannot be sent":
            import threading
            error = ValueError("no more data")
            error.lock = threading.Lock()
            raise error
        os.kill(os.getpid(), {"dies": signal.SIGKILL, "stops": signal.SIGSTOP}[how])
    train.train(world, steps=10**6)


@pytest.mark.parametrize("how", ["raises", "raises what cannot be sent", "dies", "stops"])
def test_the_rank_that_fails_is_named_and_the_others_end(ray, how):
    import whale.ray
    began = time.monotonic()
    with pytest.raises(whale.ray.RankFailed, match=rf"^rank 1 \(host '{os.uname().nodename}', process \d+\)") as caught:
        whale.ray.launch(fails, 3, how, timeout=5, grace=8)
    assert caught.value.rank == 1 and time.monotonic() - began < 40
    said = str(caught.value)
    if "raises" in how:
        assert "failed: ValueError: no more data\n" in said and "in fails" in said
        assert isinstance(caught.value.__cause__, ValueError) == (how == "raises")
    elif how == "dies":
        assert " died: " in said
    else:
        assert "it has not been heard for 5 seconds" in said


def test_the_first_rank_is_named_too(ray):
    import whale.ray
    with pytest.raises(whale.ray.RankFailed, match=r"^rank 0 \(.* failed: ZeroDivisionError") as caught:
        whale.ray.launch(lambda world: 1 // world.rank, 2)
    assert caught.value.rank == 0


def test_what_cannot_be_placed_is_said(ray):
    import whale.ray
    with pytest.raises(TimeoutError, match=r"room for 5 rank\(s\) of {'CPU': 1} each \(PACK\) in 1 seconds; of 4 CPU"):
        whale.ray.launch(lambda world: 0, 5, start_timeout=1)
    for wrong in ({"num_ranks": 0}, {"num_ranks": 2, "placement": "HERE"}, {"num_ranks": 2, "devices_per_rank": 0}):
        with pytest.raises(ValueError):
            whale.ray.launch(lambda world: 0, **wrong)


def test_the_example_runs_as_printed(ray, example, alone):
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # a Ray of its own
    env = environment(**QUIET, RAY_TMPDIR=folder)
    env.pop("RAY_ADDRESS", None)
    try:
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", block("Ray")], cwd=example, env=env, capture_output=True, text=True, timeout=300)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    assert done.returncode == 0, done.stderr + done.stdout
    assert f"step 30, loss {alone(4)[-1][1]}, in 4 actor(s)\n" in done.stdout


NODES = """
import os, sys, threading, time
import ray
from ray.cluster_utils import Cluster
import train, whale.ray
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False, "object_store_memory": 80 << 20})
second = cluster.add_node(num_cpus=2, object_store_memory=80 << 20)
ray.init(address=cluster.address, log_to_driver=False)
cluster.wait_for_nodes()
def whole(world):
    return ray.get_runtime_context().get_node_id(), train.train(world)
results = whale.ray.launch(whole, 2, placement="STRICT_SPREAD")
print(len({node for node, _ in results}), "nodes")
print(*[f"step {step}, loss {results[1][1][step - 1]:.9g}, in 2 actor(s)" for step in (10, 20, 30)], sep="\\n")
def lost(world, path, node):
    if ray.get_runtime_context().get_node_id() == node:
        with open(path, "w") as told:
            told.write(str(world.rank))
    train.train(world, steps=10**6)
def fails():
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.1)
    time.sleep(1)
    second.kill_raylet()  # as a node that crashes: its workers end with it
threading.Thread(target=fails, daemon=True).start()
try:
    whale.ray.launch(lost, 2, sys.argv[1], second.node_id, placement="STRICT_SPREAD", timeout=5)
except whale.ray.RankFailed as error:
    print("named", error.rank, "of node with", open(sys.argv[1]).read())
ray.shutdown()
cluster.shutdown()
"""


def test_ranks_on_two_nodes(tmp_path, alone):
    """Two of Ray's nodes on this machine, in a Ray of their own. They meet at the address that Ray has for the first one."""
    try:
        import ray
    except ImportError:
        missing("no ray here")
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    env = environment(**QUIET, RAY_TMPDIR=folder)
    env["PYTHONPATH"] += f":{EXAMPLE}"
    try:
        done = subprocess.run([sys.executable, "-c", NODES, str(tmp_path / "told")], env=env, capture_output=True, text=True, timeout=200)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = done.stdout.splitlines()
    assert rows[0] == "2 nodes" and losses(done.stdout) == alone(2)
    named = re.search(r"^named (\d) of node with (\d)$", done.stdout, re.M)
    assert named and named[1] == named[2], rows
