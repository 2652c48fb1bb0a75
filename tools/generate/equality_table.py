#!/usr/bin/env python3
"""docs/equality.md from what ran:

    WHALE_EQUALITY=DIRECTORY [WHALE_FULL=1] python -m pytest tests/equivalence
    tools/generate/equality_table.py DIRECTORY

The page has sections, each from a file of the directory (pairs.json, product.json, presets.json); sections without a file stay as they are."""

import collections
import datetime
import json
import math
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "equality.md"
sys.path.insert(0, str(ROOT / "tests" / "equivalence"))
import equality

HEAD = """# Equal to one device

Every plan trains as one device does. Each case below is a run of `whale verify`: 20 steps (the pairs since 2026-11-30: 8) of the plan and of one device, on the same data, in
float64 on reference devices and once more in the case's own precision on its own devices; [semantics](semantics.md), section 10, says what is
compared and by what measure. A case ran as it is named; what was refused or not run is counted and named. `tools/generate/equality_table.py`
writes this page from the results of `tests/equivalence`.

Beside these `tests/unit` plans random models under random strategies in every run: 8 steps (20 with `--full`) on 1 to 8 devices, 20 on 9 to 64,
each also lowered with a program for every device. The longest run of it (tests/unit/hunt.json): HUNT
"""
PRECISIONS = {"f64": "float64 on ref", "f32": "float32 on cpu", "bf16": "bfloat16 on cpu", "f16": "float16 on cpu"}
OUTCOMES = ("equal", "refused", "partly", "not run", "not compared", "differs", "failed")
NAMES = {"refused": "refused, expected", "partly": "without Adasum", "differs": "**differs**", "failed": "**failed**", "not compared": "**not compared**"}


def table(head, rows):
    text = lambda cells: "| " + " | ".join(str(c) for c in cells) + " |\n"
    return text(head) + "|" + " --- |" * len(head) + "\n" + "".join(text(row) for row in rows)


def largest(comparisons, key):
    return max((c[key] for c in comparisons if c.get(key) is not None), default=0.0)


def float64(told):
    return [c for c in told.get("comparisons", []) if c["precision"] == "float64"]


def cell(told):
    by = collections.Counter(t["result"] for t in told)
    bad = ", ".join(f"{by[k]} {k}" for k in ("differs", "failed", "not compared") if by[k])
    if bad:
        return f"**{bad}**"
    if not by["equal"] and not by["partly"]:
        return "refused" if by["refused"] else ""
    rows = [c for t in told if t["result"] in ("equal", "partly") for c in float64(t) if c["passed"]]
    also = "".join(f", {by[k]} {NAMES[k].split(',')[0]}" for k in ("partly", "refused") if by[k])
    return f"{max(map(ratio, rows), default=0):.2f} ({by['equal']}{also})"


def counts(told):
    by = collections.Counter(t["result"] for t in told)
    return [by[k] or "" for k in OUTCOMES]


def ratio(comparison):
    """The largest part of its bound that anything took: losses, evaluation, gradients, parameters, state, running statistics, outputs."""
    worst = [comparison.get("losses", {}), comparison.get("evaluation", {})] + [comparison.get(each, {}).get("worst", {}) for each in (
        "gradients", "parameters", "state", "buffers", "outputs", "evaluation_outputs")]
    return max(each.get("ratio") or 0.0 for each in worst)


def comparisons_of(told):
    """A row for each precision that was compared, and what of the plan."""
    rows = collections.defaultdict(list)
    for t in told:
        for c in t.get("comparisons", []):
            rows[c["precision"], re.sub(r"[:@].*", "", c["devices"]), c.get("subject", "")].append(c)
    total = lambda all_of, key: f"{sum(c.get(key, 0) for c in all_of):,}"
    for (precision, devices, subject), all_of in sorted(rows.items(), key=lambda each: (each[0][2], -len(each[1]))):
        by = collections.Counter(c.get("verdict", "equal" if c["passed"] else "not equal") for c in all_of)
        yield [f"{precision} on {devices}" + (f", {subject}" if subject else ""), *(by[k] or "" for k in ("equal", "not compared", "not equal")),
               f"{largest(all_of, 'loss_error'):.0e}", f"{largest(all_of, 'parameter_error'):.0e}", f"{max(map(ratio, all_of)):.2f}", total(all_of, "decisions"),
               total(all_of, "decisions_that_differ"), f"{total(all_of, 'steps_left_out')} of {total(all_of, 'steps')}", total(all_of, "steps_set_aside"), total(all_of, "moved_by_rounding")]


