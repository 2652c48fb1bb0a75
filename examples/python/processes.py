#!/usr/bin/env python3
"""One plan in several processes: two lines more than in one. Alone it is one process; under a launcher (docs/many-processes.md) one of many:

    whale launch -n 2 -- python3 examples/python/processes.py
"""

import numpy as np
import whale as wh

world = wh.world()  # which of how many this is, as the launcher says

g = wh.Graph("mlp")
with g:
    x, y = wh.input("x", (64, 20)), wh.input("y", (64,), wh.int32)
    with wh.replica():
        loss = wh.nn.cross_entropy(wh.nn.linear(wh.ops.relu(wh.nn.linear(x, 64)), 4), y)
    g.minimize(loss, wh.Adam(0.01))

job = wh.plan(g, world=world).start(seed=0)  # a CPU device a process
random = np.random.default_rng(0)  # every process makes the same batches, and takes its samples
for step in range(30):
    batch = random.normal(size=(64, 20)).astype(np.float32)
    value = job.step(x=batch, y=(batch[:, 0] > 0).astype(np.int32) * 2 + (batch[:, 1] > 0))
    if world.rank == 0 and step % 10 == 9:
        print(f"step {step + 1}, loss {value:.3f}, in {world.size} process(es)")
