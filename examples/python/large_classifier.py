#!/usr/bin/env python3
"""A classifier of 100,000 classes (the Whale paper's example): the backbone is replicated, the classifier, which has
most of the parameters and few activations, is split. Both use the same devices, with a reshard between.

    python examples/python/large_classifier.py"""

import numpy as np

import whale as wh

CLASSES = 100_000


def model() -> wh.Graph:
    g = wh.Graph("classifier")
    with g:
        images, labels = wh.input("images", (16, 12, 12, 3)), wh.input("labels", (16,), wh.int32)
        with wh.replica(2):
            h = wh.ops.relu(wh.nn.conv2d(images, 16, 3, stride=2))
            features = wh.nn.global_avg_pool(wh.ops.relu(wh.nn.conv2d(h, 32, 3, stride=2)))
        with wh.split(2):
            loss = wh.nn.cross_entropy(wh.nn.linear(features, CLASSES, name="classifier"), labels)
        g.minimize(loss, wh.SGD(0.5))
    return g


def batch(step: int) -> dict:
    rng = np.random.default_rng(step)
    return dict(images=rng.standard_normal((16, 12, 12, 3)).astype(np.float32), labels=rng.integers(0, CLASSES, 16).astype(np.int32))


def main() -> None:
    plan = wh.plan(model(), devices="cpu:2")
    print(plan, end="\n\n")
    two, one = plan.start(seed=0), wh.plan(model(), devices="cpu:1", strategy="local").start(seed=0)
    for step in range(5):
        print(f"step {step}: loss {two.step(**batch(step)):.6f} on two devices, {one.step(**batch(step)):.6f} on one")


if __name__ == "__main__":
    main()