def not_run_text():
    """What no list of cases has: each line of NOT_RUN, and how many combinations of its choices it is."""
    def values(name, wanted):
        wanted = equality.values_of(wanted)
        left = [each for each in equality.FACTORS[name] if each not in wanted]
        return f"{name} " + ("all but " + ", ".join(map(str, left)) if 0 < len(left) < len(wanted) else ", ".join(map(str, wanted)))

    def count(when):
        left, all_of = (math.prod(map(len, each)) for each in ([equality.values_of(w) for w in when.values()], [equality.FACTORS[n] for n in when]))
        return f"{left} of {all_of} combinations of {', '.join(when)}"

    return "\nNot run, though they could be planned (`NOT_RUN` there); no case counted above has one of these:\n\n" + table(["", "choices", "why"], (
        [count(each.when), "; ".join(values(name, wanted) for name, wanted in each.when.items()), each.why] for each in equality.NOT_RUN))


def cases_text(told, title, cases):
    """A section about cases of the suite; `cases`: how many it has."""
    strategies = list(dict.fromkeys(t["strategy"] for t in sorted(told, key=lambda t: (len(t["strategy"].split(">")), t["strategy"]))))
    models = list(dict.fromkeys(t["model"] for t in told))
    by = collections.Counter(t["result"] for t in told)
    text = f"## {title}\n\n{len(told)} of the suite's {cases} cases ran for this page: " + ", ".join(f"{by[k]} {NAMES.get(k, k)}" for k in OUTCOMES if by[k]) + ".\n\n"
    text += "A cell has how much of its bound the furthest tensor takes in float64 (1.00 is the bound), and the number of cases.\n\n"
    text += table(["", *models], ([s, *(cell([t for t in told if t["model"] == m and t["strategy"] == s]) for m in models)] for s in strategies))
    text += "\nBy choice:\n\n" + table(["", "cases", *(NAMES.get(k, k) for k in OUTCOMES)], (
        [PRECISIONS[value] if factor == "precision" else f"{factor} {value if value != '' else 'none'}", len(of), *counts(of)]
        for factor in ("precision", "optimizer", "zero", "micro_batches", "fusion", "offload", "recompute", "rows", "sums", "exact")
        for value in dict.fromkeys(t[factor] for t in told) for of in [[t for t in told if t[factor] == value]]))
    text += "\nEvery comparison; of those that are not compared nothing was computed, for the reason that is named below:\n\n"
    text += table(["", "equal", "not compared", "not equal", "losses, at most", "parameters, at most", "of the bound, at most", "decisions", "flipped", "steps left out", "set aside", "tensors moved by rounding"], comparisons_of(told))
    for result, line in (("refused", "Refused, each expected by name (`REFUSALS` in `tests/equivalence/equality.py`)"), ("partly", "Compared without an option, and not with it (`PARTLY` there): the float64 comparison without the option named passed"),
                         ("not run", "Not run")):
        reasons = collections.defaultdict(list)
        for t in told:
            if t["result"] == result:
                reasons[t["reason"]].append(t)
        if reasons:
            text += f"\n{line}:\n\n" + table(["cases", "models", "why"], ([len(of), ", ".join(sorted({t['model'] for t in of})), why] for why, of in sorted(reasons.items())))
    text += not_run_text()
    bad = [t for t in told if t["result"] in ("differs", "failed", "not compared")]
    if bad:
        text += "\nNot equal, failed or not compared:\n\n" + "".join(f"- {t['result']}: `{re.sub(r'/[^ ]*/whale-equality-[0-9]*/', '', t['command'])}`\n" for t in bad)
    return text


