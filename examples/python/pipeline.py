#!/usr/bin/env python3
"""A pipeline: two stages on devices of their own; micro-batches keep both busy.

    python examples/python/pipeline.py"""

import numpy as np

import whale as wh


def model() -> wh.Graph:
    g = wh.Graph("gpt")
    with g:
        tokens, targets = wh.input("tokens", (8, 16), wh.int32), wh.input("targets", (8, 16), wh.int32)
        with wh.pipeline(micro_batches=4):
            with wh.stage():
                x = wh.nn.embedding(tokens, 256, 64) + wh.parameter("positions", (16, 64), wh.normal(0.02))
                x = wh.nn.transformer_block(x, heads=4, causal=True, name="block0")
            with wh.stage():
                x = wh.nn.transformer_block(x, heads=4, causal=True, name="block1")
                loss = wh.nn.cross_entropy(wh.nn.linear(wh.nn.layer_norm(x), 256, name="head"), targets)
        g.minimize(loss, wh.AdamW(1e-3))
    return g


def batch(step: int) -> dict:
    text = np.random.default_rng(step).integers(0, 256, (8, 17)).astype(np.int32)
    return dict(tokens=text[:, :-1], targets=text[:, 1:])


def main() -> None:
    plan = wh.plan(model(), devices="cpu:2")
    print(plan, end="\n\n")
    two, one = plan.start(seed=0), wh.plan(model(), devices="cpu:1", strategy="local").start(seed=0)
    for step in range(5):
        print(f"step {step}: loss {two.step(**batch(step)):.6f} on two devices, {one.step(**batch(step)):.6f} on one")


if __name__ == "__main__":
    main()
