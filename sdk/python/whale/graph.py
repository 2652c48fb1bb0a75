"""The graph builder: tensors that stand for values, inputs, parameters, scopes."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from ctypes import POINTER, byref, c_double, c_int32, c_int64, c_size_t
from dataclasses import dataclass
from typing import Any, Iterator, Optional, Sequence, Union

from . import _abi
from ._library import WhaleError, check, engine, lib, make, string, take_bytes, take_text
from .arrays import dims_array
from .dtypes import BY_NUMBER, DType, DTypeLike, as_dtype, float32
from .optim import Optimizer

_PACKAGE = __name__.rpartition(".")[0]
_stack = threading.local()


def current() -> "Graph":
    """The graph of the innermost ``with g:``."""
    graphs = getattr(_stack, "graphs", [])
    if not graphs:
        raise RuntimeError("no graph is open: build the model inside `with g:` where g = whale.Graph()")
    return graphs[-1]


def _caller() -> str:
    """file:line of the first frame outside this package: the line that built the op."""
    frame = sys._getframe(1)
    while frame is not None:
        if not frame.f_globals.get("__name__", "").startswith(_PACKAGE):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


@dataclass(frozen=True)
class Init:
    """How a parameter starts. Random ones depend only on the session's seed and the parameter's name."""

    kind: int
    a: float = 0.0
    b: float = 1.0
    file: str = ""
    key: str = ""


def zeros() -> Init: return Init(_abi.WHALE_INIT_ZEROS)
def ones() -> Init: return Init(_abi.WHALE_INIT_ONES)
def constant(value: float) -> Init: return Init(_abi.WHALE_INIT_CONSTANT, value)
def normal(std: float = 0.02, mean: float = 0.0) -> Init: return Init(_abi.WHALE_INIT_NORMAL, mean, std)
def uniform(low: float, high: float) -> Init: return Init(_abi.WHALE_INIT_UNIFORM, low, high)
def truncated_normal(std: float = 0.02, mean: float = 0.0) -> Init: return Init(_abi.WHALE_INIT_TRUNCATED_NORMAL, mean, std)
def from_file(file: str, key: str) -> Init: return Init(_abi.WHALE_INIT_FILE, file=file, key=key)


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
    def __len__(self) -> int: return self.shape[0]
    def __hash__(self) -> int: return hash((id(self.graph), self.id))
    def __bool__(self) -> bool:
        raise TypeError("a graph tensor has no value while the model is being built; use whale.where")

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
        items = list(index) if isinstance(index, tuple) else [index]
        if Ellipsis in items:
            at = items.index(Ellipsis)
            items[at:at + 1] = [slice(None)] * (self.ndim - len(items) + 1)
        if len(items) > self.ndim:
            raise IndexError(f"{len(items)} indices for a tensor of {self.ndim} dimensions {list(self.shape)}")
        starts, limits, strides, keep = [], [], [], []
        for dim, extent in enumerate(self.shape):
            item = items[dim] if dim < len(items) else slice(None)
            if isinstance(item, slice):
                start, limit, step = item.indices(extent)
                if step < 1:
                    raise IndexError("slices with a negative step are not supported")
                keep.append(max(0, -(-(limit - start) // step)))
            else:
                start = int(item) + (extent if int(item) < 0 else 0)
                if not 0 <= start < extent:
                    raise IndexError(f"index {item} is out of range for dimension {dim} of {list(self.shape)}")
                limit, step = start + 1, 1
            starts.append(start), limits.append(max(start, limit)), strides.append(step)
        cut = self.graph.op("slice", [self], starts=starts, limits=limits, strides=strides)
        return cut if len(keep) == self.ndim else cut.reshape(*keep)

    def reshape(self, *shape: Union[int, Sequence[int]]) -> "Tensor":
        dims = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        return self.graph.op("reshape", [self], shape=[int(d) for d in dims])

    def transpose(self, *perm: int) -> "Tensor":
        return self.graph.op("transpose", [self], perm=list(perm) or list(range(self.ndim))[::-1])

    def astype(self, dtype: DTypeLike) -> "Tensor":
        wanted = as_dtype(dtype)
        return self if wanted == self.dtype else self.graph.op("cast", [self], dtype=wanted.name)

    def _reduce(self, name: str, axis: Union[int, Sequence[int], None], keep_dims: bool) -> "Tensor":
        axes = [] if axis is None else [axis] if isinstance(axis, int) else list(axis)
        return self.graph.op(name, [self], axes=axes, keep_dims=keep_dims)

    def sum(self, axis=None, keep_dims: bool = False) -> "Tensor": return self._reduce("reduce_sum", axis, keep_dims)
    def mean(self, axis=None, keep_dims: bool = False) -> "Tensor": return self._reduce("reduce_mean", axis, keep_dims)
    def max(self, axis=None, keep_dims: bool = False) -> "Tensor": return self._reduce("reduce_max", axis, keep_dims)
    def min(self, axis=None, keep_dims: bool = False) -> "Tensor": return self._reduce("reduce_min", axis, keep_dims)


def _attributes(attrs: dict[str, Any]) -> tuple[ctypes.Array, list]:
    rows, keep = (_abi.whale_attr * max(1, len(attrs)))(), []
    for row, (name, value) in zip(rows, attrs.items()):
        keep.append(string(name))
        row.name = keep[-1]
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
        self.name = name
        self._handle = _handle or make("whale_graph_release", lib.whale_graph_create, engine(), string(name))
        self._sealed = _handle is not None
        self._names: list[dict[str, int]] = [{}]
        self.default_decay = True

    @classmethod
    def load(cls, path: str) -> "Graph":
        """Reads a model file (``.whale``), written by ``save`` or by ``whale model``."""
        return cls(str(path), _handle=make("whale_graph_release", lib.whale_graph_load, engine(), string(str(path))))

    @property
    def _pointer(self) -> int:
        return self._handle.pointer

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
        if isinstance(value, (int, float, bool)):
            return self.op("fill", [], shape=[], value=float(value), dtype=dtype.name)
        raise TypeError(f"expected a graph tensor or a number, got {type(value).__name__}; arrays enter a model as inputs "
                        "or parameters")

    def input(self, name: str, shape: Sequence[int], dtype: DTypeLike = float32, *, batch_dim: int = 0) -> Tensor:
        """An input, fed by this name each step. ``batch_dim`` counts samples; -1: the same for every sample."""
        shape = tuple(int(d) for d in shape)
        out = c_int32()
        check(lib.whale_graph_input(self._pointer, string(name), as_dtype(dtype).number, dims_array(shape), len(shape),
                                    batch_dim if shape else -1, byref(out)))
        return Tensor(self, out.value)

    def parameter(self, name: str, shape: Sequence[int], init: Init | None = None, *, dtype: DTypeLike = float32,
                  trainable: bool = True, decay: bool | None = None, buffer: bool = False) -> Tensor:
        """A parameter, named inside the open name scopes. Weight decay applies to rank >= 2 unless ``decay`` says otherwise."""
        shape = tuple(int(d) for d in shape)
        init = init or zeros()
        options = _abi.whale_parameter_options(ctypes.sizeof(_abi.whale_parameter_options), init.kind, int(not trainable),
                                               init.a, init.b, string(init.file), string(init.key),
                                               int(decay is False), int(buffer))
        out = c_int32()
        check(lib.whale_graph_parameter(self._pointer, string(self._unique(name, leaf=True)), as_dtype(dtype).number,
                                        dims_array(shape), len(shape), byref(options), byref(out)))
        return Tensor(self, out.value)

    def _unique(self, name: str, leaf: bool = False) -> str:
        """`linear`, `linear_1`, ... inside the open name scope."""
        names = self._names[-1]
        seen = names.get(name, 0)
        names[name] = seen + 1
        return name if seen == 0 else f"{name}_{seen}"

    @contextlib.contextmanager
    def _scope(self, kind: int, name: str = "", **fields: Any) -> Iterator[None]:
        options = _abi.whale_scope_options()
        options.struct_size = ctypes.sizeof(options)
        keep: list = [string(name)]
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
            elif isinstance(value, str):
                keep.append(string(value))
                setattr(options, field, keep[-1])
            else:
                setattr(options, field, int(value))
        check(lib.whale_graph_scope_begin(self._pointer, byref(options)))
        if kind == _abi.WHALE_SCOPE_NAME:
            self._names.append({})
        try:
            yield
        finally:
            if kind == _abi.WHALE_SCOPE_NAME:
                self._names.pop()
            check(lib.whale_graph_scope_end(self._pointer))

    def output(self, name: str, value: Tensor) -> Tensor:
        """Makes a value fetchable: ``job.step(..., fetch=[name])``."""
        check(lib.whale_graph_output(self._pointer, string(name), value.id))
        return value

    def minimize(self, loss: Tensor, optimizer: Optimizer, *, clip_norm: float = 0.0, accumulation: int = 1,
                 precision: str = "float32") -> None:
        """Declares the training step: minimize the scalar ``loss``.

        clip_norm: clip gradients by global norm, 0: not. accumulation: micro-batches a step; it never changes the result.
        precision: "float32", "bfloat16" or "float16" (parameters and optimizer state stay float32; float16 scales the loss) or
        "float64" (``ref`` devices)."""
        options = optimizer.options()
        options.clip_norm, options.accumulation = clip_norm, accumulation
        kinds = {"float32": _abi.WHALE_PRECISION_F32, "bfloat16": _abi.WHALE_PRECISION_BF16, "float64": _abi.WHALE_PRECISION_F64,
                 "float16": _abi.WHALE_PRECISION_F16}
        options.precision = kinds[as_dtype(precision).name]
        check(lib.whale_graph_minimize(self._pointer, loss.id, byref(options)))

    def default_strategy(self, strategy: str) -> None:
        """The strategy of unannotated ops, as text: ``"replica(3, shares=[3,2,1])"``."""
        check(lib.whale_graph_default_strategy(self._pointer, string(strategy)))

    def seal(self) -> "Graph":
        """Checks the whole graph; from here on it cannot change."""
        check(lib.whale_graph_seal(self._pointer))
        self._sealed = True
        return self

    def print(self, level: str = "graph") -> str:
        """The program as text: ``"graph"`` as built, ``"train"`` with backward and update."""
        return take_text(lib.whale_graph_print, self._pointer, string(level))

    def summary(self) -> str:
        """A table of layers, shapes, parameters and FLOPs."""
        return take_text(lib.whale_graph_summary, self._pointer)

    def serialize(self) -> bytes:
        return take_bytes(lib.whale_graph_serialize, self._pointer)

    def save(self, path: str) -> None:
        """Writes the model file; parameters' values are never inside."""
        check(lib.whale_graph_save(self._pointer, string(str(path))))

    def to_dict(self) -> dict:
        import json
        return json.loads(take_text(lib.whale_graph_json, self._pointer))

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


