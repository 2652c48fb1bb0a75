#!/usr/bin/env python3
"""A vision transformer (Dosovitskiy et al., 2021) that tells shapes apart: patches, a class token, learned positions.

    python examples/python/zoo/vit.py [DEVICES]          # cpu:2 unless given"""

import sys

import numpy as np

import whale as wh

KINDS = ("disc", "square", "cross", "ring")


def model(batch: int = 32, size: int = 16, patch: int = 4, dim: int = 32, heads: int = 4, layers: int = 2) -> wh.Graph:
    g = wh.Graph("vit")
    with g:
        images = wh.input("images", (batch, size, size, 1))
        kinds = wh.input("kinds", (batch,), wh.int32)
        places = (size // patch) ** 2
        with wh.replica():
            x = wh.nn.conv2d(images, dim, patch, stride=patch, padding="valid", name="patches").reshape(-1, places, dim)
            token = wh.parameter("class_token", (1, 1, dim), wh.normal(0.02))
            x = wh.ops.concat([wh.ops.broadcast_to(token, shape=(batch, 1, dim)), x], axis=1)
            x = x + wh.parameter("positions", (1 + places, dim), wh.normal(0.02))
            for _ in range(layers):
                x = wh.nn.transformer_block(x, heads, hidden=2 * dim, activation="gelu_erf")
            logits = wh.nn.linear(wh.nn.layer_norm(x[:, 0]), len(KINDS), name="head")
            loss = wh.nn.cross_entropy(logits, kinds)
        g.output("logits", logits)
        g.minimize(loss, wh.AdamW(2e-3, weight_decay=0.05))
    return g


def data(seed: int, batch: int = 32, size: int = 16) -> dict:
    """Noisy pictures of one shape each, somewhere."""
    rng = np.random.default_rng(seed)
    kinds = rng.integers(0, len(KINDS), batch).astype(np.int32)
    row, column = np.mgrid[:size, :size]
    images = rng.normal(0, 0.15, (batch, size, size, 1))
    for image, kind in zip(images, kinds):
        y, x = rng.integers(size // 4, size - size // 4, 2)
        dy, dx = abs(row - y), abs(column - x)
        far, radius = np.hypot(dy, dx), size / 4
        image[..., 0] += (far < radius, np.maximum(dy, dx) < radius - 1, (np.minimum(dy, dx) < 1) & (dy + dx < radius + 1),
                          abs(far - radius + 1) < 0.8)[kind]
    return dict(images=images.astype(np.float32), kinds=kinds)


def main() -> None:
    job = wh.plan(model(), devices=sys.argv[1] if len(sys.argv) > 1 else "cpu:2").start(seed=0)
    for step in range(201):
        loss = job.step(**data(step))
        if step % 50 == 0:
            print(f"step {step:3}  loss {loss:.3f}")
    new = data(10**6)
    said = job.eval(["logits"], **new)["logits"].argmax(1)
    pictures = [["".join(" .+#"[int(np.clip(v * 4, 0, 3))] for v in line) for line in image[..., 0]] for image in new["images"][:4]]
    for lines in zip(*pictures):
        print("   ".join(lines))
    print("   ".join(f"{KINDS[k] + '!':16}" for k in said[:4]))
    print(f"{(said == new['kinds']).mean():.0%} of {len(said)} new pictures are named right")


if __name__ == "__main__":
    main()
