"""Tensors that cross the boundary: what has numpy's or DLPack's form becomes a whale_tensor, and a whale_tensor becomes numpy's, which has both."""

from __future__ import annotations

import ctypes
from ctypes import c_int64
from typing import Any

import numpy as np

from ._library import Handle, InvalidArgument, lib, make
from .dtypes import BY_NUMBER, DType, bfloat16


def dims_array(dims: tuple[int, ...]) -> ctypes.Array:
    return (c_int64 * max(1, len(dims)))(*dims)


def numpy_of(handle: Handle) -> np.ndarray:
    """The memory of a tensor that the engine made, writable, without a copy; the array keeps the tensor alive. Other frameworks take the
    array by DLPack, whose capsules numpy frees without running a line of Python."""
    pointer = handle.pointer
    dtype = BY_NUMBER[lib.whale_tensor_dtype(pointer)].numpy
    shape = tuple(lib.whale_tensor_dims(pointer)[i] for i in range(lib.whale_tensor_rank(pointer)))
    size, data = lib.whale_tensor_bytes(pointer), lib.whale_tensor_data(pointer)
    if not size or not data:
        return np.zeros(shape, dtype)
    buffer = (ctypes.c_uint8 * size).from_address(data)
    buffer._keep = handle
    return np.frombuffer(buffer, dtype).reshape(shape)


def has_mask(value: Any) -> bool:
    return isinstance(value, np.ma.MaskedArray) or isinstance(value, (list, tuple)) and any(has_mask(each) for each in value)


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


def widened(handle: Handle) -> np.ndarray:
    """numpy_of(); bfloat16, which numpy does not have, as float32."""
    values = numpy_of(handle)
    if lib.whale_tensor_dtype(handle.pointer) != bfloat16.number:
        return values
    return (values.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _need_finite(name: str, array: np.ndarray, finite: np.ndarray, dtype: DType) -> None:
    """``finite``: of what was made of the array. An infinity may come of an infinity alone."""
    if not finite.all() and (lost := np.isfinite(array) & ~finite).any():
        raise InvalidArgument(f"'{name}' has values that do not fit {dtype.name}, such as {array[lost][0]}; scale or clip them first",
                              "INVALID_ARGUMENT")


def fit(name: str, value: Any, dtype: DType) -> np.ndarray:
    """A dense numpy array of the wanted dtype. Kinds are kept: integers may become other integers when every value fits, floats
    other floats; a float never silently becomes an integer."""
    if has_mask(value):
        raise InvalidArgument(f"'{name}' is a masked array, and a tensor has no mask: say what stands where it hides a value, such as "
                              f"{name}.filled(0)", "INVALID_ARGUMENT")
    try:
        array = as_numpy(value)
    except ValueError as error:  # rows of unlike lengths
        raise InvalidArgument(f"'{name}' expects {dtype.name}, got no array: {error}", "INVALID_ARGUMENT") from None
    if array.dtype != dtype.numpy:
        kinds = (array.dtype.kind, dtype.numpy.kind)
        widening = kinds in {("i", "i"), ("u", "u"), ("u", "i"), ("i", "u"), ("f", "f"), ("b", "i"), ("b", "u"), ("i", "f"),
                             ("u", "f"), ("b", "f"), ("i", "b")} or "V" in kinds
        if dtype.name == "bfloat16" and dtype.numpy == np.uint16 and kinds[0] == "f":
            with np.errstate(over="ignore"):
                single = np.asarray(array, np.float32, order="C")
            bits = single.view(np.uint32)
            rounded = np.where(np.isnan(single), 0x7FC0, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
            _need_finite(name, array, rounded & 0x7F80 != 0x7F80, dtype)
            return rounded
        if not widening:
            raise InvalidArgument(f"'{name}' expects {dtype.name}, got {array.dtype}; convert it first", "INVALID_ARGUMENT")
        with np.errstate(over="ignore"):
            converted = array.astype(dtype.numpy)
        if dtype.numpy.kind in "fV":
            _need_finite(name, array, np.isfinite(converted), dtype)
        if dtype.numpy.kind in "iu" and array.dtype.kind in "iu" and array.size and not np.array_equal(converted, array):
            raise InvalidArgument(f"'{name}' has values that do not fit {dtype.name}", "INVALID_ARGUMENT")
        array = converted
    return np.require(array, requirements=("C_CONTIGUOUS", "ALIGNED", "ENSUREARRAY"))


def view(array: np.ndarray, dtype: DType) -> Handle:
    """A whale_tensor over a dense array, which the handle keeps alive."""
    handle = make("whale_tensor_release", lib.whale_tensor_view, dtype.number, dims_array(array.shape), array.ndim,
                  array.ctypes.data)
    handle.keep = array
    return handle
