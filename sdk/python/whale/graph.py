"""The graph builder: tensors that stand for values, inputs, parameters, scopes."""

from __future__ import annotations

import contextlib
import ctypes
import math
import operator
import sys
import threading
from ctypes import POINTER, byref, c_double, c_int32, c_int64, c_size_t
from dataclasses import dataclass, field
from typing import Any, Optional, Sequence, Union

import numpy as np

from . import _abi
from ._library import AlreadyExists, InvalidArgument, WhaleError, check, engine, lib, make, string, take_bytes, take_text
from .arrays import as_numpy, dims_array, fit, view
from .dtypes import BY_NUMBER, DType, DTypeLike, as_dtype, float32
from . import arguments, renamed
from .optim import Optimizer

_PACKAGE = __name__.rpartition(".")[0]
_stack = threading.local()


def current() -> "Graph":
    """The graph of the innermost ``with g:``."""
    graphs = getattr(_stack, "graphs", [])
    if not graphs:
        raise RuntimeError("no graph is open: build the model inside `with g:` where g = whale.Graph()")
    return graphs[-1]


def _check(status: int | None, what: str = "") -> None:
    """check(), with the user's line and ``what`` before the message."""
    try:
        check(status)
    except WhaleError as error:
        message = error.args[0] if not what or what in error.args[0] else f"{arguments.brief(what)}: {error.args[0]}"
        error.args = (f"{_caller()}: {message}",)
        raise


def _caller() -> str:
    """file:line of the first frame outside this package: the line that built the op."""
    frame = sys._getframe(1)
    while frame is not None:
        if not frame.f_globals.get("__name__", "").startswith((_PACKAGE, "contextlib")):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


@dataclass(frozen=True)
class Init:
    """How a parameter starts, made by ``zeros``, ``ones``, ``constant``, ``normal``, ``uniform``, ``truncated_normal``, ``from_file`` or ``from_array``. Random
    ones depend only on the job's seed and the parameter's name. kind, a, b, file, key: as whale.h has them; values: of ``from_array``."""

    kind: int
    a: float = 0.0
    b: float = 1.0
    file: str = ""
    key: str = ""
    values: Any = field(default=None, compare=False)


def zeros() -> Init:
    """0 everywhere."""
    return Init(_abi.WHALE_INIT_ZEROS)


def ones() -> Init:
    """1 everywhere."""
    return Init(_abi.WHALE_INIT_ONES)


def constant(value: float) -> Init:
    """One number everywhere."""
    return Init(_abi.WHALE_INIT_CONSTANT, arguments.number("value", value))


def normal(std: float = 0.02, mean: float = 0.0) -> Init:
    """Drawn from a normal distribution."""
    return Init(_abi.WHALE_INIT_NORMAL, arguments.number("mean", mean), arguments.number("std", std, 0))


def uniform(low: float, high: float) -> Init:
    """Drawn from [low, high)."""
    return Init(_abi.WHALE_INIT_UNIFORM, arguments.number("low", low), arguments.number("high", high, low))


def truncated_normal(std: float = 0.02, mean: float = 0.0) -> Init:
    """Drawn from a normal distribution, and again where it is more than two standard deviations off."""
    return Init(_abi.WHALE_INIT_TRUNCATED_NORMAL, arguments.number("mean", mean), arguments.number("std", std, 0))


def from_file(file: str, key: str = "") -> Init:
    """Tensor ``key`` of a safetensors file; "": the tensor with the parameter's full name."""
    return Init(_abi.WHALE_INIT_FILE, file=arguments.text("file", file), key=arguments.text("key", key))


def from_array(values: Any) -> Init:
    """``values``, which are copied into the graph: numpy's, anything with DLPack, a nested list."""
    return Init(_abi.WHALE_INIT_DATA, values=np.array(as_numpy(values)))


Axes = Union[int, Sequence[int], None]


