#!/usr/bin/env python3
"""Trains a byte-level GPT on a text file and lets it write some text.

    python examples/python/gpt_text.py book.txt --devices cpu:4 --steps 300

The model is an ordinary local program; the `with` in front of it is all that makes it run on several devices: replicas of a pipeline of
two stages. On one device: --devices cpu:1 --strategy local."""

import argparse
import math
import shutil
import sys
import time

import numpy as np

import whale as wh


def build(batch: int, seq: int, dim: int, layers: int, heads: int, steps: int, learning_rate: float) -> wh.Graph:
    """A GPT-2 style decoder over bytes."""
    g = wh.Graph("gpt-text")
    with g:
        tokens = wh.input("tokens", (batch, seq), wh.int32)
        targets = wh.input("targets", (batch, seq), wh.int32)
        with wh.replica(), wh.pipeline(2, micro_batches=4):             # the annotation
            x = wh.nn.embedding(tokens, 256, dim, name="tokens")
            x = x + wh.parameter("positions", (seq, dim), wh.normal(0.02))
            out = wh.normal(0.02 / math.sqrt(2 * layers))
            for i in range(layers):
                x = wh.nn.transformer_block(x, heads, causal=True, init=wh.normal(0.02), out_init=out, name=f"block{i}")
            logits = wh.nn.linear(wh.nn.layer_norm(x), 256, bias=False, init=wh.normal(0.02), name="head")
            loss = wh.nn.cross_entropy(logits, targets)
        g.output("logits", logits)
        g.minimize(loss, wh.AdamW(learning_rate, betas=(0.9, 0.95), weight_decay=0.1,
                                  lr_schedule=wh.cosine(steps, warmup=min(50, steps // 5), final=0.1)), clip_norm=1.0)
    return g


def bigram_loss(text: np.ndarray) -> float:
    """Cross entropy, in nats per byte, of the best bigram model of this very text: what counting pairs reaches."""
    counts = np.zeros((256, 256))
    np.add.at(counts, (text[:-1], text[1:]), 1.0)
    given = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1.0)
    return float(-(counts[counts > 0] * np.log(given[counts > 0])).sum() / counts.sum())


def bar(step: int, steps: int, loss: float, rate: float, left: float) -> str:
    width = max(10, min(28, shutil.get_terminal_size((100, 20)).columns - 70))
    filled = width * step // steps
    return (f"[{'#' * filled}{'.' * (width - filled)}] step {step}/{steps}  loss {loss:.3f}  {rate:,.0f} tokens/s  "
            f"{int(left) // 60}:{int(left) % 60:02d} left")


def write(job: wh.Job, prompt: bytes, length: int, seq: int, rng: np.random.Generator, temperature: float = 0.8) -> bytes:
    """Samples `length` bytes after the prompt, one at a time."""
    text = list(prompt)
    for _ in range(length):
        window = text[-seq:]
        tokens = np.zeros((1, seq), np.int32)
        tokens[0, :len(window)] = window  # causal: what comes after the window cannot change its logits
        logits = job.eval(["logits"], tokens=tokens)["logits"][0, len(window) - 1].astype(np.float64) / temperature
        p = np.exp(logits - logits.max())
        text.append(int(rng.choice(256, p=p / p.sum())))
    return bytes(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", help="a text file")
    parser.add_argument("--devices", default="cpu:4", help="default: %(default)s")
    parser.add_argument("--strategy", default="", help="'local' leaves the annotation out")
    parser.add_argument("--steps", type=int, default=1200, help="training steps (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--sample", type=int, default=300, help="bytes to write at the end")
    parser.add_argument("--save", default="", help="checkpoint directory")
    parser.add_argument("--picture", default="", help="write a picture of the plan to this .svg file")
    args = parser.parse_args()

    with open(args.text, "rb") as file:
        text = np.frombuffer(file.read(), np.uint8)
    if len(text) < 2 * args.seq + 2:
        sys.exit(f"{args.text} is too short: {len(text)} bytes, at least {2 * args.seq + 2} are needed")
    graph = build(args.batch, args.seq, args.dim, args.layers, args.heads, args.steps, args.lr)
    print(graph.seal().summary(), end="\n\n")
    plan = wh.plan(graph, devices=args.devices, strategy=args.strategy)
    print(plan.summary(), end="\n\n", flush=True)
    if args.picture:
        with open(args.picture, "w") as file:
            file.write(plan.svg())
    job = plan.start(seed=0)

    rng = np.random.default_rng(0)
    interactive, start, shown, losses = sys.stderr.isatty(), time.monotonic(), 0.0, []
    for step in range(1, args.steps + 1):
        at = rng.integers(0, len(text) - args.seq - 1, args.batch)
        window = np.stack([text[i:i + args.seq + 1] for i in at]).astype(np.int32)
        losses.append(job.step(tokens=window[:, :-1], targets=window[:, 1:]))
        now = time.monotonic()
        if step == args.steps or (now - shown > 0.2 if interactive else step % max(1, args.steps // 10) == 0):
            shown, spent = now, now - start
            line = bar(step, args.steps, float(np.mean(losses[-20:])), step * window[:, 1:].size / spent,
                       spent / step * (args.steps - step))
            print(f"\r{line}" if interactive else line, end="" if interactive and step < args.steps else "\n",
                  file=sys.stderr, flush=True)
    if args.save:
        job.save(args.save)
        print(f"saved a checkpoint to {args.save}")
    if args.sample:
        prompt = b"In the beginning"
        print("\nThe model writes:\n")
        print(write(job, prompt, args.sample, args.seq, np.random.default_rng(1)).decode("utf-8", "replace"), end="\n\n")
    final, bigram = float(np.mean(losses[-20:])), bigram_loss(text)
    print(f"loss of a bigram model of this text: {bigram:.3f} nats per byte")
    print(f"loss of the trained model (mean of the last {len(losses[-20:])} steps): {final:.3f} nats per byte"
          + (f", {bigram - final:.3f} below" if final < bigram else ""))


if __name__ == "__main__":
    main()
