#!/usr/bin/env python3
"""How many plans `whale prove` proves: the models of the command line, small, under the strategies and options below. Prints a line for each
option and what is not proven; docs/proof.md has what a run gave.

    WHALE=build/tools/whale/whale tools/generate/proof_table.py
    WHALE=build/tools/whale/whale tools/generate/proof_table.py --large   # models of hundreds of devices: seconds of CPU, MB
"""
import argparse
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
    "bert": f"bert {TEXT}", "t5": f"t5 {TEXT}", "llama": f"llama {TEXT} --kv-heads 2", "deepseek": f"deepseek {TEXT} --experts 4 --top-k 2 --hidden 32",
    "moe-gpt": f"moe-gpt {TEXT} --experts 4",
    "m6": "m6 --layers 2 --dim 32 --batch 8 --heads 4 --experts 4", "gnmt": "gnmt --layers 2 --dim 32 --seq 6 --batch 8 --vocab 64",
    "resnet": "resnet --layers 8 --dim 8 --image 16 --batch 16 --norm-groups 4",
    "classifier100k": "classifier100k --dim 16 --classes 100 --batch 16", "cosmoflow": "cosmoflow --image 32 --batch 8",
    "unet3d": "unet3d --image 16 --dim 4 --batch 8", "dlrm": "dlrm --batch 16",
    "gpt, 16-bit parameters": f"gpt {TEXT} --precision bf16 --parameters bf16", "mlp, split_sgd": "mlp --hidden 64 --batch 16 --precision bf16 --optimizer split_sgd",
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
    (2, "replica", "--gradient-dtype bf16"), (4, "replica(4, shares=[4,2,1,1])", "--accumulate-dtype bf16 --accumulation 2"),
    (2, "split(2, factor=sequence)", ""), (5, "replica([pipeline(3), split(2)])", ""),
]
OF_1024 = "replica(16) > pipeline(8, micro_batches=96) > split(8)"
LARGE = [
    ("gpt3-175b", "null:1024", OF_1024, ""),
    ("gpt3-175b", "null:1024", OF_1024, "--precision bf16 --zero 1 --recompute full"),
    ("gpt3-175b", "null:1024", OF_1024, "--zero 3"),
    ("gpt3-175b", "null:1024", "replica(16) > pipeline(8, micro_batches=96, schedule=interleaved, virtual_stages=2) > split(8)", ""),
    ("gpt3-175b", "null:1024", "split(8, factor=sequence) > replica(128)", "--precision bf16"),
    ("llama3-405b --batch 256 --precision bf16", "128 nodes of 8xH100-80GB, 400Gb/s", "replica(8) > pipeline(16, micro_batches=32) > split(8)",
     "--zero 1 --recompute full"),
    ("deepseek-v3 --batch 7680 --precision bf16", "128 nodes of 8xH100-80GB, 400Gb/s",
     "pipeline(16, micro_batches=120) > replica(64); experts: split(64, factor=experts)", "--zero 1 --recompute full"),
    ("m6-1t", "null-32GB:480", "replica; experts: split(480, factor=experts)", ""),
    ("m6-10t --precision bf16 --parameters bf16", "64xnull-32GB:8", "replica; experts: split(512, factor=experts)",
     "--recompute full --offload parameters,state,gradients"),
]


def large():
    for model, devices, strategy, options in LARGE:
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run([WHALE, "model", *model.split(), "-o", f"{folder}/m.whale"], check=True, capture_output=True)
            child = subprocess.Popen([WHALE, "prove", f"{folder}/m.whale", "--devices", devices, "--strategy", strategy, *options.split(), "--json"],
                                     stdout=subprocess.PIPE, text=True)
            proof = json.loads(child.stdout.read())
            _, _, used = os.wait4(child.pid, 0)
        walked = proof["entries"][0]["walked"]
        print(f"{model}, {devices}, {strategy} {options}: {proof['verdict']}, {used.ru_utime + used.ru_stime:.1f} s, "
              f"{used.ru_maxrss / 1024:.0f} MB, {walked:,} walked", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--large", action="store_true", help="the models of hundreds of devices, at their size")
    if parser.parse_args().large:
        return large()
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
