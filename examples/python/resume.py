#!/usr/bin/env python3
"""Trains on two devices, saves, and goes on with three: a checkpoint belongs to the model, not to a plan.

    python examples/python/resume.py"""

import tempfile

import numpy as np

import whale as wh


def model() -> wh.Graph:
    g = wh.Graph("regression")
    with g:
        x, y = wh.input("x", (24, 8)), wh.input("y", (24, 1))
        with wh.replica():
            h = wh.ops.tanh(wh.nn.linear(x, 32))
            loss = wh.nn.mse(wh.nn.linear(h, 1), y)
        g.minimize(loss, wh.AdamW(1e-2))
    return g


def batch(step: int) -> dict:
    x = np.random.default_rng(step).standard_normal((24, 8)).astype(np.float32)
    return dict(x=x, y=np.sin(x.sum(axis=1, keepdims=True)))


def main() -> None:
    directory = tempfile.mkdtemp() + "/checkpoint"
    two = wh.plan(model(), devices="cpu:2").start(seed=1)
    for step in range(100):
        two.step(**batch(step))
    two.save(directory)
    three = wh.plan(model(), devices="cpu:3", strategy="replica(3, shares=[2,1,1])").start()
    three.load(directory)
    for step in range(100, 103):
        print(f"step {step}: {two.step(**batch(step)):.6f} on two devices, {three.step(**batch(step)):.6f} on three")


if __name__ == "__main__":
    main()
