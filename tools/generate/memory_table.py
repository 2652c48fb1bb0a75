#!/usr/bin/env python3
"""docs/memory.md's table: large setups planned for devices that say how much memory they have, beside the papers' closed forms.

    tools/generate/memory_table.py --whale build/tools/whale/whale     # some minutes, up to 2 GB
"""

import argparse
import pathlib
import re
import resource
import subprocess
import tempfile

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "memory.md"
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"


class Gpt:
    """Closed forms of the first stage of a GPT: Megatron's division by tensor ways t and stages p (Narayanan et al., 2021), activations
    of a layer by Korthikanti et al., 2022, table 2 (tensor, sequence, selective: 34 sbh / t; without the masks of dropout 32; in 32 bit twice)."""

    def __init__(self, heads, dim, layers, batch, precision="bf16", vocab=51200, seq=2048):
        self.heads, self.dim, self.layers, self.batch, self.precision, self.vocab, self.seq = heads, dim, layers, batch, precision, vocab, seq

    def model(self):
        return (f"gpt --heads {self.heads} --dim {self.dim} --layers {self.layers} --seq {self.seq} --vocab {self.vocab} --batch {self.batch} "
                f"--precision {self.precision} --optimizer adam")

    def closed_form(self, t, p, virtual_stages=1, micro_batch=1):
        parameters = (self.layers / p * 12 * self.dim**2 + (self.vocab + self.seq) * self.dim) / t
        each = 18 if self.precision == "bf16" else 16  # parameter, gradient, two moments in 32 bit; the 16-bit copy
        layer = 32 * self.seq * micro_batch * self.dim / t * (1 if self.precision == "bf16" else 2)
        held = self.layers * (1 + (p - 1) / (p * virtual_stages) if virtual_stages > 1 else 1)
        return each * parameters + layer * held


GPT3 = Gpt(96, 12288, 96, 1536, "f32", 50257)
M6_10T = "m6-10t --precision bf16 --parameters bf16"
# name, whale model's arguments, devices, strategy, options, closed form in bytes or None
ROWS = [
    ("GPT 22B", Gpt(64, 6144, 48, 4), "null-80GB:8", "split(8)", "--recompute selective", dict(t=8, p=1, micro_batch=4)),
    ("GPT 22B, 16 micro-batches", Gpt(64, 6144, 48, 64), "1 node of 8xH100-80GB", "split(8)", "--recompute selective --accumulation 16", None),
    ("GPT 175B", Gpt(96, 12288, 96, 64), "null-80GB:64", "pipeline(8, micro_batches=64, virtual_stages=3) > split(8)", "--recompute selective",
     dict(t=8, p=8, virtual_stages=3)),
    ("GPT 530B", Gpt(128, 20480, 105, 280), "null-80GB:280", "pipeline(35, micro_batches=280, virtual_stages=3) > split(8)", "--recompute selective",
     dict(t=8, p=35, virtual_stages=3)),
    ("GPT 1T", Gpt(160, 25600, 128, 512), "null-80GB:512", "pipeline(64, micro_batches=512) > split(8)", "--recompute selective",
     dict(t=8, p=64)),
    ("GPT 175B, A100", Gpt(96, 12288, 96, 64), "8 nodes of 8xA100-80GB, 200Gb/s", "pipeline(8, micro_batches=64, virtual_stages=3) > split(8)",
     "--recompute selective", dict(t=8, p=8, virtual_stages=3)),
    ("GPT 1T, H100", Gpt(160, 25600, 128, 512), "64 nodes of 8xH100-80GB, 400Gb/s", "pipeline(64, micro_batches=512) > split(8)",
     "--recompute selective", dict(t=8, p=64)),
    ("gpt3-175b, 32 bit", GPT3, "null-80GB:1024", "replica(16) > pipeline(8, micro_batches=96) > split(8)", "", dict(t=8, p=8)),
    ("llama3-405b", "llama3-405b --batch 256 --precision bf16", "128 nodes of 8xH100-80GB, 400Gb/s",
     "replica(8) > pipeline(16, micro_batches=32) > split(8)", "--zero 1 --recompute full", None),
    ("deepseek-v3", "deepseek-v3 --batch 7680 --precision bf16", "128 nodes of 8xH100-80GB, 400Gb/s",
     "pipeline(16, micro_batches=120) > replica(64); experts: split(64, factor=experts)", "--zero 1 --recompute full", None),
    ("m6-10b", "m6-10b --batch 1120", "null-32GB:256", "replica(32) > pipeline(8, micro_batches=35)", "--recompute full", None),
    ("m6-1t", "m6-1t", "null-32GB:480", "replica; experts: split(480, factor=experts)", "", None),
    ("m6-10t", M6_10T, "64xnull-32GB:8", "replica; experts: split(512, factor=experts)",
     "--recompute full --offload parameters,state,gradients", None),
    ("m6-10t, 2 micro-batches", M6_10T + " --batch 1024 --accumulation 2", "64xnull-32GB:8",
     "replica; experts: split(512, factor=experts)", "--recompute full --offload parameters,state,gradients", None),
]


def seconds_of(command):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, text=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def shown(devices):
    return f"'{devices}'" if " " in devices else devices


def row(whale, folder, name, model, devices, strategy, options, form):
    path = f"{folder}/model.whale"
    text = model.model() if isinstance(model, Gpt) else model
    subprocess.run([whale, "model", *text.split(), "-o", path], check=True, capture_output=True)
    done, seconds = seconds_of([whale, "plan", path, "--devices", devices, "--strategy", strategy, *options.split()])
    command = f"`whale model {text}`; `--devices {shown(devices)} --strategy '{strategy}'{' ' + options if options else ''}`"
    if done.returncode:
        return f"| {name} | refused | | | | | | | {seconds:.1f} |", f"- {name}: {command}. {done.stderr.strip()}"
    found = re.search(r"memory of .*: (.*?) of (.*)\n  parameters (.*?), gradients (.*?), optimizer state (.*?), activations ([^,\n]*)", done.stdout)
    price = re.search(r"a byte is worth (\d+) times", done.stdout)
    host = re.search(r"offloaded to its host: (.*)", done.stdout)
    if host:
        command += f". In the host's memory {host[1]} a device"
    formula = f"{model.closed_form(**form) / 1e9:.1f} GB" if form else ""
    return (f"| {name} | {' | '.join(found.group(k) for k in (3, 4, 5, 6, 1, 2))} | {formula} | {price[1] if price else 1} | {seconds:.1f} |",
            f"- {name}: {command}.")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--whale", default="build/tools/whale/whale")
    arguments = parser.parse_args()
    lines, commands = [], []
    with tempfile.TemporaryDirectory() as folder:
        for number, setup in enumerate(ROWS):
            print(f"{number + 1} of {len(ROWS)}: {setup[0]}", flush=True)
            line, command = row(arguments.whale, folder, *setup)
            lines.append(line)
            commands.append(command)
    table = "| setup | parameters | gradients | state | activations | together | of | closed form | price | planning, s |\n" + "| --- " * 10 + "|\n"
    page = PAGE.read_text()
    before, after = page.split(BEGIN)[0], page.split(END)[1]
    PAGE.write_text(before + BEGIN + table + "\n".join(lines) + "\n\n" + "\n".join(commands) + "\n" + END + after)


if __name__ == "__main__":
    main()
