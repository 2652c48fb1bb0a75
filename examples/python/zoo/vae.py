#!/usr/bin/env python3
"""A variational autoencoder (Kingma & Welling, 2014) that imagines strokes. Its noise is an input, so that a run can be repeated
by anyone who has the numbers; the decoder stands in the model twice, on parameters made once: for what was seen and for noise alone.

    python examples/python/zoo/vae.py [DEVICES]          # cpu:2 unless given"""

import sys

import numpy as np

import whale as wh


def dense(features_in: int, features: int, name: str):
    """A layer as a function: each call uses the same parameters."""
    with wh.scope(name):
        weight = wh.parameter("weight", (features_in, features), wh.normal(features_in ** -0.5))
        bias = wh.parameter("bias", (features,))
    return lambda x: wh.ops.matmul(x, weight, bias)


def model(batch: int = 32, size: int = 10, hidden: int = 64, latent: int = 3) -> wh.Graph:
    g = wh.Graph("vae")
    with g:
        images, noise = wh.input("images", (batch, size, size)), wh.input("noise", (batch, latent))
        with wh.replica():
            seen = images.reshape(-1, size * size)
            h = wh.ops.tanh(dense(size * size, hidden, "encoder")(seen))
            mean, log_variance = dense(hidden, latent, "mean")(h), dense(hidden, latent, "log_variance")(h)
            code = mean + wh.ops.exp(0.5 * log_variance) * noise

            first, second = dense(latent, hidden, "decoder"), dense(hidden, size * size, "pixels")
            decode = lambda z: second(wh.ops.tanh(first(z)))
            logits = decode(code)
            seen_again = wh.ops.bce_with_logits(logits, seen).sum(axis=1)
            divergence = 0.5 * (mean * mean + wh.ops.exp(log_variance) - 1.0 - log_variance).sum(axis=1)
            loss = (seen_again + divergence).mean()
            imagined = wh.ops.sigmoid(decode(noise)).reshape(-1, size, size)
        g.output("logits", logits)
        g.output("divergence", divergence)
        g.output("imagined", imagined)
        g.minimize(loss, wh.Adam(5e-3))
    return g


def data(seed: int, batch: int = 32, size: int = 10, latent: int = 3) -> dict:
    """Soft strokes through the picture, at any angle, and the noise of the step."""
    rng = np.random.default_rng(seed)
    row, column = np.mgrid[:size, :size] - (size - 1) / 2
    turn, off = rng.uniform(0, np.pi, (batch, 1, 1)), rng.uniform(-size / 4, size / 4, (batch, 1, 1))
    images = np.clip(1.6 - abs(row * np.cos(turn) + column * np.sin(turn) - off), 0, 1)
    return dict(images=images.astype(np.float32), noise=rng.standard_normal((batch, latent)).astype(np.float32))


def main() -> None:
    job = wh.plan(model(), devices=sys.argv[1] if len(sys.argv) > 1 else "cpu:2").start(seed=0)
    for step in range(601):
        loss, out = job.step(["divergence"], **data(step))
        if step % 120 == 0:
            print(f"step {step:3}  loss {loss:6.2f} nats, of which {out['divergence'].mean():5.2f} describe the code")
    noise = data(10**6)["noise"]
    print("imagined strokes")
    for lines in zip(*[["".join(" .:*#"[int(v * 4.99)] for v in line) for line in image]
                       for image in job.eval(["imagined"], noise=noise)["imagined"][:6]]):
        print("  ".join(lines))


if __name__ == "__main__":
    main()
