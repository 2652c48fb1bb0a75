#!/usr/bin/env python3
"""ConvNeXt (Liu et al., 2022), which counts the dots in a picture: depthwise convolutions, layer norm, layer scale.

    python examples/python/zoo/convnext.py [DEVICES]          # cpu:2 unless given"""

import sys

import numpy as np

import whale as wh

MOST = 5


def block(x: wh.Tensor, name: str) -> wh.Tensor:
    """x + scale * mlp(norm(depthwise(x))); the scale of each channel starts small."""
    dim = x.shape[-1]
    with wh.scope(name):
        y = wh.nn.conv2d(x, dim, 5, groups=dim, name="depthwise")
        y = wh.nn.mlp(wh.nn.layer_norm(y, epsilon=1e-6), 4 * dim, activation="gelu_erf")
        return x + wh.parameter("scale", (dim,), wh.constant(0.1)) * y


def model(batch: int = 32, size: int = 16, dims: tuple = (16, 32), depth: int = 2) -> wh.Graph:
    g = wh.Graph("convnext")
    with g:
        images = wh.input("images", (batch, size, size, 1))
        counts = wh.input("counts", (batch,), wh.int32)
        with wh.replica():
            x = images
            for i, dim in enumerate(dims):
                with wh.scope(f"stage{i}"):
                    x = wh.nn.layer_norm(x) if i else x
                    x = wh.nn.conv2d(x, dim, 2, stride=2, padding="valid", name="down")
                    for j in range(depth):
                        x = block(x, f"block{j}")
            logits = wh.nn.linear(wh.nn.layer_norm(wh.nn.global_avg_pool(x)), MOST + 1, name="head")
            loss = wh.nn.cross_entropy(logits, counts, label_smoothing=0.1)
        g.output("logits", logits)
        g.minimize(loss, wh.AdamW(3e-3, weight_decay=0.05, lr_schedule=wh.cosine(300, warmup=20)))
    return g


def data(seed: int, batch: int = 32, size: int = 16) -> dict:
    """Pictures of up to MOST dots that do not touch."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, MOST + 1, batch).astype(np.int32)
    images = rng.normal(0, 0.05, (batch, size, size, 1))
    cells = [(y, x) for y in range(0, size - 3, 4) for x in range(0, size - 3, 4)]
    for image, count in zip(images, counts):
        for cell in rng.choice(len(cells), min(count, len(cells)), replace=False):
            y, x = np.array(cells[cell]) + rng.integers(0, 2, 2)
            image[y:y + 2, x:x + 2] += 1
    return dict(images=images.astype(np.float32), counts=counts)


def main() -> None:
    job = wh.plan(model(), devices=sys.argv[1] if len(sys.argv) > 1 else "cpu:2").start(seed=0)
    for step in range(301):
        loss = job.step(**data(step))
        if step % 50 == 0:
            print(f"step {step:3}  loss {loss:.3f}  learning rate {job.learning_rate:.4f}")
    new = data(10**6)
    said = job.eval(["logits"], **new)["logits"].argmax(1)
    for lines in zip(*[["".join(" o"[int(v > 0.5)] for v in line) for line in image[..., 0]] for image in new["images"][:4]]):
        print(" | ".join(lines))
    print(" | ".join(f"{f'I count {n}':16}" for n in said[:4]))
    print(f"{(said == new['counts']).mean():.0%} of {len(said)} new pictures are counted right")


if __name__ == "__main__":
    main()
