#!/usr/bin/env python3
"""The section of planted faults in docs/equality.md, from what the kit counted:

    build/tests/faults/fault_kit --whale build/tools/whale/whale --damages 1200 --undamaged 500 --seed 1 --json tests/faults/rates.json
    tools/generate/fault_table.py tests/faults/rates.json
"""

import json
import pathlib
import re
import sys

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "equality.md"
MARK = "<!-- section: faults -->"
HEAD = """{mark}
## Planted faults

`tests/faults` damages random plans in random places. A judge of its own trains the damaged and the undamaged plan for 20 steps in float64 and
compares every copy of every variable: a damage counts when one differs by more than 1e-6 of its movement. Refused: by the plan verifier, before
anything runs (or when a session is made). Caught: `whale verify M --plan P --steps 5` calls it unequal or stops. "No effect" were harmless where
they fell. Kinds with a star are the plan verifier's alone: none of them runs.

{damages} damages of {plans} plans, {kinds} kinds: {noticed:.2f} % of those that matter were noticed; of those that run and count, {caught:.2f} % were caught.
{undamaged} undamaged plans, {alarms} called unequal. Written by `tools/generate/fault_table.py` from `tests/faults/rates.json`.

| kind | planted | refused | no effect | count | caught | missed | rate |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""


def section(told):
    text = HEAD.format(mark=MARK, damages=told["damages"], plans=told["plans"], kinds=len(told["kinds"]), noticed=100 * told["noticed"],
                       caught=100 * told["caught_by_numbers"], undamaged=told["undamaged"], alarms=told["false_alarms"])
    for kind in told["kinds"]:
        refused = kind["refused"] + kind["refused_when_bound"]
        rate = f"{100 * kind['noticed'] / kind['due']:.0f} %" if kind["due"] else ""
        star = "*" if kind["by"] == "plan verifier" else ""
        text += (f"| {kind['kind']}{star} | {kind['planted']} | {refused} | {kind['same_result']} | {kind['counted']} | {kind['caught']} | "
                 f"{kind['missed']} | {rate} |\n")
    return text


if __name__ == "__main__":
    page = PAGE.read_text()
    made = section(json.loads(pathlib.Path(sys.argv[1]).read_text()))
    if MARK in page:
        page = re.sub(re.escape(MARK) + r".*?(?=<!-- section: |\Z)", lambda _: made + "\n", page, flags=re.DOTALL)
    else:
        page = page.rstrip() + "\n\n" + made
    PAGE.write_text(page.rstrip() + "\n")
    print(f"wrote {PAGE}")
