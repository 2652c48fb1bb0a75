#!/usr/bin/env python3
"""Writes what follows from capi/abi.toml, the description of the C ABI: capi/whale/whale.h, sdk/python/whale/_abi.py (the ctypes table of
structs, constants and prototypes) and capi/plan_fields.inc (the fields of whale_plan_options). tests/abi/check.py reads it too.

usage: abi.py [--check]      --check: only compare with what is there; exit 1 when it is stale.
"""
import pathlib
import re
import sys
import textwrap
import tomllib

ROOT = pathlib.Path(__file__).resolve().parents[2]
DESCRIPTION = ROOT / "capi" / "abi.toml"
OPTIONS = ROOT / "engine" / "ir" / "plan_options.h"
WIDTH = 140
KINDS = ("section", "comment", "raw", "handle", "alias", "enum", "struct", "function")

# C types by value, and what ctypes calls them. Other names are structs of the description, or handles behind a pointer.
SCALARS = {"void": "None", "char": "c_char", "int32_t": "c_int32", "int64_t": "c_int64", "uint64_t": "c_uint64", "uint8_t": "c_uint8",
           "size_t": "c_size_t", "double": "c_double"}


class Abi:
    """The description: `items` in order; `structs` and `enums` by name, `functions` in order. Fields and arguments are (type, name, comment)."""

    def __init__(self, path: pathlib.Path = DESCRIPTION):
        data = tomllib.loads(path.read_text())
        self.head, self.tail, self.items, self.renamed = data["head"], data["tail"], data["item"], data["renamed"]
        self.structs, self.enums, self.functions, self.aliases, self.handles = {}, {}, {}, {}, set()
        for item in self.items:
            kind = kind_of(item)
            if kind == "struct":
                self.structs[item["struct"]] = [(kind_, name, "") for kind_, names, *_ in item["fields"] for name in names.split(", ")]
            elif kind == "enum":
                self.enums[item["enum"]] = [(name, value) for name, value, *_ in item["values"]]
            elif kind == "function":
                self.functions[item["function"]] = (item["result"], [(arg[0], arg[1]) for arg in item["args"]])
            elif kind == "alias":
                self.aliases[item["alias"]] = item["type"]
            elif kind == "handle":
                self.handles.add(item["handle"])

    def version(self) -> tuple[int, int, int]:
        return tuple(int(re.search(rf"#define WHALE_VERSION_{part} (\d+)", self.head).group(1)) for part in ("MAJOR", "MINOR", "PATCH"))

    def constants(self) -> list[str]:
        return [name for values in self.enums.values() for name, _ in values]

    def signatures(self) -> list[str]:
        return sorted(signature(result, name, args) for name, (result, args) in self.functions.items())


def kind_of(item: dict) -> str:
    found = [kind for kind in KINDS if kind in item]
    if len(found) != 1:
        raise SystemExit(f"{DESCRIPTION}: an item is {' and '.join(found) or 'nothing'}: {item}")
    return found[0]


def declared(kind: str, name: str) -> str:
    return kind + ("" if kind.endswith("*") else " ") + name


def signature(result: str, name: str, args: list) -> str:
    return f"{declared(result, name)}({', '.join(declared(kind, each) for kind, each in args) or 'void'})"


# ---- whale.h ------------------------------------------------------------------------------------------------------------
def comment(text: str) -> str:
    return "/* " + text.strip("\n").replace("\n", "\n * ") + " */\n"


def with_comments(rows: list[tuple[str, str]]) -> str:
    """Declarations with their comments behind them in one column."""
    column = max([len(code) for code, note in rows if note and len(code) < 40] or [0])
    out = ""
    for code, note in rows:
        if not note:
            out += f"  {code}\n"
            continue
        at = max(column, len(code)) + 3
        lines = textwrap.wrap(note, max(60, WIDTH - at - 6), break_long_words=False, break_on_hyphens=False)
        out += f"  {code}{' ' * (at - 2 - len(code))}/* " + ("\n" + " " * (at + 3)).join(lines) + " */\n"
    return out


def wrapped(head: str, parts: list[str]) -> str:
    """head(parts), broken behind commas."""
    lines, line = [], head + "("
    indent = " " * len(line)
    for i, part in enumerate(parts):
        piece = part + ("," if i + 1 < len(parts) else ");")
        if len(line) + len(piece) + 1 > WIDTH and line.strip():
            lines.append(line.rstrip())
            line = indent
        line += piece + " "
    return "\n".join([*lines, line.rstrip()]) + "\n"


def zero(kind: str, structs: dict) -> str:
    if kind in structs:
        return "{" + ", ".join(zero(field, structs) for field, _, _ in structs[kind]) + "}"
    return "0.0" if kind == "double" else "0"


