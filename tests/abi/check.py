#!/usr/bin/env python3
"""Compares the C ABI of a built libwhale with the record in whale.txt; --renew writes the record instead.

Recorded: exported symbols, function signatures, sizes and offsets of every struct and every enum number, of capi/abi.toml, which whale.h
and the bindings of the SDKs are written from. Checked besides: what is generated is fresh, the header compiles as strict C99 and as
C++20 with dlpack.h before, after or not at all, nothing but whale_* is exported, and the library needs only libc, libm, libstdc++ and
libgcc_s.
"""
import argparse
import difflib
import pathlib
import re
import subprocess
import sys
import tempfile

GENERATE = pathlib.Path(__file__).resolve().parents[2] / "tools" / "generate"
sys.path.insert(0, str(GENERATE))
from abi import Abi, kind_of  # noqa: E402

ALLOWED_LIBRARIES = re.compile(r"^(libc|libm|libdl|libpthread|libstdc\+\+|libgcc_s|ld-linux[-\w]*)\.so(\.\d+)*$")
SANITIZERS = re.compile(r"^lib(asan|ubsan|tsan|lsan)\.so")


def output(*command):
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, universal_newlines=True).stdout


def layouts(structs, constants, include, cc):
    lines = ["#include <stddef.h>", "#include <stdio.h>", "#include <whale/whale.h>", "int main(void) {"]
    for name, fields in structs.items():
        lines.append(f'  printf("struct {name} %zu bytes\\n", sizeof({name}));')
        for _, field, _ in fields:
            lines.append(f'  printf("  %zu {field} %zu\\n", offsetof({name}, {field}), sizeof((({name} *)0)->{field}));')
    for name in constants:
        lines.append(f'  printf("{name} = %d\\n", (int){name});')
    lines.append("  return 0;\n}")
    with tempfile.TemporaryDirectory() as folder:
        source, program = pathlib.Path(folder, "layout.c"), pathlib.Path(folder, "layout")
        source.write_text("\n".join(lines))
        subprocess.run([cc, "-std=c99", "-I", include, str(source), "-o", str(program)], check=True)
        return output(str(program))


# What matters of dlpack.h 1.0, as it is published.
DLPACK = """#ifndef DLPACK_DLPACK_H_
#define DLPACK_DLPACK_H_
#include <stdint.h>
typedef struct { uint32_t major; uint32_t minor; } DLPackVersion;
typedef enum { kDLCPU = 1, kDLCUDA = 2 } DLDeviceType;
typedef struct { DLDeviceType device_type; int32_t device_id; } DLDevice;
typedef struct { uint8_t code; uint8_t bits; uint16_t lanes; } DLDataType;
typedef struct { void* data; DLDevice device; int32_t ndim; DLDataType dtype; int64_t* shape; int64_t* strides; uint64_t byte_offset; } DLTensor;
typedef struct DLManagedTensor { DLTensor dl_tensor; void* manager_ctx; void (*deleter)(struct DLManagedTensor* self); } DLManagedTensor;
typedef struct DLManagedTensorVersioned { DLPackVersion version; void* manager_ctx; void (*deleter)(struct DLManagedTensorVersioned* self);
  uint64_t flags; DLTensor dl_tensor; } DLManagedTensorVersioned;
#endif
"""
INCLUDES = {"whale.h alone": ["<whale/whale.h>"],
            "dlpack.h before": ["<dlpack/dlpack.h>", "<whale/whale.h>"], "dlpack.h after": ["<whale/whale.h>", "<dlpack/dlpack.h>"],
            "whale/dlpack.h before": ["<whale/dlpack.h>", "<whale/whale.h>"], "whale/dlpack.h after": ["<whale/whale.h>", "<whale/dlpack.h>"],
            "both": ["<dlpack/dlpack.h>", "<whale/dlpack.h>", "<whale/whale.h>"]}


