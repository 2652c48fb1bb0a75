#!/usr/bin/env python3
"""A translator of words into themselves backwards, whose one table stands in three places: for the letters read, the letters
written, and the scores of the next one (Press & Wolf, 2017; Vaswani et al., 2017).

    python examples/python/zoo/tied.py [DEVICES]          # cpu:2 unless given"""

import sys

import numpy as np

import whale as wh

LETTERS = "-abcdefghijklmnopqrstuvwxyz"  # the first one begins each answer


def model(batch: int = 64, length: int = 6, vocabulary: int = len(LETTERS), dim: int = 32, heads: int = 4) -> wh.Graph:
    g = wh.Graph("tied")
    with g:
        word, so_far = wh.input("word", (batch, length), wh.int32), wh.input("so_far", (batch, length), wh.int32)
        answer = wh.input("answer", (batch, length), wh.int32)
        with wh.replica():
            table = wh.parameter("table", (vocabulary, dim), wh.normal(dim ** -0.5))
            where = wh.parameter("positions", (length, dim), wh.normal(dim ** -0.5))
            read = wh.nn.transformer_block(wh.ops.embedding(table, word) + where, heads, name="reader")
            x = wh.ops.embedding(table, so_far) + where
            with wh.scope("writer"):
                x = x + wh.nn.attention(wh.nn.layer_norm(x), heads, causal=True, name="self")
                x = x + wh.nn.attention(wh.nn.layer_norm(x), heads, context=read, name="look")
                x = x + wh.nn.mlp(wh.nn.layer_norm(x), 2 * dim)
            logits = wh.ops.matmul(wh.nn.layer_norm(x), table, transpose_b=True)
            loss = wh.nn.cross_entropy(logits, answer)
        g.output("logits", logits)
        g.minimize(loss, wh.Adam(5e-3, betas=(0.9, 0.98), epsilon=1e-9, lr_schedule=wh.LRSchedule("inverse_sqrt", warmup=50)))
    return g


def data(seed: int, batch: int = 64, length: int = 6, vocabulary: int = len(LETTERS)) -> dict:
    word = np.random.default_rng(seed).integers(1, vocabulary, (batch, length)).astype(np.int32)
    answer = np.ascontiguousarray(word[:, ::-1])
    return dict(word=word, so_far=np.concatenate([np.zeros((batch, 1), np.int32), answer[:, :-1]], axis=1), answer=answer)


def main() -> None:
    job = wh.plan(model(), devices=sys.argv[1] if len(sys.argv) > 1 else "cpu:2").start(seed=0)
    for step in range(401):
        loss = job.step(**data(step))
        if step % 80 == 0:
            print(f"step {step:3}  loss {loss:.3f}")
    words = ["whales", "sonata", "drawer", "python", "stream"]
    word = np.array([[LETTERS.index(c) for c in w] for w in words], np.int32)
    said = np.zeros((len(words), 7), np.int32)
    for t in range(6):
        said[:, t + 1] = job.eval(["logits"], word=word, so_far=said[:, :6])["logits"][:, t].argmax(-1)
    for given, row in zip(words, said[:, 1:]):
        back = "".join(LETTERS[k] for k in row)
        print(f"{given} -> {back}" + ("" if back == given[::-1] else f"  (no: {given[::-1]})"))


if __name__ == "__main__":
    main()
