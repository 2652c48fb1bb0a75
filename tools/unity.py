#!/usr/bin/env python3
"""usage: tools/unity.py DIRECTORY SIZE FILE...

Writes DIRECTORY/0.cc, 1.cc, ..., each of which includes at most SIZE of the files, and prints what to compile, one a line: three quarters of what a
file takes to compile are headers, which are then read once for many. In a file that includes others a name of an unnamed namespace has to mean one
thing: files that have one in common are not put together, and one with a type or constant that a header of these files has too is compiled by itself."""
import pathlib
import re
import sys

MACRO = re.compile(r"#define (\w+)")
ALIAS = re.compile(r"using (\w+) =")
TYPE = re.compile(r"(?:struct|class|enum class|enum|union) (?:alignas\([^)]*\) )?(\w+)\b[^;(]*(?:[{;]|$)")
CONSTANT = re.compile(r"[\w:<>,&*\[\] ]+? [*&]*(\w+)(?:\[[^\]]*\])*(?: = | =$|\{|;)")
FUNCTION = re.compile(r"[\w:<>,&*\[\] ]+?[ &*](\w+)\(")
NEITHER = re.compile(r"[\s}/)]|return |using enum |using namespace |namespace |public:|private:")
MODIFIERS = re.compile(r"^(?:inline |constexpr |static |template <[^>]*> )+")


def names(text, kinds, everywhere):
    """Of what is defined at the left margin; not everywhere: in unnamed namespaces, as macros, as aliases and as statics."""
    unnamed = False
    for line in re.sub(r"\n(template <[^\n]*>)\n", r"\n\1 ", text).split("\n"):
        if line in ("namespace {", "}  // namespace"):
            unnamed = line == "namespace {"
        elif (unnamed or everywhere or line.startswith(("#define", "static ", "using "))) and not NEITHER.match(line):
            line = MODIFIERS.sub("", line)
            if found := next(filter(None, (kind.match(line) for kind in kinds)), None):
                yield found.group(1)


def main():
    directory, size, files = pathlib.Path(sys.argv[1]), int(sys.argv[2]), [pathlib.Path(f).resolve() for f in sys.argv[3:]]
    headers = {header for folder in {f.parent for f in files} for header in folder.glob("*.h")}
    of_headers = {name for header in headers for name in names(header.read_text(), (MACRO, ALIAS, TYPE, CONSTANT), True)}
    together, alone = [], []
    for file in files:
        own = set(names(file.read_text(), (MACRO, ALIAS, TYPE, CONSTANT, FUNCTION), False))
        if own & of_headers:
            alone.append(file)
            continue
        members, taken = next((each for each in together if len(each[0]) < size and not each[1] & own), (None, None))
        if members is None:
            together.append((members := [], taken := set()))
        members.append(file)
        taken |= own
    directory.mkdir(parents=True, exist_ok=True)
    for n, (members, _) in enumerate(together):
        path, text = directory / f"{n}.cc", "".join(f'#include "{m}"\n' for m in members)
        if not path.exists() or path.read_text() != text:  # what is as it was is not compiled again
            path.write_text(text)
        print(path)
    print(*alone, sep="\n")


if __name__ == "__main__":
    main()
