"""Ranks that find each other by PMIx alone, as under prterun: OpenMPI's mpirun serves it here, and its own variables are taken away."""

import ctypes.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

import pytest

LIBRARY = pathlib.Path(os.environ.get("WHALE_LIBRARY", "x"))
pytestmark = [pytest.mark.alone, pytest.mark.skipif(not all((LIBRARY.parent / name).exists() for name in ("libwhale_ucx.so", "libwhale_pmix.so")), reason="built without UCX or PMIx"),
              pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun here")]

# mpirun's launcher of daemons: there may be no ssh. No root: whose machine a test's may be.
MPI = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_plm_rsh_agent": "sh"}
WITHOUT = 'for v in $(env | sed -n "s/^\\({}[^=]*\\)=.*/\\1/p"); do unset $v; done; exec "$@"'


def pmix(n, program, without="OMPI_", **more):
    """(standard output, standard error, status) of mpirun. without: how the variables begin that are taken away."""
    done = subprocess.run(["mpirun", "--oversubscribe", "-n", str(n), "sh", "-c", WITHOUT.format(without), "sh", sys.executable, "-c", program],
                          env={**os.environ, **MPI, **more}, capture_output=True, text=True, timeout=120)
    return done.stdout, done.stderr, done.returncode


TRAIN = """
import os
import numpy as np
import whale as wh
assert not any(name.startswith("OMPI_") for name in os.environ)
def train(world=None, devices=None):
    g = wh.Graph()
    with g:
        x, y = wh.input("x", (12, 6)), wh.input("y", (12,), wh.int32)
        with wh.replica():
            loss = wh.nn.cross_entropy(wh.nn.linear(wh.ops.relu(wh.nn.linear(x, 8)), 4), y)
        g.minimize(loss, wh.Adam(0.01))
    job = wh.plan(g, world=world, devices=devices).start(seed=3)
    at = np.random.default_rng(7)
    return " ".join(job.step(x=at.normal(size=(12, 6)).astype(np.float32), y=np.arange(12, dtype=np.int32) % 4).hex() for _ in range(5))
"""


def test_they_train_what_one_process_trains_and_meet_again():
    program = TRAIN + """
for _ in range(2):
    world = wh.world()
    print(f"rank {world.rank} of {world.size} {train(world)}\\n", end="", flush=True)
    del world
"""
    out, err, code = pmix(4, program)
    assert code == 0, err
    alone = subprocess.run([sys.executable, "-c", TRAIN + "print(train(devices='cpu:4'))"], capture_output=True, text=True, check=True, timeout=120).stdout.strip()
    assert sorted(out.splitlines()) == sorted(2 * [f"rank {r} of 4 {alone}" for r in range(4)])


def test_one_rank_is_alone():
    assert pmix(1, "import whale as wh; print(wh.world())") == ("<whale.World: rank 0 of 1>\n", "", 0)


def test_the_process_stays_as_it_was():
    program = """
import ctypes, signal
import whale as wh
libc = ctypes.CDLL(None)
def state():
    handlers = [bytes(area)[:8] for number in range(1, 32) for area in [(ctypes.c_char * 152)()] if libc.sigaction(number, None, area) == 0]
    variables, all = ctypes.POINTER(ctypes.c_char_p).in_dll(libc, "environ"), []
    while variables[len(all)]:
        all.append(variables[len(all)])
    return handlers, ctypes.cast(variables, ctypes.c_void_p).value, all
before = state()
world = wh.world()
assert "libpmix" in open("/proc/self/maps").read()
assert state() == before
del world
assert state() == before
"""
    out, err, code = pmix(2, program)
    assert (out, err, code) == ("", "", 0)


def test_a_rank_that_does_not_come_is_waited_for_as_long_as_said():
    program = """
import os, signal, time
import whale as wh
if os.environ["PMIX_RANK"] == "1":
    time.sleep(8)
    wh.world()
    os._exit(3)
signal.signal(signal.SIGALRM, signal.default_int_handler)
signal.setitimer(signal.ITIMER_REAL, 0.5)
began = time.monotonic()
for seconds in (30, 1):
    try:
        wh.world(timeout=seconds)
    except (KeyboardInterrupt, wh.DeadlineExceeded) as error:
        print(type(error).__name__, error, flush=True)
assert time.monotonic() - began < 6
wh.world()  # goes on where the others gave up
print("met", flush=True)
time.sleep(10)
"""
    out, err, code = pmix(2, program)
    first, second, last = out.splitlines()
    assert (first.strip(), last) == ("KeyboardInterrupt", "met"), out + err
    assert second.startswith("DeadlineExceeded the ranks of this job of PMIx, of which this is 0 of 2, have not all come in 1 seconds"), out
    assert code == 3


@pytest.mark.parametrize("order", ["mpi whale", "whale mpi"])
def test_beside_mpi(order):
    """Which joins the same server, before libwhale or after it, by variables of its own; libwhale does not see those that would be enough."""
    library = ctypes.util.find_library("mpi")
    if library is None:
        pytest.skip("no libmpi here")
    begin = {"mpi": "assert mpi.MPI_Init(None, None) == 0", "whale": "world = wh.world()"}
    program = f"""
import ctypes
import whale as wh
mpi, size = ctypes.CDLL({library!r}, ctypes.RTLD_GLOBAL), ctypes.c_int(0)
""" + "\n".join(begin[each] for each in order.split()) + """
everyone = ctypes.byref(ctypes.c_char.in_dll(mpi, "ompi_mpi_comm_world"))
assert mpi.MPI_Comm_size(everyone, ctypes.byref(size)) == 0 and (size.value, world.size) == (2, 2), (size, world)
assert "libpmix" in open("/proc/self/maps").read() and mpi.MPI_Barrier(everyone) == 0
assert mpi.MPI_Finalize() == 0
"""
    out, err, code = pmix(2, program, "OMPI_COMM_WORLD_")
    assert (out, code) == ("", 0), err


def test_without_the_library_nobody_trains_alone(tmp_path):
    for name in ("libwhale.so", "libwhale_cpu.so", "libwhale_ucx.so"):
        shutil.copy(LIBRARY.parent / name, tmp_path / name)
    began = time.monotonic()
    out, err, code = pmix(2, "import whale as wh; print(wh.world())", WHALE_LIBRARY=str(tmp_path / "libwhale.so"))
    assert out == "" and code != 0 and time.monotonic() - began < 20
    assert re.search(r"Unavailable: cannot open the library for PMIx.*libwhale_pmix.so.*libpmix2.*MASTER_ADDR", err), err


def test_without_a_server_nobody_trains_alone():
    done = subprocess.run([sys.executable, "-c", "import whale as wh; wh.world()"], env={**os.environ, "PMIX_RANK": "0", "PMIX_NAMESPACE": "none"},
                          capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "Unavailable: PMIx_Init failed: PMIx says UNREACHABLE" in done.stderr, done.stderr