class Tensor:
    """A value of a graph: a shape and a dtype now, numbers when a job runs. Arithmetic and comparison operators, ``@``,
    and slicing with ``[]`` append ops."""

    __slots__ = ("graph", "id", "dtype", "shape")
    __array_ufunc__ = None  # numpy arrays on the left defer to the reflected operators here

    def __init__(self, graph: "Graph", id: int):
        self.graph, self.id = graph, id
        dtype, dims, rank = c_int32(), POINTER(c_int64)(), c_size_t()
        check(lib.whale_graph_value(graph._pointer, id, byref(dtype), byref(dims), byref(rank)))
        self.dtype: DType = BY_NUMBER[dtype.value]
        self.shape: tuple[int, ...] = tuple(dims[i] for i in range(rank.value))

    @property
    def ndim(self) -> int: return len(self.shape)
    def __repr__(self) -> str: return f"whale.Tensor({self.dtype.name}{list(self.shape)})"
    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a scalar of the graph has no length")
        return self.shape[0]

    def __hash__(self) -> int: return hash((id(self.graph), self.id))
    def __array__(self, *_: Any, **__: Any) -> np.ndarray:  # numpy would make an array of one tensor an element
        raise TypeError("a graph tensor has no value while the model is being built; name it with g.output and fetch it from a step")
    def __bool__(self) -> bool:
        raise TypeError("a graph tensor has no value while the model is being built; choose by element with whale.ops.where(condition, a, b)")

    def _binary(self, name: str, other: Any, swap: bool = False) -> "Tensor":
        other = self.graph.as_tensor(other, self.dtype)
        return self.graph.op(name, [other, self] if swap else [self, other])

    def __add__(self, other): return self._binary("add", other)
    def __radd__(self, other): return self._binary("add", other, True)
    def __sub__(self, other): return self._binary("sub", other)
    def __rsub__(self, other): return self._binary("sub", other, True)
    def __mul__(self, other): return self._binary("mul", other)
    def __rmul__(self, other): return self._binary("mul", other, True)
    def __truediv__(self, other): return self._binary("div", other)
    def __rtruediv__(self, other): return self._binary("div", other, True)
    def __pow__(self, other): return self._binary("pow", other)
    def __rpow__(self, other): return self._binary("pow", other, True)
    def __matmul__(self, other): return self.graph.op("matmul", [self, other])
    def __neg__(self): return self.graph.op("neg", [self])
    def __abs__(self): return self.graph.op("abs", [self])
    def __lt__(self, other): return self._binary("less", other)
    def __le__(self, other): return self._binary("less_equal", other)
    def __gt__(self, other): return self._binary("greater", other)
    def __ge__(self, other): return self._binary("greater_equal", other)
    def __eq__(self, other): return self._binary("equal", other)
    def __ne__(self, other): return self._binary("not_equal", other)
    def __and__(self, other): return self._binary("logical_and", other)
    def __or__(self, other): return self._binary("logical_or", other)
    def __invert__(self): return self.graph.op("logical_not", [self])

    def __getitem__(self, index: Any) -> "Tensor":
        """Numbers, slices with a positive step, ``...`` and ``None`` (a new dimension of extent 1), as in numpy."""
        items = list(index) if isinstance(index, tuple) else [index]
        taken = sum(item is not None and item is not Ellipsis for item in items)
        if taken > self.ndim:
            raise IndexError(f"{taken} indices for a tensor of {self.ndim} dimensions {list(self.shape)}")
        dots = [at for at, item in enumerate(items) if item is Ellipsis] or [len(items)]
        if len(dots) > 1:
            raise IndexError("an index has one '...' at most")
        items[dots[0]:dots[0] + 1] = [slice(None)] * (self.ndim - taken)
        starts, limits, strides, keep = [], [], [], []
        for item in items:
            if item is None:
                keep.append(1)
                continue
            dim, extent = len(starts), self.shape[len(starts)]
            if isinstance(item, slice):
                start, limit, step = item.indices(extent)
                if step < 1:
                    raise IndexError("slices with a negative step are not supported")
                keep.append(max(0, -(-(limit - start) // step)))
            else:
                if isinstance(item, bool):
                    raise TypeError(f"an index is a number, a slice, '...' or None, got {item!r}; a dimension of extent 1: None")
                try:
                    start = operator.index(item)
                except TypeError:
                    tensor = isinstance(item, Tensor) or hasattr(item, "__array__")
                    raise TypeError(f"an index is a number, a slice, '...' or None, got {item!r}" +
                                    ("; rows chosen by numbers that the model computes: whale.ops.gather(x, indices, axis=...)" if tensor else "")) from None
                start += extent if start < 0 else 0
                if not 0 <= start < extent:
                    raise IndexError(f"index {item} is out of range for dimension {dim} of {list(self.shape)}")
                limit, step = start + 1, 1
            starts.append(start), limits.append(max(start, limit)), strides.append(step)
        cut = self.graph.op("slice", [self], starts=starts, limits=limits, strides=strides)
        return cut if tuple(keep) == cut.shape else cut.reshape(keep)

    def reshape(self, *shape: Union[int, Sequence[int]]) -> "Tensor":
        """The same elements in row-major order under another shape, ``x.reshape(2, -1)`` or ``x.reshape((2, -1))``; one extent may be -1."""
        dims = shape[0] if len(shape) == 1 and hasattr(shape[0], "__iter__") else shape
        return self.graph.op("reshape", [self], shape=list(arguments.shape("shape", dims, -1)))

    def transpose(self, *perm: Union[int, Sequence[int]]) -> "Tensor":
        """Dimension i of the result is dimension perm[i] of this; without ``perm`` the order is reversed."""
        order = perm[0] if len(perm) == 1 and hasattr(perm[0], "__iter__") else perm
        return self.graph.op("transpose", [self], perm=list(arguments.shape("perm", order)) or list(range(self.ndim))[::-1])

    def astype(self, dtype: DTypeLike) -> "Tensor":
        wanted = as_dtype(dtype)
        return self if wanted == self.dtype else self.graph.op("cast", [self], dtype=wanted.name)

    def _reduce(self, name: str, axis: Axes, keep_dims: bool) -> "Tensor":
        axes = [] if axis is None else list(arguments.shape("axis", axis if hasattr(axis, "__iter__") else [axis], -2**63))
        if axis is not None and not axes:
            return self  # over no dimension, as in numpy
        return self.graph.op(name, [self], axes=axes, keep_dims=arguments.flag("keep_dims", keep_dims))

    def sum(self, axis: Axes = None, keep_dims: bool = False) -> "Tensor":
        """Sum over ``axis``: a dimension, several, or None: all. keep_dims: they stay, with extent 1."""
        return self._reduce("reduce_sum", axis, keep_dims)

    def mean(self, axis: Axes = None, keep_dims: bool = False) -> "Tensor":
        """Mean over ``axis``: a dimension, several, or None: all. keep_dims: they stay, with extent 1."""
        return self._reduce("reduce_mean", axis, keep_dims)

    def max(self, axis: Axes = None, keep_dims: bool = False) -> "Tensor":
        """The largest over ``axis``: a dimension, several, or None: all. keep_dims: they stay, with extent 1."""
        return self._reduce("reduce_max", axis, keep_dims)

    def min(self, axis: Axes = None, keep_dims: bool = False) -> "Tensor":
        """The smallest over ``axis``: a dimension, several, or None: all. keep_dims: they stay, with extent 1."""
        return self._reduce("reduce_min", axis, keep_dims)


def _attributes(attrs: dict[str, Any]) -> tuple[ctypes.Array, list]:
    rows, keep = (_abi.whale_attr * max(1, len(attrs)))(), []
    for row, (name, value) in zip(rows, attrs.items()):
        keep.append(string(name))
        row.name = keep[-1]
        if not isinstance(value, (str, list, tuple)) and getattr(value, "ndim", 1) == 0:
            value = value.item()  # a number of numpy's
        if isinstance(value, bool):
            row.kind, row.i = _abi.WHALE_ATTR_BOOL, int(value)
        elif isinstance(value, int):
            row.kind, row.i = _abi.WHALE_ATTR_INT, value
        elif isinstance(value, float):
            row.kind, row.f = _abi.WHALE_ATTR_FLOAT, value
        elif isinstance(value, str):
            keep.append(string(value))
            row.kind, row.s = _abi.WHALE_ATTR_STRING, keep[-1]
        else:
            values = list(value)
            row.count = len(values)
            if any(isinstance(v, float) for v in values):
                array = (c_double * max(1, len(values)))(*values)
                row.kind, row.floats = _abi.WHALE_ATTR_FLOATS, ctypes.cast(array, POINTER(c_double))
            else:
                array = (c_int64 * max(1, len(values)))(*[int(v) for v in values])
                row.kind, row.ints = _abi.WHALE_ATTR_INTS, ctypes.cast(array, POINTER(c_int64))
            keep.append(array)
    return rows, keep


_PRECISIONS = {"float32": _abi.WHALE_PRECISION_F32, "bfloat16": _abi.WHALE_PRECISION_BF16, "float64": _abi.WHALE_PRECISION_F64,
               "float16": _abi.WHALE_PRECISION_F16}


def precision_number(precision: DTypeLike) -> int:
    """whale_precision of a float type or its name."""
    try:
        return _PRECISIONS[as_dtype(precision).name]
    except (KeyError, TypeError):
        raise arguments.wrong("precision", precision, "'float32', 'bfloat16', 'float16' or 'float64'") from None


# What the primitives call the fields of their options.
_ARGUMENTS = {(_abi.WHALE_SCOPE_SPLIT, "count"): "ways", (_abi.WHALE_SCOPE_STAGE, "count"): "devices", (_abi.WHALE_SCOPE_PIPELINE, "count"): "stages"}


def _fits(value: float, dtype: DType) -> bool:
    """Whether a type of integers has this number."""
    low, high = (0, 1) if dtype.name == "bool" else (int(np.iinfo(dtype.numpy).min), int(np.iinfo(dtype.numpy).max))
    return math.isfinite(value) and low <= value <= high and int(float(value)) == value


class Graph:
    """An ordinary local model. Build it inside ``with g:``; ``whale.plan`` seals it.

    >>> g = whale.Graph("classifier")
    >>> with g:
    ...     x = whale.input("x", (32, 784))
    ...     y = whale.input("y", (32,), whale.int32)
    ...     with whale.replica():
    ...         loss = whale.nn.cross_entropy(whale.nn.linear(x, 10), y)
    ...     g.minimize(loss, whale.SGD(0.1))
    """

    def __init__(self, name: str = "model", *, _handle=None):
        self.name = arguments.text("name", name)
        self._handle = _handle or make("whale_graph_release", lib.whale_graph_create, engine(), string(name))
        self._sealed = _handle is not None
        self._trained: Optional[bool] = None if _handle is not None else False
        self._names: list[dict[str, int]] = [{}]

    @classmethod
    def parse(cls, data: bytes) -> "Graph":
        """A graph from ``data``, the bytes of ``serialize``; ready to plan. Initial values in files are read only from ``wh.configure``'s
        init_dir."""
        data = arguments.instance("data", data, bytes, "the bytes that Graph.serialize gave")
        return cls("parsed", _handle=make("whale_graph_release", lib.whale_graph_parse, engine(), data, len(data)))

    @classmethod
    def load(cls, path: str) -> "Graph":
        """Reads a model file (``.whale``), written by ``save`` or by ``whale model``."""
        file = arguments.path("path", path)
        return cls(file, _handle=make("whale_graph_release", lib.whale_graph_load, engine(), string(file)))

    def __reduce__(self):
        return Graph.parse, (self.serialize(),)

    @property
    def _pointer(self) -> int:
        return self._handle.pointer

    @property
    def trained(self) -> bool:
        """Whether ``minimize`` was called."""
        return self._trained if self._trained is not None else self.to_dict()["training"]["loss"] >= 0

    def __enter__(self) -> "Graph":
        if not hasattr(_stack, "graphs"):
            _stack.graphs = []
        _stack.graphs.append(self)
        return self

    def __exit__(self, *_) -> None:
        _stack.graphs.pop()

    def op(self, name: str, inputs: Sequence[Optional[Tensor]], **attrs: Any) -> Any:
        """Appends op ``name`` (see ``whale.ops``); one result, or a tuple of them. Attributes that are None take their default."""
        ids = []
        for each in inputs:
            if each is not None and not isinstance(each, Tensor):
                raise TypeError(f"{name}: operands are tensors of the graph, got {type(each).__name__}")
            if each is not None and each.graph is not self:
                raise ValueError(f"{name}: an operand belongs to another graph")
            ids.append(_abi.WHALE_NONE if each is None else each.id)
        rows, _keep = _attributes({key: value for key, value in attrs.items() if value is not None})
        count = sum(value is not None for value in attrs.values())
        options = _abi.whale_op_options(ctypes.sizeof(_abi.whale_op_options), string(""), string(_caller()))
        outputs, made = (c_int32 * 16)(), c_size_t()
        check(lib.whale_graph_op(self._pointer, string(name), (c_int32 * max(1, len(ids)))(*ids), len(ids), rows, count,
                                 byref(options), outputs, 16, byref(made)))
        results = tuple(Tensor(self, outputs[i]) for i in range(made.value))
        return results[0] if len(results) == 1 else results

    def as_tensor(self, value: Any, dtype: DType) -> Tensor:
        if isinstance(value, Tensor):
            return value
        if getattr(value, "ndim", 1) == 0 and hasattr(value, "item"):
            value = value.item()  # a number of numpy's
        if isinstance(value, (int, float, bool)):
            if dtype.numpy.kind in "iub" and not _fits(value, dtype):
                advice = ("cast the tensor first: x.astype(whale.float32)" if isinstance(value, float)
                          else "cast the tensor first: x.astype(whale.int64)" if abs(value) <= 2**53
                          else "constants are exact up to 2**53: bring it in as an input")
                raise TypeError(f"{value!r} beside a tensor of {dtype.name} would be cut; {advice}")
            return self.op("fill", [], shape=[], value=arguments.real("operand", value), dtype=dtype.name)
        raise TypeError(f"expected a graph tensor or a number, got {type(value).__name__}; arrays enter a model as inputs "
                        "or parameters")

    def input(self, name: str, shape: Sequence[int], dtype: DTypeLike = float32, *, batch_dim: int = 0) -> Tensor:
        """An input, fed by this name each step. ``batch_dim``: the dimension that counts samples; -1: the same for every sample, as
        a scalar always is."""
        shape = arguments.shape("shape", shape)
        if not shape and batch_dim == 0:
            batch_dim = -1
        out = c_int32()
        _check(lib.whale_graph_input(self._pointer, string(arguments.text("name", name)), as_dtype(dtype).number, dims_array(shape), len(shape),
                                     arguments.integer("batch_dim", batch_dim, -1, 2**31 - 1), byref(out)), f"input '{name}'")
        return Tensor(self, out.value)

    def parameter(self, name: str, shape: Sequence[int], init: Init | None = None, *, dtype: DTypeLike = float32,
                  trainable: bool = True, decay: bool | None = None, buffer: bool = False) -> Tensor:
        """A parameter, named inside the open name scopes.

        init: how it starts (``normal``, ``uniform``, ``constant``, ...), zeros by default. trainable False: it keeps its values.
        decay: whether the optimizer's weight decay applies; None: where the rank is 2 or more. buffer: a running statistic that ops
        write, never trained."""
        shape = arguments.shape("shape", shape)
        init = zeros() if init is None else arguments.instance("init", init, Init, "an initializer such as whale.normal(0.02) or whale.constant(0.5)")
        for argument, given in dict(trainable=trainable, buffer=buffer, **({} if decay is None else {"decay": decay})).items():
            arguments.flag(argument, given)
        if decay and (buffer or not trainable):
            raise arguments.wrong("decay", decay, "None or False: what is not trained does not decay")
        options = _abi.whale_parameter_options(ctypes.sizeof(_abi.whale_parameter_options), init.kind, int(not trainable),
                                               init.a, init.b, string(init.file), string(init.key),
                                               _abi.WHALE_DECAY_BY_RANK if decay is None else _abi.WHALE_DECAY_ALWAYS if decay else _abi.WHALE_DECAY_NEVER,
                                               int(buffer))
        keep = None
        if init.values is not None:
            keep = view(fit("init", init.values, as_dtype(dtype)), as_dtype(dtype))
            options.data = keep.pointer
        out = c_int32()
        asked = arguments.text("name", name)
        full = self._unique(asked)
        while True:
            try:
                _check(lib.whale_graph_parameter(self._pointer, string(full), as_dtype(dtype).number,
                                                 dims_array(shape), len(shape), byref(options), byref(out)), f"parameter '{asked}'")
                return Tensor(self, out.value)
            except AlreadyExists:
                if full == asked:
                    raise
                full = self._unique(asked)  # an op has this number

    def constant(self, name: str, values: Any, *, dtype: DTypeLike | None = None) -> Tensor:
        """A constant from data: numpy's, anything with DLPack, a nested list; copied into the graph. It is a variable that nothing trains and
        stands in the graph's file, and in checkpoints among the running statistics. dtype: None: that of the values, float64 as float32."""
        array = as_numpy(values)
        if dtype is None:
            dtype = float32 if array.dtype == np.float64 else as_dtype(array.dtype)
        wanted = as_dtype(dtype)
        tensor, out = view(fit("values", array, wanted), wanted), c_int32()
        _check(lib.whale_graph_constant(self._pointer, string(self._unique(arguments.text("name", name))), tensor.pointer, byref(out)),
               f"constant '{name}'")
        return Tensor(self, out.value)

    def parameter_group(self, pattern: str, *, learning_rate_factor: float | None = None, weight_decay: float | None = None) -> None:
        """How the trained parameters that are there now and whose full name matches ``pattern`` (``*``: any text, ``?``: one character) learn:
        ``g.parameter_group("*.bias", weight_decay=0)``. learning_rate_factor: times the learning rate, whatever its schedule; None: 1.
        weight_decay: instead of the optimizer's, whatever the parameters' rank; None: the optimizer's. A later call replaces what an earlier one
        said of a parameter. NotFound: none matches."""
        options, zeros = _abi.whale_group_options(), 0
        options.struct_size = ctypes.sizeof(options)
        for field_name, value, bit in (("learning_rate_factor", learning_rate_factor, _abi.WHALE_ZERO_LEARNING_RATE),
                                       ("weight_decay", weight_decay, _abi.WHALE_ZERO_WEIGHT_DECAY)):
            if value is not None:
                setattr(options, field_name, arguments.number(field_name, value, 0, 1e30))
                zeros |= bit if value == 0 else 0
        options.zeros = zeros
        _check(lib.whale_graph_parameter_group(self._pointer, string(arguments.text("pattern", pattern)), byref(options)), "parameter_group")

    def gradients(self, of: Tensor, by: Tensor | Sequence[Tensor]) -> Any:
        """The gradient of ``of`` (of the sum of its elements, unless it is a scalar) with respect to ``by``, a tensor or a list of them: inputs,
        parameters, what ops have made. None where ``of`` does not depend on it. They are tensors as any others: a penalty on a gradient's norm
        may go into the loss. For plans of several micro-batches give ``of`` with one value a sample
        (``h.sum(axis=1)``, of which the gradient is the same): a sum or mean of all samples mixes them before the loss. Not through
        random ops (dropout) and ``batch_norm`` (``Unimplemented``)."""
        several = [by] if isinstance(by, Tensor) else list(by)
        ids = [self._own("by", each).id for each in several]
        outputs = (c_int32 * max(1, len(ids)))()
        _check(lib.whale_graph_gradients(self._pointer, self._own("of", of).id, (c_int32 * max(1, len(ids)))(*ids), len(ids), outputs), "gradients")
        made = [None if number == _abi.WHALE_NONE else Tensor(self, number) for number in outputs[:len(ids)]]
        return made[0] if isinstance(by, Tensor) else made

    def _unique(self, name: str) -> str:
        """`linear`, `linear_1`, ... inside the open name scope."""
        names = self._names[-1]
        seen = names.get(name, 0)
        names[name] = seen + 1
        return name if seen == 0 else f"{name}_{seen}"

    def _scope(self, kind: int, name: str = "", **fields: Any) -> "Scope":
        options = _abi.whale_scope_options()
        options.struct_size = ctypes.sizeof(options)
        keep: list = [string(arguments.text("name", name))]
        options.kind, options.name = kind, keep[0]
        for field, value in fields.items():
            if value is None:
                continue
            if field == "shares":
                weights, columns = _flat_shares(value)
                options.count = options.count or columns
                array = (c_double * len(weights))(*weights)
                options.shares, options.share_count = ctypes.cast(array, POINTER(c_double)), len(weights)
                keep.append(array)
            elif dict(options._fields_)[field] is _abi.whale_str:
                keep.append(string(arguments.text(field, value)))
                setattr(options, field, keep[-1])
            else:
                setattr(options, field, arguments.integer(_ARGUMENTS.get((kind, field), field), value, 0))
        options.keep = keep
        return Scope(self, options)

    def _own(self, name: str, value: Any) -> Tensor:
        if arguments.instance(name, value, Tensor, "a tensor of this graph").graph is not self:
            raise arguments.wrong(name, value, "a tensor of this graph; it belongs to another one")
        return value

    def output(self, name: str, value: Tensor) -> Tensor:
        """Makes a value fetchable: ``job.step([name], ...)``, ``job.eval([name], ...)``."""
        _check(lib.whale_graph_output(self._pointer, string(arguments.text("name", name)), self._own("value", value).id), f"output '{name}'")
        return value

    def minimize(self, loss: Tensor, optimizer: Optimizer, *, clip_norm: float = 0.0, accumulation: int = 1,
                 precision: str = "float32") -> None:
        """Declares the training step: minimize the scalar ``loss``. Called again, it replaces what was declared.

        clip_norm: clip gradients by global norm, times min(1, clip_norm / (norm + 1e-6)); 0: not. accumulation: micro-batches a step, 1 or
        more; it never changes the result.
        precision: "float32", "bfloat16" or "float16" (parameters and optimizer state stay float32; float16 scales the loss) or
        "float64" (``ref`` devices)."""
        options = arguments.instance("optimizer", optimizer, Optimizer, "an optimizer such as whale.AdamW(1e-3)").options()
        options.clip_norm = arguments.number("clip_norm", clip_norm, 0)
        options.accumulation = arguments.integer("accumulation", accumulation, 1)
        options.precision = precision_number(precision)
        _check(lib.whale_graph_minimize(self._pointer, self._own("loss", loss).id, byref(options)), "minimize")
        self._trained = True

    def default_strategy(self, strategy: str) -> None:
        """The strategy of unannotated ops, as text: ``"replica(3, shares=[3,2,1])"``, or with clauses for scopes by name:
        ``"head: split(2); replica(2)"``; those must be there when the graph is sealed."""
        _check(lib.whale_graph_default_strategy(self._pointer, string(arguments.text("strategy", strategy))))

    def seal(self) -> "Graph":
        """Checks the whole graph; from here on it cannot change."""
        check(lib.whale_graph_seal(self._pointer))
        self._sealed = True
        return self

    def print(self, level: str = "graph") -> str:
        """The program as text. level: ``"graph"`` as built, ``"train"`` with backward and update."""
        return take_text(lib.whale_graph_print, self._pointer, string(arguments.choice("level", level, ("graph", "train"))))

    def summary(self) -> str:
        """A table of layers, shapes, parameters and FLOPs."""
        return take_text(lib.whale_graph_summary, self._pointer)

    def serialize(self) -> bytes:
        return take_bytes(lib.whale_graph_serialize, self._pointer)

    def save(self, path: str) -> None:
        """Writes the model file. Values of parameters are inside where they were given as data (``from_array``, ``constant``)."""
        check(lib.whale_graph_save(self._pointer, string(arguments.path("path", path))))

    def to_dict(self) -> dict:
        return renamed.report(take_text(lib.whale_graph_json, self._pointer))

    def __repr__(self) -> str:
        try:
            return self.summary()
        except WhaleError:
            return f"whale.Graph({self.name!r}, being built)"

    def svg(self) -> str:
        """A picture of the model: its blocks from input to loss."""
        from .display import graph_svg
        return graph_svg(self.to_dict())

    def _repr_html_(self) -> str:
        from .display import graph_html
        return graph_html(self)


class Scope(contextlib.ContextDecorator):
    """Made by ``replica``, ``split``, ``stage``, ``pipeline``, ``cluster`` and ``scope``: what is built inside ``with`` is in it. It lies in the scope
    that was open when it was entered first; entered again, also from elsewhere, it is the same one: ``with wh.stage() as first: ...``, later
    ``with first: ...``."""

    def __init__(self, graph: Graph, _options: _abi.whale_scope_options):
        self._graph, self._options = graph, _options
        self._number = 0
        self._names: dict[str, int] = {}  # of parameters in it

    def __enter__(self) -> "Scope":
        open_graphs = getattr(_stack, "graphs", [])
        if open_graphs and open_graphs[-1] is not self._graph:
            raise InvalidArgument(f"this scope is of graph '{self._graph.name}', and '{open_graphs[-1].name}' is open: make one there", "INVALID_ARGUMENT")
        if not self._number:
            out = c_int32()
            _check(lib.whale_graph_scope(self._graph._pointer, 0, byref(self._options), byref(out)))
            self._number = out.value
            if self._options.kind != _abi.WHALE_SCOPE_NAME:
                self._names = self._graph._names[-1]
        _check(lib.whale_graph_scope_open(self._graph._pointer, self._number))
        self._graph._names.append(self._names)
        return self

    def __exit__(self, *_: Any) -> None:
        self._graph._names.pop()
        check(lib.whale_graph_scope_end(self._graph._pointer))


# ---- the same, on the graph that is open --------------------------------------------------------------------------------
def input(name: str, shape: Sequence[int], dtype: DTypeLike = float32, *, batch_dim: int = 0) -> Tensor:
    """An input of the open graph, fed by this name each step; dimension ``batch_dim`` counts samples (-1: none does)."""
    return current().input(name, shape, dtype, batch_dim=batch_dim)


def parameter(name: str, shape: Sequence[int], init: Init | None = None, *, dtype: DTypeLike = float32, trainable: bool = True,
              decay: bool | None = None, buffer: bool = False) -> Tensor:
    """A parameter of the open graph. init: how it starts, zeros by default. trainable, decay, buffer: as in ``Graph.parameter``."""
    return current().parameter(name, shape, init, dtype=dtype, trainable=trainable, decay=decay, buffer=buffer)


def scope(name: str):
    """A prefix for the names of parameters and ops inside: no placement."""
    graph = current()
    return graph._scope(_abi.WHALE_SCOPE_NAME, graph._unique(name))


Shares = Sequence[float] | Sequence[Sequence[float]]


def _flat_shares(shares: Shares) -> tuple[list[float], int]:
    """All weights, and how many there are in a row: 0 for one list, else the longest row's length (-1: no device)."""
    if isinstance(shares, str) or not hasattr(shares, "__iter__") or not list(shares):
        raise arguments.wrong("shares", shares, "a weight for each, such as [2, 1, 1]")
    if not any(isinstance(row, Sequence) for row in shares):
        return arguments.numbers_of("shares", shares), 0
    rows = [list(row) if isinstance(row, Sequence) else [] for row in shares]
    columns = max(len(row) for row in rows)
    if not all(rows):
        raise arguments.wrong("shares", shares, "one list of weights, or lists of weights in a list")
    return [x for row in rows for x in [*arguments.numbers_of("shares", row), *[-1.0] * (columns - len(row))]], columns


# Counts of 0 are inferred from the devices.
@renamed.arguments(layout="device_order")
def replica(count: int = 0, *, shares: Shares | None = None, by: str | None = None, device_order: str | None = None):
    """The ops inside exist once per replica; samples are cut across replicas, by ``shares`` when given by hand: a weight
    each, or inside other scopes a list for each position of those (``[[3, 1], [1, 1]]``). count: replicas, 0: as many as devices
    allow. by: what is cut, ``"sample"`` (default) or ``"micro_batch"``. device_order: which devices stand together (``"row"``, ``"column"``)."""
    return current()._scope(_abi.WHALE_SCOPE_REPLICA, count=count, shares=shares, by=by, device_order=device_order)


def split(ways: int = 0, *, factor: str | None = None, shares: Shares | None = None):
    """The ops inside are cut within themselves along a named factor (``"heads"``, ``"columns"``, ``"height"``, ...; None: what is
    cheapest). ways: parts, 0: as many as devices allow. shares: a weight for each part."""
    return current()._scope(_abi.WHALE_SCOPE_SPLIT, count=ways, factor=factor, shares=shares)


def stage(devices: int = 0):
    """The ops inside live on their own devices; consecutive stages pass activations. devices: how many, 0: an equal part."""
    return current()._scope(_abi.WHALE_SCOPE_STAGE, count=devices)


@renamed.arguments(chunks="virtual_stages")
def pipeline(stages: int = 0, *, micro_batches: int = 0, schedule: str | None = None, virtual_stages: int = 0,
             warmup: Sequence[int] | None = None):
    """The stages inside run interleaved over micro-batches. stages: how many, cut where it is cheapest when no ``stage`` is written,
    0: as devices allow. micro_batches: parts of the batch, 0: the graph's accumulation. schedule: ``"1f1b"`` (default), ``"gpipe"``,
    ``"interleaved"``, ``"zb_h1"``, ``"zb_v"``. virtual_stages: of an interleaved schedule, stages on each device.
    warmup: of each stage, forward passes before its first backward one, of ``"1f1b"`` and ``"zb_h1"``: more than one for each stage
    behind it hide slow links and hold more; None: as many, or more where links are known to be slow."""
    if warmup is not None:
        if isinstance(warmup, str) or not hasattr(warmup, "__iter__") or not list(warmup):
            raise arguments.wrong("warmup", warmup, "a depth for each stage, such as [3, 2, 1]")
        depths = ",".join(str(arguments.integer("warmup", depth, 1)) for depth in warmup)
        schedule = f"{'' if schedule is None else arguments.text('schedule', schedule)}[{depths}]"
    return current()._scope(_abi.WHALE_SCOPE_PIPELINE, count=stages, micro_batches=micro_batches, schedule=schedule, virtual_stages=virtual_stages)


@renamed.arguments(layout="device_order")
def cluster(devices: str | None = None, *, device_order: str | None = None):
    """Which devices, and how they are sliced, for everything inside. device_order: ``"all"``, ``"row"``, ``"column"``, ``"average(n)"`` or lists."""
    return current()._scope(_abi.WHALE_SCOPE_CLUSTER, devices=devices, device_order=device_order)
