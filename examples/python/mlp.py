#!/usr/bin/env python3
"""An MLP on made-up digits, on two CPU devices: the smallest complete program with real training.

    python examples/python/mlp.py [--steps 200] [--devices cpu:2] [--json]"""

import argparse
import json
import os
import time

import numpy as np

import whale as wh


def since_process_start() -> float:
    ticks = int(open("/proc/self/stat").read().rsplit(")", 1)[1].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--devices", default="cpu:1")
    parser.add_argument("--json", action="store_true", help="print one JSON line with times")
    args = parser.parse_args()

    rng = np.random.default_rng(0)
    x = rng.random((256, 784), dtype=np.float32)
    y = np.argmax((x - 0.5) @ rng.standard_normal((784, 10), dtype=np.float32), axis=1).astype(np.int32)

    g = wh.Graph("mlp")
    with g:
        images, labels = wh.input("images", x.shape), wh.input("labels", y.shape, wh.int32)
        with wh.replica():
            h = images
            for _ in range(2):
                h = wh.ops.relu(wh.nn.linear(h, 512))
            loss = wh.nn.cross_entropy(wh.nn.linear(h, 10), labels)
        g.minimize(loss, wh.SGD(0.05, momentum=0.9))
    job = wh.plan(g, devices=args.devices).start(seed=0)
    first = job.step(images=x, labels=y)
    started = since_process_start()
    for _ in range(args.steps - 1):
        last = job.step(images=x, labels=y)
    last = first if args.steps == 1 else last
    print(json.dumps(dict(start_to_first_step_s=round(started, 3), first_loss=first, last_loss=last)) if args.json
          else f"loss {first:.3f} -> {last:.3f} after {args.steps} steps")


if __name__ == "__main__":
    main()
