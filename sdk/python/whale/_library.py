"""Finds libwhale.so, declares its functions, and turns its statuses into exceptions."""

from __future__ import annotations

import ctypes
import os
import pathlib
from ctypes import byref, c_void_p

from . import _abi


class WhaleError(Exception):
    """An error from the engine.

    Attributes: ``code`` (name of the status code), ``op``, ``scope`` (empty where they do not apply), ``rank``,
    ``device`` (-1 where they do not apply), ``damage`` ("call", "step", "session" or "peer_lost": how far it goes).
    """

    def __init__(self, message: str, code: str = "UNKNOWN", op: str = "", scope: str = "", rank: int = -1,
                 device: int = -1, damage: str = "call"):
        super().__init__(message)
        self.code, self.op, self.scope, self.rank, self.device, self.damage = code, op, scope, rank, device, damage


class InvalidArgument(WhaleError, ValueError):
    """A wrong shape, dtype, name, option or file content."""


class NotFound(WhaleError, LookupError):
    """A name or a file that does not exist."""


class Cancelled(WhaleError):
    """The run was cancelled; the session is as before it."""


class Unavailable(WhaleError, RuntimeError):
    """A device or a library that cannot be opened; the message says what to install."""


_KINDS = {_abi.WHALE_INVALID_ARGUMENT: InvalidArgument, _abi.WHALE_OUT_OF_RANGE: InvalidArgument,
          _abi.WHALE_NOT_FOUND: NotFound, _abi.WHALE_CANCELLED: Cancelled, _abi.WHALE_UNAVAILABLE: Unavailable}
_CODES = {value: name[6:] for name, value in vars(_abi).items()
          if name.startswith("WHALE_") and isinstance(value, int) and 0 <= value <= 16
          and name[6:] in {"OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND",
                           "ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED",
                           "OUT_OF_RANGE", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED"}}
_DAMAGE = {0: "call", 1: "step", 2: "session", 3: "peer_lost"}


def _candidates() -> list[pathlib.Path]:
    package = pathlib.Path(__file__).resolve().parent
    places = []
    if "WHALE_LIBRARY" in os.environ:
        places.append(pathlib.Path(os.environ["WHALE_LIBRARY"]))
    places += sorted((package.parent / ".libwhale.mesonpy.libs").glob("libwhale.so*"))
    places += sorted(package.glob("libwhale.so*"))
    places += [package.parents[2] / "build" / "capi" / "libwhale.so"]
    return places


def _load() -> ctypes.CDLL:
    tried = []
    for place in [*_candidates(), "libwhale.so.0"]:
        if isinstance(place, pathlib.Path) and not place.exists():
            tried.append(str(place))
            continue
        try:
            return _abi.declare(ctypes.CDLL(str(place)))
        except OSError as error:
            tried.append(f"{place} ({error})")
    raise ImportError("libwhale.so was not found; set WHALE_LIBRARY to its path. Tried: " + ", ".join(tried))


lib = _load()


def string(text: str | None) -> _abi.whale_str:
    """A whale_str; whoever stores a copy of it keeps this one, which keeps the bytes alive."""
    data = (text or "").encode()
    result = _abi.whale_str(data, len(data))
    result._keep = data
    return result


def text_of(value: _abi.whale_str) -> str:
    return value.data[:value.size].decode("utf-8", "replace") if value.data else ""


def check(status: int | None) -> None:
    """Raises the exception of a status, and frees it."""
    if not status:
        return
    try:
        code = lib.whale_status_code(status)
        op, scope = text_of(lib.whale_status_op(status)), text_of(lib.whale_status_scope(status))
        kind = _KINDS.get(code, WhaleError)
        error = kind(text_of(lib.whale_status_message(status)), _CODES.get(code, "UNKNOWN"), op, scope,
                     lib.whale_status_rank(status), lib.whale_status_device(status),
                     _DAMAGE.get(lib.whale_status_damage(status), "call"))
    finally:
        lib.whale_status_release(status)
    raise error


def bytes_of(text: _abi.whale_text) -> bytes:
    # Not text.data: that is a copy in an object of its own, which may be gone before it is read.
    address = c_void_p.from_buffer(text, _abi.whale_text.data.offset).value
    return ctypes.string_at(address, text.size) if text.size else b""


def take_bytes(function, *arguments) -> bytes:
    """Calls a function whose last parameter is `whale_text *out`, and returns the text's bytes."""
    out = _abi.whale_text()
    check(function(*arguments, byref(out)))
    try:
        return bytes_of(out)
    finally:
        lib.whale_text_release(byref(out))


def take_text(function, *arguments) -> str:
    return take_bytes(function, *arguments).decode()


class Handle:
    """An opaque handle, released once with the function named."""

    def __init__(self, pointer: int, release: str):
        self.pointer = pointer
        self._release = getattr(lib, release)

    def close(self) -> None:
        if self.pointer:
            pointer, self.pointer = self.pointer, None
            self._release(pointer)

    def __del__(self) -> None:
        try:
            self.close()
        except Exception:  # the interpreter may be half gone
            pass


def make(release: str, function, *arguments) -> Handle:
    """Calls a function whose last parameter is a handle out-parameter."""
    out = c_void_p()
    check(function(*arguments, byref(out)))
    return Handle(out.value, release)


_engine: Handle | None = None


def engine() -> int:
    """The engine of this process, made on first use."""
    global _engine
    if _engine is None:
        _engine = make("whale_engine_release", lib.whale_engine_create, None)
    return _engine.pointer
