"""A first mixed plan: devices of this machine that are not equally fast, and a cluster that is not here.

    python examples/mixed/mixed.py            # some seconds
"""

import json
import pathlib

import numpy as np
import whale as wh


def gpt(batch=24):
    g = wh.Graph("gpt")
    with g:
        tokens, targets = wh.input("tokens", (batch, 64), wh.int32), wh.input("targets", (batch, 64), wh.int32)
        x = wh.nn.embedding(tokens, 256, 128)
        for i in range(4):
            x = wh.nn.transformer_block(x, heads=4, causal=True, name=f"block{i}")
        g.minimize(wh.nn.cross_entropy(wh.nn.linear(x, 256, name="head"), targets), wh.AdamW(1e-3))
    return g


def samples(plan):
    return [row["samples"][1] - row["samples"][0] for row in plan.to_dict()["entries"][0]["rows"]]


# 1. This machine: three devices of unlike speed. A probe would measure them (wh.probe("cpu@0,cpu@1*2")); here a file
#    says what it found, so that the example prints the same anywhere.
here = {"nodes": [{"devices": [{"device": "cpu@0", "flops_per_second": {"f32": 120e9}, "bytes_per_second": 20e9},
                               {"device": "cpu@0", "count": 2, "flops_per_second": {"f32": 60e9}, "bytes_per_second": 10e9}],
                   "inside": {"bytes_per_second": 5e9, "latency_seconds": 5e-6}}]}
pathlib.Path("here.json").write_text(json.dumps(here))
plan = wh.plan(gpt(), devices="file:here.json", strategy="replica")
print("samples of each device:", samples(plan))

# 2. It trains what one device trains.
rng = np.random.default_rng(0)
batches = [{name: rng.integers(0, 256, (24, 64)).astype(np.int32) for name in ("tokens", "targets")} for _ in range(3)]
losses = {}
for name, each in {"three devices": plan, "one device": wh.plan(gpt(), devices="cpu:1")}.items():
    with each.start(seed=0) as job:
        losses[name] = [float(job.step(**batch)) for batch in batches]
    print(name, " ".join(f"{loss:.4f}" for loss in losses[name]))
assert np.allclose(losses["three devices"], losses["one device"], rtol=1e-5)

# 3. A cluster that is not here: which strategy, and what would it take?
cluster = "4xV100-32GB,50Gb/s + 4xP100-16GB,50Gb/s"
found = wh.candidates(gpt(256), cluster)
for row in found["candidates"][:3]:
    print(f"{row['seconds'] * 1e3:7.2f} ms  {row['strategy']}  {row['lost'] or 'the best'}")
best = wh.plan(gpt(256), cluster, strategy="auto")
print("\n".join(note for note in best.to_dict()["notes"] if note.startswith(("Strategy", "Axis"))))

# 4. To look at: the cluster with each device's load and memory, and the timeline.
best.report("mixed.html")
print("wrote mixed.html")
