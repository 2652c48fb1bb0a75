#!/usr/bin/env python3
"""How many plans `whale prove` proves: the models of the command line, small, under the strategies and options below. Prints a line for each
option and what is not proven; docs/proof.md has what a run gave.

    WHALE=build/tools/whale/whale tools/generate/proof_table.py
"""
import collections
import json
import os
import pathlib
import subprocess
import sys
import tempfile

WHALE = os.environ.get("WHALE", "build/tools/whale/whale")
TEXT = "--layers 2 --dim 32 --seq 8 --batch 8 --heads 4 --vocab 64"
MODELS = {
    "mlp": "mlp --hidden 64 --batch 16", "gpt": f"gpt {TEXT}", "gpt, tied, dropout": f"gpt {TEXT} --tied --dropout 0.1",
    "bert": f"bert {TEXT}", "t5": f"t5 {TEXT}", "moe-gpt": f"moe-gpt {TEXT} --experts 4",
    "m6": "m6 --layers 2 --dim 32 --batch 8 --heads 4 --experts 4", "gnmt": "gnmt --layers 2 --dim 32 --seq 6 --batch 8 --vocab 64",
    "resnet": "resnet --layers 8 --dim 8 --image 16 --batch 16 --norm-groups 4",
    "classifier100k": "classifier100k --dim 16 --classes 100 --batch 16", "cosmoflow": "cosmoflow --image 32 --batch 8",
    "unet3d": "unet3d --image 16 --dim 4 --batch 8", "dlrm": "dlrm --batch 16",
}
PLANS = [
    (2, "replica", ""), (3, "replica(3, shares=[3,2,1])", ""), (2, "replica", "--accumulation 2"), (2, "split(2)", ""),
    (2, "pipeline(2, micro_batches=4)", ""), (2, "pipeline(2, micro_batches=4, schedule=interleaved, virtual_stages=2)", ""),
    (2, "pipeline(2, micro_batches=4, schedule=zb_h1)", ""), (4, "replica(2) > split(2)", ""),
    (8, "replica(2) > pipeline(2, micro_batches=2) > split(2)", ""), (2, "replica", "--zero 1"),
    (2, "replica", "--zero 2 --accumulation 2"), (2, "replica", "--zero 3 --accumulation 2"), (2, "replica", "--recompute full"),
    (2, "replica", "--offload state,gradients,parameters,activations --zero 1"), (2, "replica", "--precision bf16"),
    (2, "split(2)", "--precision f16"), (4, "replica(2) > pipeline(2, micro_batches=2)", "--precision bf16 --zero 1"),
    (2, "replica", "--exact --accumulation 4"), (2, "split(2)", "--matmul-chunks 2"), (2, "replica", "--adasum"),
]


def main():
    every = collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        for name, text in MODELS.items():
            made = subprocess.run([WHALE, "model", *text.split(), "-o", f"{folder}/{name}.whale"], capture_output=True, text=True)
            if made.returncode:
                sys.exit(f"{name}: {made.stderr}")
        for devices, strategy, options in PLANS:
            tally, open_ones = collections.Counter(), collections.Counter()
            for name in MODELS:
                plan = pathlib.Path(folder, "p.plan")
                made = subprocess.run([WHALE, "plan", f"{folder}/{name}.whale", "--devices", f"null:{devices}", "--strategy", strategy,
                                       *options.split(), "-o", plan], capture_output=True, text=True)
                if made.returncode:
                    tally["no plan"] += 1
                    continue
                proof = json.loads(subprocess.run([WHALE, "prove", plan, "--json"], capture_output=True, text=True).stdout)
                tally[proof["verdict"]] += 1
                for entry in proof["entries"]:
                    if entry["verdict"] != "proven":
                        open_ones[f"{name}: {entry['verdict']}: {entry['construct'] or entry['what']}"] += 1
            every += tally
            print(f"{strategy} {options}: " + ", ".join(f"{n} {verdict}" for verdict, n in sorted(tally.items())))
            for what in open_ones:
                print(f"    {what}")
    print("all: " + ", ".join(f"{n} {verdict}" for verdict, n in sorted(every.items())))


if __name__ == "__main__":
    main()
