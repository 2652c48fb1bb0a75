#!/usr/bin/env python3
"""Checks that no file relies on the precompiled header: what engine/base/standard.h includes, a file that uses it includes itself,
through its own headers, or through a standard header that must bring it. A build without precompiled headers (--full) is the proof;
this takes two seconds. Exit 1 and one line for each use without its header."""
import functools
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
STANDARD = ROOT / "engine" / "base" / "standard.h"
# By header, how one sees that it is used. Empty: what every other header brings.
USES = {
    "algorithm": r"std::(?:ranges::)?(?:sort|stable_sort|minmax|min_element|max_element|find|find_if|find_if_not|count|count_if|any_of|all_of|none_of|"
                 r"copy_if|transform|reverse|rotate|unique|lower_bound|upper_bound|equal_range|binary_search|clamp|mismatch|for_each|remove_if|partition|"
                 r"nth_element|includes|set_union|set_difference|is_sorted|generate|replace|next_permutation|adjacent_find|partial_sort|merge|search)\(",
    "array": r"std::array<",
    "atomic": r"std::atomic\w*\b",
    "chrono": r"std::chrono::",
    "cmath": r"std::(?:sqrt|exp|log|log2|log1p|expm1|pow|floor|ceil|round|lround|llround|rint|isfinite|isnan|isinf|tanh|erf|hypot|fmod|fma|ldexp)\(|\bINFINITY\b",
    "cstdint": "",
    "cstring": r"\b(?:memcpy|memset|memmove|memcmp|strlen|strcmp|strncmp|strerror)\(",
    "exception": r"std::(?:exception\b|exception_ptr|current_exception|rethrow_exception|terminate)",
    "functional": r"std::(?:function<|less<|greater<|plus<|multiplies<|ref\(|cref\(|reference_wrapper)",
    "limits": r"std::numeric_limits",
    "map": r"std::(?:multi)?map<",
    "memory": r"std::(?:unique_ptr|shared_ptr|weak_ptr|make_unique|make_shared)",
    "mutex": r"std::(?:mutex|lock_guard|unique_lock|scoped_lock|call_once|once_flag)\b",
    "numeric": r"std::(?:accumulate|iota|gcd|lcm|partial_sum|reduce|inner_product|exclusive_scan)\(",
    "optional": r"std::(?:optional|nullopt)\b",
    "set": r"std::(?:multi)?set<",
    "span": r"std::span\b",
    "string": r"std::(?:string\b|to_string|stoi|stod|getline)",
    "string_view": r"std::string_view\b",
    "thread": r"std::(?:thread|this_thread)\b",
    "tuple": r"std::(?:tuple<|tie\(|make_tuple)",
    "unordered_map": r"std::unordered_map<",
    "utility": "",
    "variant": r"std::(?:variant<|visit\(|holds_alternative|get_if|monostate)",
    "vector": r"std::vector<",
    "fmt/format.h": r"\bfmt::",
}
# What a header brings with it: of the standard library by its definition or in libstdc++, of others by what they are.
BRINGS = {
    "condition_variable": {"mutex", "chrono"},
    "filesystem": {"string", "string_view", "chrono", "memory"},
    "fmt/core.h": {"fmt/format.h"},
    "fstream": {"string"},
    "functional": {"tuple"},
    "future": {"mutex", "thread", "memory"},
    "iostream": {"string"},
    "map": {"tuple"},
    "memory": {"exception"},
    "mutex": {"chrono", "tuple"},
    "new": {"exception"},
    "nlohmann/json.hpp": {"map", "vector", "string", "string_view", "algorithm", "array", "memory", "functional", "limits", "numeric", "tuple", "cmath", "cstring"},
    "random": {"vector", "string", "numeric"},
    "rapidcheck.h": {"vector", "string", "map", "memory", "functional", "tuple", "set", "algorithm"},
    "span": {"array"},
    "sstream": {"string"},
    "stdexcept": {"string", "exception"},
    "string": {"string_view", "exception"},
    "thread": {"chrono"},
}
INCLUDE = re.compile(r'^\s*#\s*include\s+([<"])([^>"]+)[>"]', re.M)
SAID = re.compile(r'//[^\n]*|"(?:\\.|[^"\\\n])*"')  # comments and texts


@functools.cache
def text_of(file):
    return file.read_text()


def own(file, target):
    """The file of this tree that an include means, if it is one."""
    for folder in (file.parent, ROOT / "engine", ROOT / "tests", ROOT / "tests" / "unit", ROOT):
        if (folder / target).exists():
            return (folder / target).resolve()
    return None


def included(file):
    """The headers from elsewhere that a file has, by itself and through those of this tree."""
    seen, found, ahead = set(), set(), [file]
    while ahead:
        at = ahead.pop()
        if at in seen:
            continue
        seen.add(at)
        for _, target in INCLUDE.findall(text_of(at)):
            if (path := own(at, target)) is None:
                found |= {target} | BRINGS.get(target, set())
            else:
                ahead.append(path)
    return found


bad = [f"engine/base/standard.h includes <{header}>, of which this check knows no use"
       for _, header in INCLUDE.findall(text_of(STANDARD)) if header not in USES]
for folder in ("engine", "tests/unit"):
    for file in sorted((ROOT / folder).rglob("*")):
        if file.suffix not in (".h", ".cc") or file == STANDARD:
            continue
        have, code = included(file.resolve()), SAID.sub("", INCLUDE.sub("", text_of(file)))
        bad += [f"{file.relative_to(ROOT)}: uses {use.group()} without <{header}>"
                for header, pattern in USES.items() if pattern and header not in have and (use := re.search(pattern, code))]
for row in bad:
    print(row)
sys.exit(1 if bad else 0)
