#!/usr/bin/env python3
"""A step between two hosts of two CPU devices each, by this build and by another one, in alternating pairs. The hosts are namespaces of this
machine (needs root, ip and tc), and each sends at most what --rate says. docs/many-processes.md has what a run gave.

    tools/hosts.py --old OTHER/build --rate 1gbit --zero 3
"""

import argparse
import os
import pathlib
import statistics
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "launchers"))
from hosts import Network, ip  # noqa: E402

PROGRAM = """
import statistics, sys, time
import numpy as np
import whale as wh
graph = wh.Graph()
with graph:
    x, y = wh.input("x", (16, 256)), wh.input("y", (16,), wh.int32)
    with wh.replica():
        h = x
        for _ in range(4):
            h = wh.ops.relu(wh.nn.linear(h, 512))
        loss = wh.nn.cross_entropy(wh.nn.linear(h, 16), y)
    graph.minimize(loss, wh.Adam(0.01))
job = wh.plan(graph, world=wh.world(), devices="cpu:4", zero=int(sys.argv[1])).start(seed=3)
times = []
for _ in range(14):
    begin = time.perf_counter()
    loss = job.step(x=np.ones((16, 256), np.float32), y=np.arange(16, dtype=np.int32))
    times.append(time.perf_counter() - begin)
print(1e3 * statistics.median(times[3:]), float(loss).hex())
"""


def step(network, build, zero):
    """Milliseconds of the slower host, and the last loss."""
    build = pathlib.Path(build).resolve()
    environment = dict(os.environ, PYTHONPATH=str(ROOT / "sdk" / "python"), WHALE_LIBRARY=str(build / "capi" / "libwhale.so"), WORLD_SIZE="2",
                       WHALE_LIBRARY_DIR=str(build / "engine" / "device" / "cpu"), MASTER_ADDR=network.address(0), MASTER_PORT="29500",
                       WHALE_JOB_TOKEN="secret", UCX_TLS="tcp,self")
    ranks = [network.start(host, sys.executable, "-c", PROGRAM, str(zero), env=dict(environment, RANK=str(host))) for host in range(2)]
    ends = [rank.communicate(timeout=300) for rank in ranks]
    for rank, (_, errors) in zip(ranks, ends):
        if rank.returncode:
            sys.exit(errors)
    told = [out.split() for out, _ in ends]
    return max(float(milliseconds) for milliseconds, _ in told), told[0][1]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=str(ROOT / "build"), help="build folder")
    parser.add_argument("--old", required=True, help="another one, beside it")
    parser.add_argument("--rate", default="1gbit", help="that a host sends at, as tc takes it")
    parser.add_argument("--zero", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=10)
    args = parser.parse_args()
    builds, times, losses = {"old": args.old, "new": args.build}, {"old": [], "new": []}, set()
    network = Network(2)
    try:
        for host in network.hosts:
            ip("tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", args.rate, "burst", "64kb", "latency", "50ms", inside=host.pid)
        for pair in range(args.pairs):
            for name in sorted(builds, reverse=pair % 2 == 0):
                milliseconds, loss = step(network, builds[name], args.zero)
                times[name].append(milliseconds)
                losses.add(loss)
    finally:
        network.end()
    ratios = [old / new for old, new in zip(times["old"], times["new"])]
    low, middle, high = statistics.quantiles(ratios, n=4) if args.pairs > 1 else 3 * ratios
    print(f"{args.rate}, ZeRO {args.zero}: old {statistics.median(times['old']):.1f} ms, new {statistics.median(times['new']):.1f} ms, "
          f"old over new {middle:.2f} ({low:.2f}-{high:.2f}); losses {'alike' if len(losses) == 1 else 'DIFFER'}")


if __name__ == "__main__":
    main()
