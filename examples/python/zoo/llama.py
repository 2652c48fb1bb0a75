#!/usr/bin/env python3
"""A small Llama (Touvron et al., 2023) that learns a rhyme: rotary positions, RMS norm, SwiGLU, grouped-query attention.

Two replicas of a split into two (tensor parallelism):

    python examples/python/zoo/llama.py [DEVICES]          # cpu:4 unless given"""

import sys

import numpy as np

import whale as wh

RHYME = """Three blind mice, three blind mice,
see how they run, see how they run!
They all ran after the farmer's wife,
who cut off their tails with a carving knife.
Did you ever see such a sight in your life
as three blind mice?
"""


def block(x: wh.Tensor, heads: int, kv_heads: int, hidden: int, name: str) -> wh.Tensor:
    with wh.scope(name):
        x = x + wh.nn.attention(wh.nn.rms_norm(x), heads, causal=True, kv_heads=kv_heads, rotary=True, linear_bias=False)
        y = wh.nn.rms_norm(x)
        gate, up = wh.nn.linear(y, hidden, bias=False, name="gate"), wh.nn.linear(y, hidden, bias=False, name="up")
        return x + wh.nn.linear(wh.ops.silu(gate) * up, x.shape[-1], bias=False, name="down")


def model(batch: int = 8, length: int = 48, vocabulary: int = 128, dim: int = 48, heads: int = 4, kv_heads: int = 2,
          layers: int = 2) -> wh.Graph:
    g = wh.Graph("llama")
    with g:
        tokens, targets = wh.input("tokens", (batch, length), wh.int32), wh.input("targets", (batch, length), wh.int32)
        with wh.replica(), wh.split(2):
            x = wh.nn.embedding(tokens, vocabulary, dim)
            for _ in range(layers):
                x = block(x, heads, kv_heads, 2 * dim, "block")
            logits = wh.nn.linear(wh.nn.rms_norm(x), vocabulary, bias=False, name="head")
            loss = wh.nn.cross_entropy(logits, targets)
        g.output("logits", logits)
        g.minimize(loss, wh.AdamW(5e-3, betas=(0.9, 0.95), weight_decay=0.1, lr_schedule=wh.cosine(200, warmup=10, final=0.1)),
                   clip_norm=1.0)
    return g


def data(seed: int, batch: int = 8, length: int = 48, vocabulary: int = 128) -> dict:
    """Pieces of the rhyme, byte by byte."""
    text = np.frombuffer(RHYME.encode() * 2, np.uint8).astype(np.int32) % vocabulary
    starts = np.random.default_rng(seed).integers(0, len(RHYME), batch)
    rows = np.stack([text[s:s + length + 1] for s in starts])
    return dict(tokens=rows[:, :-1], targets=rows[:, 1:])


def main() -> None:
    plan = wh.plan(model(), devices=sys.argv[1] if len(sys.argv) > 1 else "cpu:4")
    job = plan.start(seed=0)
    for step in range(201):
        loss = job.step(**data(step))
        if step % 50 == 0:
            print(f"step {step:3}  loss {loss:.3f}")
    text = "Did you ever"
    while len(text) < 150:
        last = text[-48:]
        tokens = np.zeros((1, 48), np.int32)
        tokens[0, :len(last)] = np.frombuffer(last.encode(), np.uint8)
        text += chr(job.eval(["logits"], tokens=tokens)["logits"][0, len(last) - 1].argmax())
    print(text)


if __name__ == "__main__":
    main()
