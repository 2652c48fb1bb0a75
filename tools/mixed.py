#!/usr/bin/env python3
"""Real mixed devices: shares and stage cuts that the planner finds from a probe, beside equal ones and the best of all legal cuts, each of which is timed.

One device with a core of its own beside two that share the other; and two processes, one of which a control group lets have a part of its core
(`--quota`, percent; needs the right to make control groups). Prints a table (docs/clusters.md).
"""
import argparse
import contextlib
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
SHARED = "cpu@0,cpu@1*2"
BATCH = {"gpt": 24, "resnet": 48}
LAYERS, HEADS, MICRO_BATCHES = 6, 4, 6
ROWS = [("gpt", "replica"), ("gpt", "split"), ("gpt", "pipeline"), ("resnet", "replica")]


# ---- what is run: here, or by each rank of several -----------------------------------------------------------------
def gpt(stages: list[int]):
    """stages: layers of each; none: nothing is annotated."""
    import whale as wh
    g = wh.Graph("gpt")
    with g, contextlib.ExitStack() as around:
        if stages:
            around.enter_context(wh.pipeline(micro_batches=MICRO_BATCHES))
        ends = list(itertools.accumulate(stages))
        tokens, targets = (wh.input(name, (BATCH["gpt"], 64), wh.int32) for name in ("tokens", "targets"))
        with contextlib.ExitStack() as stage:
            def next_stage():
                stage.close()
                if stages:
                    stage.enter_context(wh.stage())
            next_stage()
            x = wh.nn.embedding(tokens, 256, 256)
            for i in range(LAYERS):
                if i in ends[:-1]:
                    next_stage()
                x = wh.nn.transformer_block(x, heads=HEADS, causal=True, name=f"block{i}")
            g.minimize(wh.nn.cross_entropy(wh.nn.linear(x, 256, name="head"), targets), wh.AdamW(1e-3))
    return g


def resnet(_stages):
    import whale as wh
    return wh.load(os.environ["WHALE_RESNET"])


def worker(model: str, devices: str, cluster: str, cuts: list) -> None:
    """A JSON line: seconds of a step by each cut, and the planner's own. cuts: {"strategy", "stages", "cluster"}, which is planned for the probed devices."""
    import numpy as np
    import whale as wh
    world = None
    if "RANK" in os.environ:
        world = wh.world()
        cores = [int(device.partition("@")[2]) for device in devices.split(",")]
        os.sched_setaffinity(0, {cores[world.rank]})  # libwhale pins no rank of several
    if not pathlib.Path(cluster).exists():
        found = wh.probe(devices, world=world)
        if world is None or world.rank == 0:
            pathlib.Path(cluster).write_text(json.dumps(found))
        print(json.dumps({"probed": [max(d["flops_per_second"]["f32"].values()) for d in found["devices"]]}), flush=True)
        return
    random, rows = np.random.default_rng(0), []
    for cut in cuts:
        graph = {"gpt": gpt, "resnet": resnet}[model](cut.get("stages", []))
        plan = wh.plan(graph, devices=f"file:{cluster}" if cut.get("cluster") else devices, strategy=cut.get("strategy") or None, world=world)
        axes = plan.to_dict()["meshes"][0]["axes"]
        found = next((axis["shares"] for axis in axes if axis.get("shares")), [])
        with plan.start(seed=0) as job:
            batch = {port.name: random.standard_normal(port.dims).astype(np.float32) if port.dtype == wh.float32 else random.integers(0, 10, port.dims).astype(np.int32)
                     for port in job.inputs()}
            taken = []
            for _ in range(1 + cut.get("steps", 3)):
                start = time.perf_counter()
                job.step(**batch)
                taken.append(time.perf_counter() - start)
        rows.append({"seconds": statistics.median(taken[1:]) if world is None else statistics.mean(taken[1:]), "shares": found})
    if world is None or world.rank == 0:
        print(json.dumps(rows), flush=True)


# ---- the table ----------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def control_group(percent: int):
    """Its file of processes; of cgroup v1 or v2."""
    for root, limit in (("/sys/fs/cgroup/cpu", "cpu.cfs_quota_us"), ("/sys/fs/cgroup", "cpu.max")):
        folder = pathlib.Path(root) / "whale-mixed"
        try:
            folder.mkdir(exist_ok=True)
            text = str(percent * 1000) if "cfs" in limit else f"{percent * 1000} 100000"
            (folder / limit).write_text(text)
        except OSError:
            continue
        try:
            yield folder / "cgroup.procs"
        finally:
            folder.rmdir()
        return
    raise SystemExit("--quota: no control group can be made here, which root of a machine can")


