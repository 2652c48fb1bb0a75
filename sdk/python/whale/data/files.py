"""Files as arrays of samples. They are mapped into memory: what is not indexed is not read."""

from __future__ import annotations

import json
import os

import numpy as np

from .. import arguments
from .._library import DataLoss, InvalidArgument, NotFound

# Of safetensors, by the names in its header. bfloat16 is not among them: numpy does not have it.
_TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U64": "<u8", "U32": "<u4", "U16": "<u2",
          "U8": "u1", "BOOL": "?"}


def npy(path: str | os.PathLike) -> np.ndarray:
    """The array in a ``.npy`` file, samples first."""
    return np.load(arguments.path("path", path), mmap_mode="r")


def safetensors(path: str | os.PathLike, name: str) -> np.ndarray:
    """Tensor ``name`` of a safetensors file, samples first. InvalidArgument: it is bfloat16, which numpy does not have. NotFound: there is no such
    tensor. DataLoss: the file is none, or was cut off."""
    path, size = arguments.path("path", path), os.stat(path).st_size
    try:
        with open(path, "rb") as file:
            begin = 8 + int.from_bytes(file.read(8), "little")
            if begin > size:
                raise ValueError("the header is longer than the file")
            header = json.loads(file.read(begin - 8))
        names = [each for each in header if each != "__metadata__"]
        row = header.get(arguments.text("name", name)) if name in names else None
        if row is not None:
            kind, shape, (first, last) = str(row["dtype"]), tuple(map(int, row["shape"])), map(int, row["data_offsets"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataLoss(f"'{path}' is no safetensors file: {error}", "DATA_LOSS") from None
    if row is None:
        raise NotFound(f"'{path}' has no tensor '{arguments.brief(name)}'; it has {', '.join(sorted(names)) or 'none'}", "NOT_FOUND")
    if kind not in _TYPES:
        raise InvalidArgument(f"tensor '{name}' of '{path}' is {kind}, which numpy does not have: convert it first", "INVALID_ARGUMENT")
    dtype = np.dtype(_TYPES[kind])
    if min(shape, default=0) < 0 or last - first != dtype.itemsize * int(np.prod(shape, dtype=object)) or first < 0 or begin + last > size:
        raise DataLoss(f"tensor '{name}' of '{path}' has bytes [{first}, {last}) behind its header for {kind} {shape}, and the file ends at "
                       f"{size - begin}", "DATA_LOSS")
    if last == first:
        return np.zeros(shape, dtype)
    return np.memmap(path, dtype, "r", begin + first, shape)


class _Windows:
    """Windows of a flat array: [i] is a sample."""

    def __init__(self, flat: np.ndarray, length: int, begin: int):
        self._flat, self._length, self._begin = flat, length, begin

    def __len__(self) -> int:
        return max(0, (len(self._flat) - 1) // self._length)

    def __getitem__(self, i: int) -> np.ndarray:
        at = i * self._length + self._begin
        return self._flat[at:at + self._length].astype(np.int64 if self._flat.dtype.itemsize > 2 else np.int32)


def tokens(path: str | os.PathLike, length: int, *, dtype: str = "uint16", inputs: str = "tokens", targets: str = "targets") -> dict[str, _Windows]:
    """A flat file of token numbers as samples of ``length``: sample i is tokens [i length, (i + 1) length + 1), all but the last for the input
    ``inputs``, all but the first for ``targets``. dtype: of the file, "uint16" or "uint32", the machine's byte order. What fills no sample is left out."""
    path, length = arguments.path("path", path), arguments.integer("length", length, 1)
    kind = np.dtype(arguments.choice("dtype", dtype, ("uint16", "uint32")))
    if os.stat(path).st_size % kind.itemsize:
        raise DataLoss(f"'{path}' has {os.stat(path).st_size} bytes, no whole number of {dtype}", "DATA_LOSS")
    flat = np.memmap(path, kind, "r") if os.stat(path).st_size else np.zeros(0, kind)
    return {inputs: _Windows(flat, length, 0), targets: _Windows(flat, length, 1)}
