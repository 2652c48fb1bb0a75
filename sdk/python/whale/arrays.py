"""Tensors that cross the boundary: numpy and DLPack to and from whale_tensor."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_int64, c_void_p
from typing import Any

import numpy as np

from . import _abi
from ._library import Handle, InvalidArgument, check, lib, make
from .dtypes import BY_NUMBER, DType

_MASK_DELETER = ctypes.CFUNCTYPE(None, c_void_p)
_api = ctypes.pythonapi
_api.PyCapsule_New.restype = ctypes.py_object
_api.PyCapsule_New.argtypes = [c_void_p, ctypes.c_char_p, c_void_p]
_api.PyCapsule_IsValid.restype = ctypes.c_int
_api.PyCapsule_IsValid.argtypes = [c_void_p, ctypes.c_char_p]
_api.PyCapsule_GetPointer.restype = c_void_p
_api.PyCapsule_GetPointer.argtypes = [c_void_p, ctypes.c_char_p]

_VERSIONED = b"dltensor_versioned"  # the names must outlive the capsules


@_MASK_DELETER
def _free_unused(capsule: int) -> None:
    # Called by the interpreter when nobody consumed the capsule; a consumer renames it.
    if _api.PyCapsule_IsValid(capsule, _VERSIONED):
        pointer = _api.PyCapsule_GetPointer(capsule, _VERSIONED)
        managed = ctypes.cast(pointer, POINTER(_abi.DLManagedTensorVersioned))
        managed.contents.deleter(pointer)


def dims_array(dims: tuple[int, ...]) -> ctypes.Array:
    return (c_int64 * max(1, len(dims)))(*dims)


class Array:
    """A tensor that the engine made: numpy sees its memory without a copy, and so does any DLPack consumer."""

    def __init__(self, handle: Handle):
        self._handle = handle
        pointer = handle.pointer
        self.dtype: DType = BY_NUMBER[lib.whale_tensor_dtype(pointer)]
        rank = lib.whale_tensor_rank(pointer)
        self.shape: tuple[int, ...] = tuple(lib.whale_tensor_dims(pointer)[i] for i in range(rank))

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        out = POINTER(_abi.DLManagedTensorVersioned)()
        check(lib.whale_tensor_to_dlpack(self._handle.pointer, byref(out)))
        return _api.PyCapsule_New(ctypes.cast(out, c_void_p), _VERSIONED, ctypes.cast(_free_unused, c_void_p))

    def numpy(self) -> np.ndarray:
        """The memory itself, writable; it keeps this tensor alive."""
        count = int(np.prod(self.shape, dtype=np.int64))
        size = lib.whale_tensor_bytes(self._handle.pointer)
        data = lib.whale_tensor_data(self._handle.pointer)
        if count == 0 or not data:
            return np.zeros(self.shape, self.dtype.numpy)
        buffer = (ctypes.c_uint8 * size).from_address(data)
        buffer._keep = self._handle
        return np.frombuffer(buffer, self.dtype.numpy).reshape(self.shape)

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype)

    def __repr__(self) -> str:
        return f"whale.Array({self.dtype.name}{list(self.shape)})"


def as_numpy(value: Any) -> np.ndarray:
    """numpy's view of an array-like: numpy, anything with DLPack (PyTorch, JAX, ...), a nested list or a number."""
    if isinstance(value, np.ndarray):
        return value
    if hasattr(value, "detach"):  # a PyTorch tensor that requires a gradient does not export itself
        value = value.detach()
    if hasattr(value, "__dlpack__") and not isinstance(value, np.generic):
        try:
            return np.from_dlpack(value)
        except (RuntimeError, BufferError, TypeError):
            pass
    return np.asarray(value)


def widen(array: Array) -> np.ndarray:
    """The tensor as numpy; bfloat16, which numpy does not have, as float32."""
    values = array.numpy()
    if array.dtype.name != "bfloat16":
        return values
    return (values.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def fit(name: str, value: Any, dtype: DType) -> np.ndarray:
    """A dense numpy array of the wanted dtype. Kinds are kept: integers may become other integers when every value fits, floats
    other floats; a float never silently becomes an integer."""
    array = as_numpy(value)
    if array.dtype != dtype.numpy:
        kinds = (array.dtype.kind, dtype.numpy.kind)
        widening = kinds in {("i", "i"), ("u", "u"), ("u", "i"), ("i", "u"), ("f", "f"), ("b", "i"), ("b", "u"), ("i", "f"),
                             ("u", "f"), ("b", "f"), ("i", "b")} or "V" in kinds
        if dtype.name == "bfloat16" and dtype.numpy == np.uint16 and kinds[0] == "f":
            bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            return rounded.astype(np.uint16)
        if not widening:
            raise InvalidArgument(f"'{name}' expects {dtype.name}, got {array.dtype}; convert it first", "INVALID_ARGUMENT")
        converted = array.astype(dtype.numpy)
        if dtype.numpy.kind in "iu" and array.dtype.kind in "iu" and array.size and not np.array_equal(converted, array):
            raise InvalidArgument(f"'{name}' has values that do not fit {dtype.name}", "OUT_OF_RANGE")
        array = converted
    return np.asarray(array, order="C") if array.flags.c_contiguous else np.ascontiguousarray(array).reshape(array.shape)


def view(array: np.ndarray, dtype: DType) -> Handle:
    """A whale_tensor over a dense array, which the handle keeps alive."""
    handle = make("whale_tensor_release", lib.whale_tensor_view, dtype.number, dims_array(array.shape), array.ndim,
                  array.ctypes.data)
    handle.keep = array
    return handle
