#!/usr/bin/env python3
"""docs/memory.md's list of deviations: plans beside the papers' closed forms, as tests/unit/golden_*_test.cc compare them.

    tools/generate/golden_table.py --tests build/tests/unit_tests     # some seconds
"""

import argparse
import os
import pathlib
import subprocess

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "memory.md"
BEGIN, END = "<!-- deviations: begin -->\n", "<!-- deviations: end -->\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tests", default="build/tests/unit_tests")
    arguments = parser.parse_args()
    done = subprocess.run([arguments.tests, "-tc=golden:*"], env=os.environ | {"WHALE_GOLDEN_TABLE": "1"}, text=True, capture_output=True)
    if done.returncode:
        raise SystemExit(done.stdout)
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    deviating = [row for row in rows if not row.endswith("|  |")]
    table = ["| what | unit | closed form | plan | why |", "| --- | --- | --- | --- | --- |", *deviating]
    text = "\n".join([f"{len(rows) - len(deviating)} of {len(rows)} rows are within 5 % of the closed form. The others:", "", *table, ""])
    page = PAGE.read_text()
    PAGE.write_text(page.split(BEGIN)[0] + BEGIN + text + END + page.split(END)[1])


if __name__ == "__main__":
    main()
