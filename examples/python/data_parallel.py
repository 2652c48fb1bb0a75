#!/usr/bin/env python3
"""Data parallelism: every device has the whole model and its share of the batch.

    python examples/python/data_parallel.py"""

import numpy as np

import whale as wh


def model() -> wh.Graph:
    g = wh.Graph("mlp")
    with g:
        x, y = wh.input("x", (32, 20)), wh.input("y", (32,), wh.int32)
        with wh.replica(shares=[2, 1, 1]):
            h = wh.ops.relu(wh.nn.linear(x, 64))
            h = wh.ops.relu(wh.nn.linear(h, 64))
            loss = wh.nn.cross_entropy(wh.nn.linear(h, 2), y)
        g.minimize(loss, wh.AdamW(1e-2))
    return g


def batch(step: int) -> dict:
    x = np.random.default_rng(step).standard_normal((32, 20)).astype(np.float32)
    return dict(x=x, y=(x[:, 0] > 0).astype(np.int32))


def main() -> None:
    plan = wh.plan(model(), devices="cpu:3")
    print(plan, end="\n\n")
    three, one = plan.start(seed=0), wh.plan(model(), devices="cpu:1", strategy="local").start(seed=0)
    for step in range(5):
        print(f"step {step}: loss {three.step(**batch(step)):.6f} on three devices, {one.step(**batch(step)):.6f} on one")


if __name__ == "__main__":
    main()