# ---- the same, on the graph that is open --------------------------------------------------------------------------------
def input(name: str, shape: Sequence[int], dtype: DTypeLike = float32, *, batch_dim: int = 0) -> Tensor:
    """An input of the open graph, fed by this name each step; dimension ``batch_dim`` counts samples (-1: none does)."""
    return current().input(name, shape, dtype, batch_dim=batch_dim)


def parameter(name: str, shape: Sequence[int], init: Init | None = None, **options: Any) -> Tensor:
    """A parameter of the open graph; see ``Graph.parameter``."""
    return current().parameter(name, shape, init, **options)


def scope(name: str):
    """A prefix for the names of parameters and ops inside: no placement."""
    graph = current()
    return graph._scope(_abi.WHALE_SCOPE_NAME, graph._unique(name))


Shares = Sequence[float] | Sequence[Sequence[float]]


def _flat_shares(shares: Shares) -> tuple[list[float], int]:
    """All weights, and how many there are in a row: 0 for one list, else the longest row's length (-1: no device)."""
    if not any(isinstance(row, Sequence) for row in shares):
        return [float(x) for x in shares], 0
    rows = [list(row) if isinstance(row, Sequence) else [] for row in shares]
    columns = max(len(row) for row in rows)
    if not all(rows):
        raise ValueError(f"shares is {shares}, expected one list of weights, or lists of weights in a list")
    return [float(x) for row in rows for x in [*row, *[-1] * (columns - len(row))]], columns