def header_compiles(abi, include, cc, cxx):
    inits = [(item["struct"], item["init"]) for item in abi.items if kind_of(item) == "struct" and "init" in item]
    use = "int main(void) {\n" + "".join(f"  {struct} o{i} = {init};\n" for i, (struct, init) in enumerate(inits)) + '  whale_str s = WHALE_STR("x");\n' \
          "  return (int)(s.size - 1)" + "".join(f" + (int)(o{i}.struct_size - sizeof o{i})" for i in range(len(inits))) + ";\n}\n"
    exchange = "whale_status *exchange(const whale_tensor *t, DLManagedTensorVersioned **v, DLManagedTensor *l, whale_tensor **out);\n" \
               "whale_status *exchange(const whale_tensor *t, DLManagedTensorVersioned **v, DLManagedTensor *l, whale_tensor **out) {\n" \
               "  if (l->dl_tensor.device.device_type != 1) return whale_tensor_from_dlpack(*v, out);\n" \
               "  return l->dl_tensor.ndim > 0 ? whale_tensor_from_dlpack_legacy(l, out) : whale_tensor_to_dlpack(t, v); }\n"
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "dlpack").mkdir()
        pathlib.Path(folder, "dlpack", "dlpack.h").write_text(DLPACK)
        strict = ["-Wall", "-Wextra", "-pedantic", "-Werror", "-fsyntax-only", "-I", include, "-I", folder]
        for compiler, language, standard in [(cc, "c", "c99"), (cc, "c", "c17"), (cxx, "c++", "c++11"), (cxx, "c++", "c++20")]:
            for name, files in INCLUDES.items():
                source = "".join(f"#include {file}\n" for file in files) + (exchange if len(files) > 1 else "") + use
                subprocess.run([compiler, "-x", language, f"-std={standard}", *strict, "-"], input=source, universal_newlines=True, check=True)


def renamed_names(abi, include, cc, cxx):
    """What the compilers do not say of names of earlier versions."""
    problems = []
    for old, new in abi.renamed:
        for compiler, language in ((cc, "c"), (cxx, "c++")):
            command = [compiler, "-x", language, "-Werror", "-fsyntax-only", "-I", include, "-"]
            run = subprocess.run(command, input=f"#include <whale/whale.h>\nint main(void) {{ {old}(0); return 0; }}\n", universal_newlines=True,
                                 stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            if run.returncode == 0 or f"{old}_is_now_{new}" not in run.stdout:
                problems.append(f"{compiler}: '{old}' is not refused naming {new}")
            if new not in abi.functions and new not in abi.enums and new not in abi.structs:
                problems.append(f"'{old}' is said to be '{new}', which is nothing")
    return problems


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", required=True)
    parser.add_argument("--include", required=True)
    parser.add_argument("--record", required=True, type=pathlib.Path)
    parser.add_argument("--cc", default="cc")
    parser.add_argument("--cxx", default="c++")
    parser.add_argument("--renew", action="store_true")
    args = parser.parse_args()

    subprocess.run([sys.executable, str(GENERATE / "abi.py"), "--check"], check=True)
    abi = Abi()
    header_compiles(abi, args.include, args.cc, args.cxx)
    structs, constants, functions = abi.structs, abi.constants(), abi.signatures()
    symbols = sorted(line.split()[-1] for line in output("nm", "-D", "--defined-only", args.library).splitlines())
    symbols = [s for s in symbols if s.split("@")[0] != "WHALE_0.2"]
    names = [s.split("@")[0] for s in symbols]
    problems = renamed_names(abi, args.include, args.cc, args.cxx)
    problems += [f"exported, but not whale_*: {n}" for n in names if not n.startswith("whale_")]
    declared = set(abi.functions)
    problems += [f"described, but not exported: {n}" for n in sorted(declared - set(names))]
    problems += [f"exported, but not described: {n}" for n in sorted(set(names) - declared)]

    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", output("readelf", "-d", args.library))
    if not any(SANITIZERS.match(n) for n in needed):
        problems += [f"libwhale.so needs {n}" for n in needed if not ALLOWED_LIBRARIES.match(n)]

    found = "# The C ABI of libwhale. Compared by tests/abi/check.py, renewed with --renew in the commit that changes it.\n"
    found += "".join(f"symbol {s}\n" for s in symbols) + "".join(f"{f}\n" for f in functions)
    found += layouts(structs, constants, args.include, args.cc)
    if args.renew:
        args.record.write_text(found)
    recorded = args.record.read_text()
    if recorded != found:
        problems.append("the ABI differs from its record. If that is meant, renew it: " + " ".join(["python3", *sys.argv, "--renew"]))
        problems += difflib.unified_diff(recorded.splitlines(), found.splitlines(), "recorded", "built", lineterm="", n=1)
    print("\n".join(problems) or f"{len(symbols)} symbols, {len(structs)} structs, {len(constants)} numbers as recorded")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
