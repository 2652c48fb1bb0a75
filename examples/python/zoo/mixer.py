#!/usr/bin/env python3
"""MLP-Mixer (Tolstikhin et al., 2021), which says how stripes lie: one MLP over the patches, one over the channels.

A pipeline of two stages and four micro-batches:

    python examples/python/zoo/mixer.py [DEVICES]          # cpu:2 unless given"""

import sys

import numpy as np

import whale as wh

ANGLES = ("lying", "rising", "standing", "falling")


def block(x: wh.Tensor, name: str) -> wh.Tensor:
    """x [b, patches, channels]."""
    with wh.scope(name):
        across = wh.nn.layer_norm(x, name="norm1").transpose(0, 2, 1)
        x = x + wh.nn.mlp(across, 2 * x.shape[1], name="tokens").transpose(0, 2, 1)
        return x + wh.nn.mlp(wh.nn.layer_norm(x, name="norm2"), 2 * x.shape[2], name="channels")


def model(batch: int = 32, size: int = 16, patch: int = 4, dim: int = 24, layers: int = 4) -> wh.Graph:
    g = wh.Graph("mixer")
    with g:
        images = wh.input("images", (batch, size, size))
        angles = wh.input("angles", (batch,), wh.int32)
        n = size // patch
        with wh.pipeline(2, micro_batches=4):
            patches = images.reshape(-1, n, patch, n, patch).transpose(0, 1, 3, 2, 4).reshape(-1, n * n, patch * patch)
            x = wh.nn.linear(patches, dim, name="patches")
            for _ in range(layers):
                x = block(x, "block")
            logits = wh.nn.linear(wh.nn.layer_norm(x).mean(axis=1), len(ANGLES), name="head")
            loss = wh.nn.cross_entropy(logits, angles)
        g.output("logits", logits)
        g.minimize(loss, wh.Adagrad(0.03))
    return g


def data(seed: int, batch: int = 32, size: int = 16) -> dict:
    rng = np.random.default_rng(seed)
    angles = rng.integers(0, len(ANGLES), batch).astype(np.int32)
    row, column = np.mgrid[:size, :size]
    turn = angles[:, None, None] * np.pi / 4 + rng.uniform(-0.3, 0.3, (batch, 1, 1))
    wave = rng.uniform(0.8, 1.4, (batch, 1, 1)) * (row * np.cos(turn) + column * np.sin(turn)) + rng.uniform(0, 6, (batch, 1, 1))
    return dict(images=(np.sin(wave) + rng.normal(0, 0.5, wave.shape)).astype(np.float32), angles=angles)


def main() -> None:
    job = wh.plan(model(), devices=sys.argv[1] if len(sys.argv) > 1 else "cpu:2").start(seed=0)
    for step in range(201):
        loss = job.step(**data(step))
        if step % 50 == 0:
            print(f"step {step:3}  loss {loss:.3f}")
    new = data(10**6, 32)
    said = job.eval(["logits"], **new)["logits"].argmax(1)
    print("what it says of stripes that are")
    for k, angle in enumerate(ANGLES):
        counts = np.bincount(said[new["angles"] == k], minlength=len(ANGLES))
        print(f"  {angle:9}" + "  ".join(f"{name} {'#' * n}" for name, n in zip(ANGLES, counts) if n))


if __name__ == "__main__":
    main()