class Setup:
    """Devices, of this process or a rank each, and where the last rank's quota is."""

    def __init__(self, tool, folder, devices: str, ranks: int = 1, group=None):
        self.devices, self.folder = devices, pathlib.Path(folder)
        self.launch = []
        if ranks > 1:
            limited = f'[ "$RANK" = {ranks - 1} ] && echo $BASHPID > {group}; exec "$@"' if group else 'exec "$@"'
            self.launch = [tool, "launch", "-n", str(ranks), "--output", "all", "--", "bash", "-c", limited, "bash"]
        self.cluster = str(self.folder / "here.json")

    def run(self, model: str, cuts: list) -> list:
        command = [*self.launch, sys.executable, __file__, "--worker", json.dumps([model, self.devices, self.cluster, cuts])]
        done = subprocess.run(command, capture_output=True, text=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith(("[", "{"))]
        if done.returncode or not lines:
            raise SystemExit(f"{model} on {self.devices}: exit {done.returncode}: {done.stderr[-600:]}")
        return json.loads(lines[0])


def legal_cuts(model: str, strategy: str, devices: int) -> list:
    """Of a batch in 24ths, of heads, of layers."""
    if strategy == "pipeline":
        return [{"stages": list(c)} for c in itertools.product(range(1, LAYERS), repeat=devices) if sum(c) == LAYERS]
    units = HEADS if strategy == "split" else 24
    parts = [c for c in itertools.product(range(1, units), repeat=devices) if sum(c) == units]
    if strategy == "replica" and devices == 3:  # the two that share a core are alike
        parts = [c for c in parts if c[1] == c[2]]
    return [{"strategy": f"{strategy}({devices}, shares=[{','.join(map(str, c))}])"} for c in parts]


def table(setup: Setup, rows: list, pairs: int, name: str) -> None:
    probed = setup.run("gpt", [])["probed"]
    print(f"{name}: probed at {', '.join(f'{each / 1e9:.0f}' for each in probed)} GFLOP/s")
    count = len(probed)
    print(f"{'':<16}{'planned':<16}{'equal':>10}{'planned':>12}{'best cut':>12}   best over planned; equal over planned")
    for model, strategy in rows:
        cuts = legal_cuts(model, strategy, count)
        planned = {"strategy": f"pipeline({count}, micro_batches={MICRO_BATCHES})" if strategy == "pipeline" else strategy, "cluster": True}
        equal = ({"stages": [LAYERS // count] * count} if strategy == "pipeline"
                 else {"strategy": f"{strategy}({count}, shares=[{','.join(['1'] * count)}])"})
        seconds = [row["seconds"] for row in setup.run(model, cuts)]
        best = cuts[seconds.index(min(seconds))]
        times, shares = [[], [], []], []
        kinds = [equal, planned, best]
        for pair in range(pairs):
            order = [(pair + k) % 3 for k in range(3)]  # what comes later in a process finds its memory warm
            for kind, found in zip(order, setup.run(model, [kinds[k] for k in order])):
                times[kind].append(found["seconds"])
                shares = found["shares"] if kind == 1 else shares
        quarters = lambda list: statistics.quantiles(list, n=4, method="inclusive")
        of_best = quarters([b / p for p, b in zip(times[1], times[2])])
        faster = statistics.median(e / p for e, p in zip(times[0], times[1]))
        middle = [1e3 * statistics.median(t) for t in times]
        text = best.get("stages") or best["strategy"].partition("[")[2].rstrip(")]")
        print(f"{model + ' ' + strategy:<16}{str([int(s) for s in shares]) if shares else '':<16}{middle[0]:>7.1f} ms{middle[1]:>9.1f} ms{middle[2]:>9.1f} ms   "
              f"{of_best[1]:.2f} ({of_best[0]:.2f}-{of_best[2]:.2f}) of {text}; {faster:.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=str(ROOT / "build"))
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--quota", type=int, default=0, help="two processes, one of which has so many percent of a core")
    parser.add_argument("--only", default="", help="rows whose name has this")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker(*json.loads(args.worker))
    build = pathlib.Path(args.build).resolve()
    os.environ.setdefault("WHALE_LIBRARY", str(build / "capi" / "libwhale.so"))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "sdk" / "python"), os.environ.get("PYTHONPATH", "")])
    tool = str(build / "tools" / "whale" / "whale")
    rows = [row for row in ROWS if args.only in " ".join(row)]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["WHALE_RESNET"] = f"{folder}/resnet.whale"
        subprocess.run([tool, "model", "resnet", "--layers", "20", "--batch", str(BATCH["resnet"]), "-o", os.environ["WHALE_RESNET"]], check=True, capture_output=True)
        if not args.quota:
            return table(Setup(tool, folder, SHARED), rows, args.pairs, SHARED)
        with control_group(args.quota) as group:
            table(Setup(tool, folder, "cpu@0,cpu@1", 2, group), rows, args.pairs, f"two processes, one with {args.quota} % of its core")


if __name__ == "__main__":
    main()
