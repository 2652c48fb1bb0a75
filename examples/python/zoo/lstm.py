#!/usr/bin/env python3
"""An LSTM (Hochreiter & Schmidhuber, 1997), unrolled, that learns to go on with waves.

    python examples/python/zoo/lstm.py [DEVICES]          # cpu:2 unless given"""

import sys

import numpy as np

import whale as wh


def lstm(x: wh.Tensor, hidden: int, name: str) -> wh.Tensor:
    """x [b, t, d] -> the states after each of the t steps [b, t, hidden]. One weight for input and state, made once."""
    batch, length, d = x.shape
    with wh.scope(name):
        weight = wh.parameter("weight", (d + hidden, 4 * hidden), wh.normal((d + hidden) ** -0.5))
        bias = wh.parameter("bias", (4 * hidden,))
        h = c = wh.ops.fill(shape=(batch, hidden))
        states = []
        for t in range(length):
            z = wh.ops.matmul(wh.ops.concat([x[:, t], h], axis=1), weight, bias)
            i, f, o, new = (z[:, k * hidden:(k + 1) * hidden] for k in range(4))
            c = wh.ops.sigmoid(f + 1.0) * c + wh.ops.sigmoid(i) * wh.ops.tanh(new)
            h = wh.ops.sigmoid(o) * wh.ops.tanh(c)
            states.append(h[:, None])
        return wh.ops.concat(states, axis=1)


def model(batch: int = 16, length: int = 24, hidden: int = 24, layers: int = 2) -> wh.Graph:
    g = wh.Graph("lstm")
    with g:
        past, next = wh.input("past", (batch, length, 1)), wh.input("next", (batch, length, 1))
        with wh.replica():
            x = past
            for _ in range(layers):
                x = lstm(x, hidden, "lstm")
            guess = wh.nn.linear(x, 1, name="head")
            loss = wh.nn.mse(guess, next)
        g.output("guess", guess)
        g.minimize(loss, wh.SGD(0.1, momentum=0.9), clip_norm=1.0)
    return g


def data(seed: int, batch: int = 16, length: int = 24) -> dict:
    rng = np.random.default_rng(seed)
    t = np.arange(length + 1) * rng.uniform(0.3, 0.8, (batch, 1)) + rng.uniform(0, 6, (batch, 1))
    wave = (np.sin(t) * rng.uniform(0.5, 1, (batch, 1))).astype(np.float32)[..., None]
    return dict(past=wave[:, :-1], next=wave[:, 1:])


def main() -> None:
    job = wh.plan(model(), devices=sys.argv[1] if len(sys.argv) > 1 else "cpu:2").start(seed=0)
    for step in range(301):
        loss = job.step(**data(step))
        if step % 60 == 0:
            print(f"step {step:3}  loss {loss:.4f}")
    wave = data(10**6, 1, 24 + 32)["past"][0]
    told = wave[:24]
    while len(told) < len(wave):
        told = np.concatenate([told, job.eval(["guess"], past=told[None, -24:])["guess"][0, -1:]])
    print(f"after {24} given points it goes on by itself (o), beside the true wave (.)")
    rows = [[" "] * len(wave) for _ in range(9)]
    for x, (true, said) in enumerate(zip(wave[:, 0], told[:, 0])):
        rows[round(4 - 4 * float(true))][x] = "."
        rows[int(np.clip(round(4 - 4 * float(said)), 0, 8))][x] = "o" if x >= 24 else "."
    print("\n".join("".join(row) for row in rows))


if __name__ == "__main__":
    main()