def larger_text():
    from test_presets import FITS, LARGER, ROWS
    amount = lambda gigabytes: f"{gigabytes:,} GB"
    return (f"Not run at their default size, for which one device needs more than {FITS} GB:\n\n"
            + table(["preset", "one device at the default size", "run instead"],
                    [[preset, amount(size), "; ".join(f"{row.size} ({row.precision})" for row in ROWS if row.preset == preset)] for preset, size in LARGER.items()]))


def presets_text(rows):
    """The models of `whale model`, in the order of the test's table."""
    from test_presets import CASES, FITS, name_of

    def line(row, plan):
        told = rows.get(name_of(row, plan))
        compared = told.get("comparisons", []) if told else []
        return [row.preset, row.size, {"f32": "float32", "f64": "float64"}[row.precision], f"`{plan[1]}`", row.steps, *(
            [f"{told['seconds']} s", told["result"] if told["result"] == "equal" else f"**{told['result']}**",
             f"{largest(compared, 'loss_error'):.0e}", f"{largest(compared, 'parameter_error'):.0e}", f"{max(map(ratio, compared), default=0):.2f}"] if told else ["", "not run", "", "", ""])]

    lines = [line(row, plan) for row, plan in CASES]
    done = collections.Counter(each[6] for each in lines)
    return (f"## Every model of the command line\n\nAt its default size where that fits {FITS} GB; the larger ones with their structure and smaller widths. Where reference devices (plain "
            "loops) would take hours, the default size runs in float32 alone (`--skip-float64`) and a smaller one in float64. Times are those of a shared machine of two cores "
            "that did other work beside.\n\n" + ", ".join(f"{n} {what}" for what, n in done.items()) + "."
            + (" What is not run has no result here: `WHALE_FULL=1 pytest tests/equivalence/test_presets.py -k PRESET` runs the rows of a preset." if done["not run"] else "") + "\n\n"
            + table(["preset", "size", "precision", "strategy", "steps", "time", "result", "losses", "parameters", "of the bound"], lines)
            + "\n" + larger_text())


SECTIONS = {"pairs": lambda told: cases_text(list(told.values()), "All pairs of choices", len(equality.covering(equality.FACTORS))),
            "product": lambda told: cases_text(list(told.values()), "The product of models, strategies, devices and ZeRO", len(list(equality.full()))), "presets": presets_text}


def hunt_text():
    """What `WHALE_HUNT_RESULT=tests/unit/hunt.json` kept, and the day."""
    told = json.loads((ROOT / "tests" / "unit" / "hunt.json").read_text())
    outcomes = ", ".join(f"{n:,} {what}" for what, n in told["outcomes"].items())
    return (f"{sum(told['outcomes'].values()):,} plans, ended {told['ended']}: {outcomes}; {told['steps']:,} steps compared. `not stable`: the loss grows beyond what float64 compares.\n"
            f"{told['since']} (`WHALE_HUNT=\"{told['hunt']}\" tests/unit_tests -ns -tc=\"hunt for failing plans\"`)")


def main(directory):
    page = PAGE.read_text() if PAGE.exists() else ""
    parts = dict(re.findall(r"<!-- section: (\w+) -->\n(.*?)(?=<!-- section: |\Z)", page, re.S))
    for name, text in SECTIONS.items():
        file = pathlib.Path(directory) / f"{name}.json"
        if file.exists():
            ended = datetime.date.fromtimestamp(file.stat().st_mtime)
            parts[name] = "\n" + text(json.loads(file.read_text())) + f"\nOf a run that ended on {ended}.\n\n"
    order = [*SECTIONS, *(name for name in parts if name not in SECTIONS)]
    PAGE.write_text((HEAD.replace("HUNT\n", hunt_text() + "\n") + "\n" + "".join(f"<!-- section: {name} -->\n{parts[name]}" for name in order if name in parts)).rstrip() + "\n")
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main(sys.argv[1])
