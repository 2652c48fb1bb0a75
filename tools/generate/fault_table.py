#!/usr/bin/env python3
"""The section of planted faults in docs/equality.md, from what the kit counted:

    build/tests/faults/fault_kit --whale build/tools/whale/whale --damages 4000 --undamaged 500 --seed 1 --json tests/faults/rates.json
    build/tests/faults/fault_kit --whale build/tools/whale/whale --damages 1000 --undamaged 150 --seed 1 --precision bf16 --json tests/faults/rates-bf16.json
    tools/generate/fault_table.py tests/faults/rates.json tests/faults/rates-bf16.json
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
compares every copy of every variable, and what every step hands out: a damage counts when a variable differs by more than 1e-6 of its movement, or an
output by as much of its size (where inputs that are one rounding off change more than a thousandth of that, by 1,000 times what those do). Plans whose variables rounding moves by
more than 1e-9 of their movement are no ground: the judge could not tell. Integer inputs are 0 to 2, all in float64, without Adasum and gradient dtypes. Refused: by the plan verifier, before anything runs (or when a session is made). Caught: `whale verify M
--plan P --steps 5` ends with code 1: unequal, or a step of the plan fails by itself. Where it compared nothing (code 3), and where it or the run crashed, did not end or could not run ("failed"), nothing is caught. "No effect" were
harmless where they fell. Kinds with a star are the plan verifier's alone: it has to refuse those that do harm.

{damages} damages of {plans} plans, {kinds} kinds{when}. {refused} were refused before anything ran, most of them unasked whether they would have done harm. The
others ran: {harmless} changed nothing, {counted} count, and of these {caught} were caught ({rate:.2f} %; {missed} missed, {not_compared} not compared, {failed} failed).
The kit's own rate takes a refusal for noticed: {noticed:.2f} %. {undamaged} undamaged plans, {alarms} called unequal, {open} not compared.
{aside}The kit, in float64 as `tools/check` runs it, fails below 99 % of either, on anything "failed", on an undamaged plan that is called unequal, and where two or more of a kind went unnoticed and these are more
than a tenth of it: one miss alone is no rate of its kind, and fails nothing but the rates of all. It also fails where one of a starred kind ran and counts.
Written by `tools/generate/fault_table.py` from `tests/faults/rates.json` and `rates-bf16.json`.
{others}{notes}
| kind | planted | refused | no effect | count | caught | missed | not compared | failed | of those that count |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""
STRUCTURE = ("collectives", "order", "memory", "links")  # groups of kinds


def notes(kinds):
    """What the rates alone do not say."""
    lines = []
    none = [f"{k['kind']} ({'never planted' if not k['planted'] else str(k['planted']) + ' without effect'})" for k in kinds if not k["due"]]
    if none:
        lines.append(f"Kinds that never had an effect, and so prove nothing: {', '.join(none)}.")
    left = [f"{k['kind']} ({k['counted']} of {k['planted']})" for k in kinds
            if k["group"] in STRUCTURE and k["by"] != "plan verifier" and k["counted"] and k["refused"] + k["refused_when_bound"]]
    if left:
        lines.append("Kinds of groups, orders, versions and links that the plan verifier refuses in some places only; these ran instead of being refused, and were left "
                     f"to numbers: {', '.join(left)}.")
    return "".join(f"\n{line}\n" for line in lines)


def aside(told):
    """Plans that were neither damaged nor verified as they are."""
    if "set_aside" not in told:
        return "How many plans were set aside as no ground, damaged or not, was not recorded by this run. "
    reasons = ", ".join(f"{n} ({why.strip()})" for why, n in sorted(told["set_aside"].items(), key=lambda row: -row[1]))
    used = told["plans"] + told["undamaged"]
    return (f"Besides these {used} plans {sum(told['set_aside'].values())} were set aside as no ground, neither damaged nor verified{': ' + reasons if reasons else ''}; "
            f"{told['no_plan']} random models have no plan.\n")


def totals(told):
    out = {key: sum(kind[key] for kind in told["kinds"]) for key in ("counted", "caught", "missed", "not_compared", "failed")}
    out["harmless"] = sum(kind["same_result"] for kind in told["kinds"])
    out["refused"] = sum(kind["refused"] + kind["refused_when_bound"] for kind in told["kinds"])
    return out


def when(told):
    return f" ({told['date']}, {told['machine']})" if "date" in told else ""


def line(told):
    """Of another precision (`fault_kit --precision`)."""
    sums = totals(told)
    return (f"\nPlans of cpu devices in {told['precision']}: {told['damages']} damages{when(told)}, {sums['refused']} refused before anything ran; of {sums['counted']} that ran and count "
            f"{sums['caught']} caught ({100 * sums['caught'] / max(sums['counted'], 1):.2f} %). {told['undamaged']} undamaged, {told['false_alarms']} called unequal, {told['undamaged_not_compared']} not compared. {aside(told).rstrip()}\n")


def section(told, others):
    total = totals(told)
    text = HEAD.format(mark=MARK, damages=told["damages"], plans=told["plans"], kinds=len(told["kinds"]), when=when(told), noticed=100 * told["noticed"], rate=100 * told["caught_by_numbers"],
                       undamaged=told["undamaged"], alarms=told["false_alarms"], open=told["undamaged_not_compared"],
                       aside=aside(told), notes=notes(told["kinds"]), others="".join(map(line, others)), **total)
    for kind in told["kinds"]:
        refused = kind["refused"] + kind["refused_when_bound"]
        rate = f"{100 * kind['caught'] / kind['counted']:.0f} %" if kind["counted"] else ""
        star = "*" if kind["by"] == "plan verifier" else ""
        text += (f"| {kind['kind']}{star} | {kind['planted']} | {refused} | {kind['same_result']} | {kind['counted']} | {kind['caught']} | "
                 f"{kind['missed']} | {kind['not_compared']} | {kind['failed']} | {rate} |\n")
    return text


if __name__ == "__main__":
    page = PAGE.read_text()
    first, *others = (json.loads(pathlib.Path(path).read_text()) for path in sys.argv[1:])
    made = section(first, others)
    if MARK in page:
        page = re.sub(re.escape(MARK) + r".*?(?=<!-- section: |\Z)", lambda _: made + "\n", page, flags=re.DOTALL)
    else:
        page = page.rstrip() + "\n\n" + made
    PAGE.write_text(page.rstrip() + "\n")
    print(f"wrote {PAGE}")
