"""The op table of a built library, for the generators: a list of dicts as whale_engine_ops_json gives it."""
import ctypes
import importlib.util
import json
import os
import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[2]


def load() -> list[dict]:
    spec = importlib.util.spec_from_file_location("_abi", ROOT / "sdk" / "python" / "whale" / "_abi.py")
    abi = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(abi)
    library = abi.declare(ctypes.CDLL(os.environ.get("WHALE_LIBRARY", str(ROOT / "build" / "capi" / "libwhale.so"))))
    engine, text = ctypes.c_void_p(), abi.whale_text()
    assert not library.whale_engine_create(None, ctypes.byref(engine))
    assert not library.whale_engine_ops_json(engine, ctypes.byref(text))
    table = json.loads(ctypes.string_at(ctypes.cast(text.data, ctypes.c_void_p), text.size))
    library.whale_text_release(ctypes.byref(text))
    library.whale_engine_release(engine)
    return table


def write(target: pathlib.Path, text: str, check: bool) -> int:
    """Writes the file, or with `check` says whether it is stale."""
    if check:
        if not target.exists() or target.read_text() != text:
            print(f"{target.relative_to(ROOT)} is stale: run the generators in tools/generate")
            return 1
        return 0
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)
    return 0


def sentence(doc: str) -> str:
    return doc.strip().split("\n")[0]
