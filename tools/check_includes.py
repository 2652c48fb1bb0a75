#!/usr/bin/env python3
"""Checks the order of the modules: below engine/, a folder includes only itself and folders above it; capi/ includes any;
what is below the line (device/ and on) sees planning only through plan/plan.h. And ops of models are named in ops/, in
device/ and in grad/, which makes them; others ask the OpDef, so that a new op needs no edit there. And rates of machines
become times and prices in cost/ alone: modules that decide something ask it. Exit 1 and one line for each violation."""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
MODULES = ["base", "schedule", "ir", "ops", "schema", "grad", "cluster", "cost", "task", "shard", "rewrite", "plan", "prove",
         "lower", "simulate", "search", "report", "compile", "device", "comm", "world", "data", "checkpoint", "run", "session", "probe", "validate"]
BELOW = MODULES.index("device")
# What execution may see of planning.
OPEN = {"plan/plan.h", "plan/part.h", "plan/placed.h", "plan/serialize.h", "plan/trace.h"}
PLANNING = {"schema", "grad", "cluster", "cost", "schedule", "task", "shard", "rewrite", "plan", "lower", "simulate",
            "search", "report", "compile"}
# session/ joins planning and running: it plans smaller batches when they come, and decides cores when it opens devices.
# probe/ fills in the figures that cost/ has, of a model's ops by plans that it runs, and comm/ chooses the form of an all-reduce by them.
# validate/ asks the cost model and the planner, and runs nothing.
EXCEPTIONS = {("session", "compile"), ("session", "cluster"), ("probe", "cost"), ("probe", "cluster"), ("probe", "compile"), ("probe", "simulate"), ("comm", "cost"),
              ("validate", "cost"), ("validate", "cluster"), ("validate", "task"), ("validate", "compile"), ("validate", "simulate"),
              ("validate", "search"), ("validate", "plan")}

# What proves plans shares nothing with what makes them.
APART = {("prove", other) for other in ("task", "shard", "rewrite", "schedule", "cost")}

# Modules that name ops of models: grad/ makes them, probe/ times some.
NAMING = {"ops", "device", "grad", "probe"}
# Ops that plans are made of.
OWN = set("""accumulate adasum add all_gather all_reduce all_to_all cast concat fill fused local_slice logaddexp maximum
minimum part_view reduce_scatter shift slice stop_gradient to_device to_host transfer""".split())

PRICED = {"task", "shard", "rewrite", "plan", "lower"}
RATES = re.compile(r"(?:bytes|flops)_per_second|seconds_per_op|link\.latency_seconds")

bad = []
for file in sorted((ROOT / "engine").rglob("*")):
    if file.suffix not in (".h", ".cc"):
        continue
    module = file.relative_to(ROOT / "engine").parts[0]
    for line, text in enumerate(file.read_text().splitlines(), 1):
        if module not in NAMING:
            bad += [f"{file.relative_to(ROOT)}:{line}: names op '{op}'; ask its OpDef, or say there what is missing"
                    for op in re.findall(r"""(?:OpCode::k_|(?:code_of|find_op)\(")(\w+)""", text) if op not in OWN]
        if module in PRICED and (rate := RATES.search(text)):
            bad.append(f"{file.relative_to(ROOT)}:{line}: computes with {rate.group()}; say in cost/ what it is a price of")
        match = re.match(r'\s*#include "([^"]+)"', text)
        if not match:
            continue
        target = match.group(1)
        head = target.split("/")[0]
        if head not in MODULES or head == module:
            continue
        where = f"{file.relative_to(ROOT)}:{line}: {module} includes {target}"
        if (module, head) in EXCEPTIONS:
            continue
        if (module, head) in APART:
            bad.append(f"{where}; a proof must not rest on what makes plans")
        if MODULES.index(head) > MODULES.index(module):
            bad.append(f"{where}, which is below it")
        elif MODULES.index(module) >= BELOW and head in PLANNING and target not in OPEN:
            bad.append(f"{where}; execution sees planning only through {', '.join(sorted(OPEN))}")
for row in bad:
    print(row)
sys.exit(1 if bad else 0)