def header(abi: Abi) -> str:
    out, before = abi.head.rstrip("\n") + "\n", ""
    for item in abi.items:
        kind = kind_of(item)
        if kind == "section":
            out += f"\n/* ---- {item['section']} " + "-" * max(4, 118 - len(item["section"])) + " */\n"
            before = kind
            continue
        if kind != before or kind != "function" or item.get("apart"):
            out += "\n" if before not in ("", "section") and (kind in ("struct", "enum", "raw", "comment", "handle") or before in ("struct", "enum", "raw", "comment") or item.get("apart")) else ""
        out += comment(item["doc"]) if "doc" in item else ""
        note = f" /* {item['note']} */" if "note" in item else ""
        if kind == "comment":
            out += comment(item["comment"])
        elif kind == "raw":
            out += item["raw"].strip("\n") + "\n"
        elif kind == "handle":
            out += f"typedef struct {item['handle']} {item['handle']};{note}\n"
        elif kind == "alias":
            out += f"typedef {item['type']} {item['alias']};{note}\n"
        elif kind == "enum":
            last = len(item["values"]) - 1
            rows = [(f"{name} = {value}{',' if i < last else ''}", " ".join(rest)) for i, (name, value, *rest) in enumerate(item["values"])]
            out += f"typedef enum {item['enum']} {{\n{with_comments(rows)}}} {item['enum']};\n"
        elif kind == "struct":
            rows = [(declared(field, re.sub(", ", ", *" if field.endswith("*") else ", ", names)) + ";", " ".join(rest))
                    for field, names, *rest in item["fields"]]
            out += f"typedef struct {item['struct']} {{\n{with_comments(rows)}}} {item['struct']};\n"
            if "init" in item:
                zeros = [zero(field, abi.structs) for field, _, _ in abi.structs[item["struct"]][1:]]
                line = f"#define {item['init']} "
                values = "{" + ", ".join([f"sizeof({item['struct']})", *zeros]) + "}"
                out += line + ("\\\n  " if len(line + values) > WIDTH else "") + values + "\n"
        else:
            args = [declared(arg[0], arg[1]) + (f" /* {arg[2]} */" if len(arg) > 2 else "") for arg in item["args"]]
            out += wrapped(f"WHALE_API {declared(item['result'], item['function'])}", args or ["void"]).rstrip("\n") + note + "\n"
        before = kind
    out += "\n" + comment("Names of earlier versions, and what they are called now.")
    out += "".join(f"#define {old} {old}_is_now_{new}\n" for old, new in abi.renamed)
    return out + "\n" + abi.tail.strip("\n") + "\n"


# ---- Python ---------------------------------------------------------------------------------------------------------------
def python_type(abi: Abi, kind: str) -> str:
    """The ctypes expression of a C type such as `const whale_str *`."""
    base = re.sub(r"\bconst\b|\bstruct\b|\*", " ", kind).strip()
    base, stars = abi.aliases.get(base, base), kind.count("*")
    if stars == 0:
        if base not in SCALARS and base not in abi.structs:
            raise SystemExit(f"{DESCRIPTION}: unknown type '{kind}'")
        return SCALARS.get(base, base)
    if base == "char":
        inner, stars = "c_char_p", stars - 1
    elif base == "void" or base not in SCALARS and base not in abi.structs:  # opaque handles are plain addresses
        inner, stars = "c_void_p", stars - 1
    else:
        inner = SCALARS.get(base, base)
    return "POINTER(" * stars + inner + ")" * stars


def python_table(abi: Abi) -> str:
    major, minor, patch = abi.version()
    out = ['"""The ctypes table of whale.h. Generated by tools/generate/abi.py from capi/abi.toml; do not edit."""', "",
           "from __future__ import annotations", "",
           "from ctypes import CDLL, POINTER, Structure, c_char, c_char_p, c_double, c_int32, c_int64, c_size_t, c_uint8, c_uint64, c_void_p", ""]
    out += [f"{name} = {value}" for values in abi.enums.values() for name, value in values]
    out += ["WHALE_NONE = -1", f"WHALE_VERSION_NUMBER = {major * 1000000 + minor * 1000 + patch}", ""]
    for name, fields in abi.structs.items():
        out += ["", f"class {name}(Structure):", "    _fields_ = ["]
        out += [f'        ("{field}", {python_type(abi, kind)}),' for kind, field, _ in fields]
        out += ["    ]", ""]
    out += ["", "# name: (result, arguments)", "PROTOTYPES = {"]
    for name, (result, args) in abi.functions.items():
        out.append(f'    "{name}": ({python_type(abi, result)}, [{", ".join(python_type(abi, kind) for kind, _ in args)}]),')
    out += ["}", "", "", "def declare(library: CDLL) -> CDLL:",
            '    """Sets restype and argtypes of every function of the header."""',
            "    for name, (result, arguments) in PROTOTYPES.items():",
            "        function = getattr(library, name)",
            "        function.restype = result",
            "        function.argtypes = arguments",
            "    return library", ""]
    return "\n".join(out)


# ---- capi -----------------------------------------------------------------------------------------------------------------
def plan_fields(abi: Abi) -> str:
    """WHALE_FIELD(name), or WHALE_LIST(name, count) of a pointer that a count follows."""
    names = [name for _, name, _ in abi.structs["whale_plan_options"]]
    out = ["// The fields of whale_plan_options. Generated by tools/generate/abi.py; do not edit."]
    for name, following in zip(names, [*names[1:], ""]):
        if following.endswith("_count"):
            out.append(f"WHALE_LIST({name}, {following})")
        elif not name.endswith("_count"):
            out.append(f"WHALE_FIELD({name})")
    for option in re.findall(r'visit\("(\w+)"', OPTIONS.read_text()):
        if not {option, "no_" + option} & set(names):
            raise SystemExit(f"{DESCRIPTION}: whale_plan_options has no field for the option '{option}' of {OPTIONS.name}")
    return "\n".join(out) + "\n"


def main() -> int:
    abi, stale = Abi(), 0
    for target, text in ((ROOT / "capi" / "whale" / "whale.h", header(abi)), (ROOT / "sdk" / "python" / "whale" / "_abi.py", python_table(abi)),
                         (ROOT / "capi" / "plan_fields.inc", plan_fields(abi))):
        if target.read_text() == text:
            continue
        stale = 1
        if "--check" in sys.argv:
            print(f"{target} is stale: run tools/generate/abi.py", file=sys.stderr)
        else:
            target.write_text(text)
    return stale if "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
