#!/usr/bin/env python3
"""Checks the order of the rooms: below engine/, a folder includes only itself and folders above it; capi/ includes any;
what is below the line (device/ and on) sees planning only through plan/plan.h. Exit 1 and one line for each violation."""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
ROOMS = ["base", "schedule", "ir", "ops", "schema", "grad", "cluster", "cost", "parallel", "plan", "simulate",
         "compile.h", "device", "comm", "data", "checkpoint", "run", "session"]
BELOW = ROOMS.index("device")
# What execution may see of planning.
OPEN = {"plan/plan.h", "plan/part.h", "plan/serialize.h"}
PLANNING = {"schema", "grad", "cluster", "cost", "schedule", "parallel", "plan", "simulate", "compile.h"}
# session/ joins planning and running: it plans smaller batches when they come, and decides cores when it opens devices.
EXCEPTIONS = {("session", "compile.h"), ("session", "cluster")}

bad = []
for file in sorted((ROOT / "engine").rglob("*")):
    if file.suffix not in (".h", ".cc"):
        continue
    room = file.relative_to(ROOT / "engine").parts[0]
    if room.startswith("compile"):  # the files beside the rooms
        room = "compile.h"
    for line, text in enumerate(file.read_text().splitlines(), 1):
        match = re.match(r'\s*#include "([^"]+)"', text)
        if not match:
            continue
        target = match.group(1)
        head = target.split("/")[0]
        if head not in ROOMS or head == room:
            continue
        where = f"{file.relative_to(ROOT)}:{line}: {room} includes {target}"
        if (room, head) in EXCEPTIONS:
            continue
        if ROOMS.index(head) > ROOMS.index(room):
            bad.append(f"{where}, which is below it")
        elif ROOMS.index(room) >= BELOW and head in PLANNING and target not in OPEN:
            bad.append(f"{where}; execution sees planning only through {', '.join(sorted(OPEN))}")
for row in bad:
    print(row)
sys.exit(1 if bad else 0)
