#!/usr/bin/env python3
"""Each process reads its own samples: what its devices need of a data set on disk, and no more (docs/many-processes.md).

    whale launch -n 2 -- python3 examples/python/own_samples.py
"""

import pathlib
import tempfile

import numpy as np
import whale as wh

world = wh.world()
files = pathlib.Path(tempfile.mkdtemp())  # each process its own here; else a folder that all of them see
random = np.random.default_rng(0)
x = random.normal(size=(1000, 20)).astype(np.float32)
np.save(files / "x.npy", x)
np.save(files / "y.npy", (x[:, 0] > 0).astype(np.int32) * 2 + (x[:, 1] > 0))

g = wh.Graph("mlp")
with g:
    x, y = wh.input("x", (64, 20)), wh.input("y", (64,), wh.int32)
    with wh.replica():
        loss = wh.nn.cross_entropy(wh.nn.linear(wh.ops.relu(wh.nn.linear(x, 64)), 4), y)
    g.minimize(loss, wh.Adam(0.01))

job = wh.plan(g, world=world).start(seed=0)
data = {"x": wh.data.npy(files / "x.npy"), "y": wh.data.npy(files / "y.npy")}
loader = wh.data.Loader(data, 64, job=job, seed=0, epochs=3)
for batch in loader:
    value = job.step(**batch)
    if world.rank == 0 and job.iteration % len(loader) == 0:
        print(f"epoch {job.iteration // len(loader)}, loss {value:.3f}, in {world.size} process(es)")
