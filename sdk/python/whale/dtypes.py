"""Element types, and how numpy sees them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Union

import numpy as np

from . import _abi


@dataclass(frozen=True)
class DType:
    """An element type of the engine. ``numpy`` is the type that holds its bits (bfloat16: uint16 without ml_dtypes), ``number`` its
    number in whale.h."""

    name: str
    number: int
    numpy: np.dtype

    def __repr__(self) -> str:
        return f"whale.{self.name}"


def _bfloat16() -> np.dtype:
    try:
        import ml_dtypes
        return np.dtype(ml_dtypes.bfloat16)
    except ImportError:
        return np.dtype(np.uint16)


float32 = DType("float32", _abi.WHALE_F32, np.dtype(np.float32))
float64 = DType("float64", _abi.WHALE_F64, np.dtype(np.float64))
bfloat16 = DType("bfloat16", _abi.WHALE_BF16, _bfloat16())
float16 = DType("float16", _abi.WHALE_F16, np.dtype(np.float16))
int32 = DType("int32", _abi.WHALE_I32, np.dtype(np.int32))
int64 = DType("int64", _abi.WHALE_I64, np.dtype(np.int64))
uint8 = DType("uint8", _abi.WHALE_U8, np.dtype(np.uint8))
int8 = DType("int8", _abi.WHALE_I8, np.dtype(np.int8))
bool_ = DType("bool", _abi.WHALE_BOOL, np.dtype(np.bool_))
uint16 = DType("uint16", _abi.WHALE_U16, np.dtype(np.uint16))

ALL = (float32, float64, bfloat16, float16, int32, int64, uint8, int8, bool_, uint16)
BY_NUMBER = {d.number: d for d in ALL}
_BY_NAME = {d.name: d for d in ALL}
SHORT = {"float32": "f32", "float64": "f64", "bfloat16": "bf16", "float16": "f16", "int32": "i32", "int64": "i64",
         "uint8": "u8", "int8": "i8", "bool": "bool", "uint16": "u16"}

DTypeLike = Union[DType, str, np.dtype, type]


def as_dtype(value: Any) -> DType:
    """A DType from a DType, a name ("float32", "f32") or a numpy type."""
    if isinstance(value, DType):
        return value
    if isinstance(value, str):
        for name, short in SHORT.items():
            if value in (name, short):
                return _BY_NAME[name]
    try:
        name = "None" if value is None else np.dtype(value).name  # numpy takes None for float64
    except TypeError:
        name = str(value)
    if name not in _BY_NAME:
        raise TypeError(f"no such element type: {value!r}; there are {', '.join(_BY_NAME)}")
    return _BY_NAME[name]