def replica(count: int = 0, *, shares: Shares | None = None, by: str | None = None, layout: str | None = None):
    """The ops inside exist once per replica; samples are cut across replicas, by ``shares`` when given by hand: a weight
    each, or inside other scopes a list for each position of those (``[[3, 1], [1, 1]]``)."""
    return current()._scope(_abi.WHALE_SCOPE_REPLICA, count=count, shares=shares, by=by, layout=layout)


def split(ways: int = 0, *, factor: str | None = None, shares: Shares | None = None):
    """The ops inside are cut within themselves along a named factor."""
    return current()._scope(_abi.WHALE_SCOPE_SPLIT, count=ways, factor=factor, shares=shares)


def stage(devices: int = 0):
    """The ops inside live on their own devices; consecutive stages pass activations."""
    return current()._scope(_abi.WHALE_SCOPE_STAGE, count=devices)


def pipeline(stages: int = 0, *, micro_batches: int = 0, schedule: str | None = None, chunks: int = 0):
    """The stages inside run interleaved over micro-batches."""
    return current()._scope(_abi.WHALE_SCOPE_PIPELINE, count=stages, micro_batches=micro_batches, schedule=schedule, chunks=chunks)


def cluster(devices: str | None = None, *, layout: str | None = None):
    """Which devices, and how they are sliced, for everything inside."""
    return current()._scope(_abi.WHALE_SCOPE_CLUSTER, devices=devices, layout=layout)
