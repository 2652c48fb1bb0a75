"""What tests of real launchers share. Under tools/check --full (WHALE_FULL=1) a launcher that is missing is a failure, else its tests are skipped."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

# mpirun refuses root, whose machine a test's may be.
MPI = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
ROOT = pathlib.Path(__file__).resolve().parents[2]
WHALE = os.environ.get("WHALE", str(ROOT / "build/tools/whale/whale"))
EXAMPLE = ROOT / "examples/multi-process"


def missing(reason):
    (pytest.fail if os.environ.get("WHALE_FULL") else pytest.skip)(reason)


def needs(*programs, package):
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    for program in programs:
        if shutil.which(program, path=path) is None:
            missing(f"no {program} here (Debian: {package})")


def environment(*folders, **more):
    """Of a command: these folders, the interpreter's own and whale's before all others in PATH."""
    path = os.pathsep.join([*map(str, folders), str(pathlib.Path(sys.executable).parent), str(pathlib.Path(WHALE).parent), os.environ["PATH"], "/usr/sbin:/sbin"])
    library = os.environ.get("WHALE_LIBRARY", str(ROOT / "build/capi/libwhale.so"))
    return {**os.environ, "PYTHONPATH": str(ROOT / "sdk/python"), "WHALE_LIBRARY": library, "PATH": path, **more}


def block(section):
    """The commands of a section of the example's README, as printed."""
    text = (EXAMPLE / "README.md").read_text()
    return re.search(rf"^## {re.escape(section)}\n.*?^```bash\n(.*?)^```", text, re.S | re.M).group(1)


def lines(output):
    """What the example prints of its steps: [(step, loss, processes)]."""
    return re.findall(r"step (\d+), loss (\S+), in (\d+) (?:process\(es\)|actor\(s\))", output)


def losses(output):
    return [(int(step), loss) for step, loss, _ in lines(output)]


def run(command, **options):
    done = subprocess.run(command, capture_output=True, text=True, **{"timeout": 300, "env": environment(), **options})
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-2000:]
    return done.stdout


@pytest.fixture(scope="session")
def alone():
    """What one process prints with n devices; nine digits, which tell all float32 numbers apart."""
    known = {}

    def of(n):
        if n not in known:
            known[n] = losses(run([sys.executable, str(EXAMPLE / "train.py"), f"cpu:{n}"]))
            assert len(known[n]) == 3
        return known[n]

    return of


def train_program(folder):
    """./train, as the docs have it: the example, which needs nothing of the environment."""
    own = environment()
    (folder / "train").write_text("#!/bin/sh\n" + "".join(f"export {name}='{own[name]}'\n" for name in ("PYTHONPATH", "WHALE_LIBRARY"))
                                  + f"exec {sys.executable} {EXAMPLE}/train.py\n")
    (folder / "train").chmod(0o755)


@pytest.fixture
def example(tmp_path):
    """A copy of the example, to run and leave files in."""
    return shutil.copytree(EXAMPLE, tmp_path / "multi-process", ignore=shutil.ignore_patterns("__pycache__"))


@pytest.fixture
def network():
    """Four hosts."""
    needs("ip", "tc", "unshare", "nsenter", package="iproute2 util-linux")
    if os.getuid() != 0:
        pytest.skip("namespaces need root")
    import hosts
    network = hosts.Network(4)
    yield network
    network.end()
