#!/usr/bin/env python3
"""Checks that a name of a namespace means one thing: a type, an inline function or a template (with the same
parameters) that two files define, outside of unnamed namespaces. A linker takes one of two such definitions for both
without a word, and what was meant for the other breaks (C++'s one-definition rule). Exit 1 and one line for each."""
import collections
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
OPENED = re.compile(r"(?:inline )?namespace(?: ([\w:]+))? *\{")
CLOSED = re.compile(r"\}  // namespace")
HEAD = re.compile(r"\n(template <[^\n]*>)\n")
TYPE = re.compile(r"(?:template <.*> )?(?:struct|class|enum class|enum|union) (?:alignas\([^)]*\) )?(\w+(?:::\w+)*)[^;(]*\{")
FUNCTION = re.compile(r"(?:template <.*> )?(?:inline |constexpr |HWY_INLINE |template )[^;={]*?(\w+\([^{;]*\))[^;()]*\{")

files = collections.defaultdict(set)  # by what is defined
for folder in ("engine", "tools", "capi"):
    for file in (ROOT / folder).rglob("*"):
        if file.suffix not in (".h", ".cc"):
            continue
        inside = []
        for line in HEAD.sub(r"\n\1 ", file.read_text()).split("\n"):
            if opened := OPENED.match(line):
                inside.append(opened.group(1))
            elif CLOSED.match(line) and inside:
                inside.pop()
            elif inside and None not in inside and (found := TYPE.match(line) or FUNCTION.match(line)):
                files["::".join(inside) + "::" + found.group(1)].add(str(file.relative_to(ROOT)))
bad = {name: where for name, where in files.items() if len(where) > 1}
for name, where in sorted(bad.items()):
    print(f"{name} is defined in {' and in '.join(sorted(where))}: give one of them another name")
sys.exit(1 if bad else 0)
