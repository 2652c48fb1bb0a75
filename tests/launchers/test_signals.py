"""Hosts in Go and Rust keep their signal handlers beside UCX (signals/); Python's: sdk/python/tests/test_world_of_processes.py."""

import pathlib
import shutil
import subprocess

import pytest
from conftest import ROOT, WHALE, environment, needs, run

SOURCES = pathlib.Path(__file__).parent / "signals"
LIBRARY = pathlib.Path(environment()["WHALE_LIBRARY"]).parent
LINK = [f"-L{LIBRARY}", "-lwhale", f"-Wl,-rpath,{LIBRARY}"]


@pytest.fixture(scope="module", params=["go", "rust"])
def host(request, tmp_path_factory):
    folder = shutil.copytree(SOURCES, tmp_path_factory.mktemp(request.param) / "signals")
    if request.param == "go":
        needs("go", "gcc", package="golang-go gcc")
        env = environment(CGO_ENABLED="1", CGO_CFLAGS=f"-I{ROOT}/capi", CGO_LDFLAGS=" ".join(LINK), GOCACHE=str(folder / "cache"), GOFLAGS="-mod=mod", GOTOOLCHAIN="local")
        run(["go", "build", "-o", "host", "."], cwd=folder, env=env)
    else:
        needs("rustc", "gcc", package="rustc gcc")
        run(["gcc", "-c", f"-I{ROOT}/capi", "train.c", "-o", "train.o"], cwd=folder)
        run(["rustc", "host.rs", "-o", "host", *[f"-Clink-arg={each}" for each in ["train.o", *LINK]]], cwd=folder)
    return folder / "host"


def launched(host, **more):
    done = subprocess.run([WHALE, "launch", "-n", "2", "--output", "all", "--", str(host)], env=environment(**more), capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


def test_handlers_are_the_hosts_own(host):
    code, told = launched(host)
    assert code == 0 and told.count("all handlers are the host's own") == 2 and "rank 1 of 2: loss" in told, told


def test_it_would_be_seen(host):
    """UCX's own default, which libwhale leaves to those who ask for it."""
    code, told = launched(host, UCX_HANDLE_ERRORS="bt", UCX_DEBUG_SIGNO="SIGHUP")
    assert code == 1 and "SIGSEGV has another handler" in told and "SIGTERM has another handler" not in told, told
