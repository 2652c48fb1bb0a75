#!/usr/bin/env python3
"""Hosts that set rounding modes, traps, limits and variables of the environment: results stay, and nothing is printed.

usage: test_host.py HOST (the program of host.c)"""
import os
import re
import subprocess
import sys

HOST = sys.argv[1]
F32, BF16, F64, F16 = "1", "2", "3", "4"
RESOURCE_EXHAUSTED = "8"
failures = 0


def host(*arguments, environment=None):
    """Output of the host; a failure is part of it."""
    run = subprocess.run([HOST, *arguments], env={**os.environ, **(environment or {})}, stdout=subprocess.PIPE,
                         stderr=subprocess.STDOUT, universal_newlines=True, timeout=280)
    return run.stdout.strip() + (f" (exit {run.returncode})" if run.returncode else "")


def expect(what, found, wanted):
    global failures
    if found != wanted:
        failures += 1
        print(f"{what}: {found!r}, expected {wanted!r}")


def floating_point():
    for devices, precision in (("ref:2", F64), ("cpu:2", F32), ("cpu:1", F32), ("cpu:1", BF16), ("cpu:1", F16)):
        plain = host("train", "plain", devices, precision)
        assert len(plain) == 16, plain
        for mode in ("upward", "downward", "zero", "flush", "traps"):
            expect(f"{devices}, precision {precision}, {mode}", host("train", mode, devices, precision), plain)


VARIABLES = [
    {f"{prefix}_VERBOSE": "2" for prefix in ("ONEDNN", "DNNL", "MKLDNN")},
    {"ONEDNN_MAX_CPU_ISA": "SSE41", "DNNL_MAX_CPU_ISA": "SSE41", "ONEDNN_CPU_ISA_HINTS": "PREFER_YMM"},
    {"ONEDNN_DEFAULT_FPMATH_MODE": "BF16", "ONEDNN_JIT_DUMP": "1", "DNNL_JIT_DUMP": "1", "ONEDNN_JIT_PROFILE": "6"},
    {"OMP_NUM_THREADS": "1", "OMP_DYNAMIC": "true", "OMP_MAX_ACTIVE_LEVELS": "0", "OMP_NESTED": "true"},
    {"OMP_SCHEDULE": "dynamic,3", "GOMP_SPINCOUNT": "0", "OMP_WAIT_POLICY": "passive", "OMP_STACKSIZE": "1M", "OMP_THREAD_LIMIT": "1"},
]
LIBGOMP = {"LD_PRELOAD": "libgomp.so.1"}  # as in a host that was linked with OpenMP


def environment():
    here = set(os.listdir("."))
    for devices in ("cpu:1", "cpu:2"):
        plain = host("train", "plain", devices, F32)
        for variables in VARIABLES:
            expect(f"{devices}, {variables}", host("train", "plain", devices, F32, environment=variables), plain)
        expect(f"{devices}, a host with libgomp", host("train", "plain", devices, F32, environment=LIBGOMP), plain)
    expect("files that were written", set(os.listdir(".")) - here, set())
    if len(os.sched_getaffinity(0)) > 1:
        expect("OMP_THREAD_LIMIT=1 with a team of all cores, a host with libgomp",
               "OMP_THREAD_LIMIT" in host("train", "plain", "cpu:1", F32, environment={**LIBGOMP, "OMP_THREAD_LIMIT": "1"}), True)


def runtime():
    """oneDNN runs on the threads of libwhale_cpu.so, which give way (engine/device/cpu/openmp.h), unless the host has brought libgomp."""
    for environment, wanted in (({}, "libwhale_cpu.so"), (LIBGOMP, "libgomp.so.1")):
        bound = host("train", "plain", "cpu:1", F32, environment={**environment, "LD_DEBUG": "bindings"})
        found = {re.search(r"to (\S+) ", line)[1].rsplit("/")[-1] for line in bound.splitlines()
                 if "normal symbol `GOMP_parallel'" in line and re.search(r"file \S*lib(dnnl|whale_cpu)", line)}
        expect(f"whose GOMP_parallel is called, {environment}", found, {wanted})


def limits():
    for devices in ("cpu:1", "cpu:3", "ref:3"):
        codes = host("threads", devices).split()
        # Each shortage is an error of the session; then there are enough, and all runs work.
        expect(f"{devices} with few threads", (set(codes[:-1]) <= {RESOURCE_EXHAUSTED}, codes[-1]), (True, "0"))
        if len(codes) < 2:
            print(f"note: {devices}: this system does not limit threads")
    for devices, precision in (("cpu:1", F32), ("cpu:2", F16)):
        for mib in ("1", "24", "64", "120"):
            found = host("addresses", devices, precision, mib)
            expect(f"{devices} in {mib} MiB", found in ("works", f"code {RESOURCE_EXHAUSTED}", f"later code {RESOURCE_EXHAUSTED}") or found, True)
        expect(f"{devices}, precision {precision}, in 1 GiB of addresses", host("addresses", devices, precision, "1024"), "works")


def cores():
    first, second, third, free, own = (int(text, 16) for text in host("cores").split())
    one = all(bits & (bits - 1) == 0 for bits in (first, second, third))
    expect("sessions of one core", (one, first == third, free), (True, True, own))
    if len(os.sched_getaffinity(0)) > 1:
        expect("cores of the second session", second & first, 0)


for test in (floating_point, environment, limits, cores):
    test()
sys.exit(failures != 0)
