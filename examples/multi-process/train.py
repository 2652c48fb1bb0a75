#!/usr/bin/env python3
"""One plan in several processes: two lines more than in one. Alone it is one process; under a launcher (README.md) one of many:

    whale launch -n 4 -- python3 train.py            # a CPU device each
    python3 train.py cpu:4                           # one process with as many devices: the same losses, to the last bit
"""

import sys

import numpy as np
import whale as wh


def train(world, devices=None, steps=30):
    g = wh.Graph("mlp")
    with g:
        x, y = wh.input("x", (64, 20)), wh.input("y", (64,), wh.int32)
        with wh.replica():
            loss = wh.nn.cross_entropy(wh.nn.linear(wh.ops.relu(wh.nn.linear(x, 64)), 4), y)
        g.minimize(loss, wh.Adam(0.01))

    job = wh.plan(g, devices=devices, world=world).start(seed=0)  # of all processes together; not said: a CPU device each
    random = np.random.default_rng(0)  # every process makes the same batches, and takes its samples
    losses = []
    for step in range(steps):
        batch = random.normal(size=(64, 20)).astype(np.float32)
        losses.append(job.step(x=batch, y=(batch[:, 0] > 0).astype(np.int32) * 2 + (batch[:, 1] > 0)))
        if world.rank == 0 and step % 10 == 9:
            print(f"step {step + 1}, loss {losses[-1]:.9g}, in {world.size} process(es)", flush=True)
    return losses


if __name__ == "__main__":
    train(wh.world(), *sys.argv[1:])  # which of how many this is, as the launcher says
