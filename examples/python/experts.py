#!/usr/bin/env python3
"""Expert parallelism: the samples are cut everywhere, and the experts of the mixture are spread over the same devices;
the reshards between are all-to-alls.

    python examples/python/experts.py"""

import numpy as np

import whale as wh


def model() -> wh.Graph:
    g = wh.Graph("moe")
    with g:
        tokens, targets = wh.input("tokens", (8, 16), wh.int32), wh.input("targets", (8, 16), wh.int32)
        with wh.replica(2):
            x = wh.nn.embedding(tokens, 256, 32)
            x = wh.nn.transformer_block(x, heads=4, causal=True)
        with wh.split(2, factor="experts"):
            y, balance, _ = wh.nn.moe(x, experts=4, hidden=64, top_k=2)
        with wh.replica(2):
            loss = wh.nn.cross_entropy(wh.nn.linear(wh.nn.layer_norm(x + y), 256, name="head"), targets) + 0.01 * balance.mean()
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
