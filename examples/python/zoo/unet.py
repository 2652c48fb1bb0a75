#!/usr/bin/env python3
"""A U-Net (Ronneberger et al., 2015) that finds a blot in noise: strided convolutions down, transposed ones up, skips between.

The picture's rows are split over two devices, which exchange the rows at the cut:

    python examples/python/zoo/unet.py [DEVICES]          # cpu:2 unless given"""

import sys

import numpy as np

import whale as wh


def twice(x: wh.Tensor, channels: int, name: str) -> wh.Tensor:
    with wh.scope(name):
        for _ in range(2):
            x = wh.ops.silu(wh.nn.conv2d(x, channels, 3))
        return x


def model(batch: int = 16, size: int = 24, channels: int = 8, levels: int = 2) -> wh.Graph:
    g = wh.Graph("unet")
    with g:
        images, blots = wh.input("images", (batch, size, size, 1)), wh.input("blots", (batch, size, size, 1))
        with wh.split(factor="height"):
            x, skips = images, []
            for level in range(levels):
                x = twice(x, channels << level, f"down{level}")
                skips.append(x)
                x = wh.nn.max_pool(x, 2)
            x = twice(x, channels << levels, "bottom")
            for level in reversed(range(levels)):
                x = wh.nn.conv2d_transpose(x, channels << level, 2, stride=2, name=f"up{level}")
                x = twice(wh.ops.concat([skips[level], x], axis=3), channels << level, f"join{level}")
            logits = wh.nn.conv2d(x, 1, 1, name="head")
            loss = wh.nn.binary_cross_entropy_with_logits(logits, blots)
        g.output("logits", logits)
        g.minimize(loss, wh.Adam(2e-3))
    return g


def data(seed: int, batch: int = 16, size: int = 24) -> dict:
    """Blots of three overlapping discs under noise."""
    rng = np.random.default_rng(seed)
    row, column = np.mgrid[:size, :size]
    y, x = rng.uniform(size / 4, size * 3 / 4, (2, batch, 1, 1, 1)) + rng.uniform(-size / 8, size / 8, (2, batch, 3, 1, 1))
    blots = (np.hypot(row - y, column - x) < rng.uniform(size / 10, size / 5, (batch, 3, 1, 1))).any(1)[..., None]
    return dict(images=(blots + rng.normal(0, 0.6, blots.shape)).astype(np.float32), blots=blots.astype(np.float32))


def main() -> None:
    job = wh.plan(model(), devices=sys.argv[1] if len(sys.argv) > 1 else "cpu:2").start(seed=0)
    for step in range(121):
        loss = job.step(**data(step))
        if step % 30 == 0:
            print(f"step {step:3}  loss {loss:.3f}")
    new = data(10**6)
    found = job.eval(["logits"], images=new["images"])["logits"] > 0
    print(f"{'what it sees':26}{'what it finds':26}what is there")
    for seen, said, true in zip(new["images"][0, ..., 0], found[0, ..., 0], new["blots"][0, ..., 0]):
        print("".join(" .:+#"[int(np.clip(v * 2 + 1, 0, 4))] for v in seen), "".join(" #"[int(v)] for v in said),
              "".join(" #"[int(v)] for v in true), sep="  ")
    both, either = (found & (new["blots"] > 0)).sum(), (found | (new["blots"] > 0)).sum()
    print(f"intersection over union of {len(found)} new pictures: {both / either:.2f}")


if __name__ == "__main__":
    main()
