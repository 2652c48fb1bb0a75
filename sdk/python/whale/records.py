"""What a plan and a job say of themselves, as whale.h has it: ports, variables, entries, devices, memory."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_int32, c_int64, c_size_t
from dataclasses import dataclass, fields
from typing import Any

from . import _abi
from ._library import check, lib, text_of
from .dtypes import BY_NUMBER, DType

_ROLES = {_abi.WHALE_ROLE_PARAMETER: "parameter", _abi.WHALE_ROLE_STATE: "state", _abi.WHALE_ROLE_BUFFER: "buffer"}
_RUNS = {_abi.WHALE_RUN_STEP: "train", _abi.WHALE_RUN_EVAL: "eval"}
_KINDS = {_abi.WHALE_DEVICE_CPU: "cpu", _abi.WHALE_DEVICE_REF: "ref", _abi.WHALE_DEVICE_NULL: "null", _abi.WHALE_DEVICE_LAG: "lag",
          _abi.WHALE_DEVICE_LAG_CPU: "lag_cpu"}


@dataclass(frozen=True)
class Port:
    """An input or an output. dims: of a whole batch. batch_dim: of an input, the dimension that counts samples; -1: none does, and of outputs.
    in_train, in_eval: whether steps and evaluations have it."""

    name: str
    dtype: DType
    dims: tuple[int, ...]
    batch_dim: int
    in_train: bool
    in_eval: bool


@dataclass(frozen=True)
class Variable:
    """role: "parameter", "state" (of the optimizer) or "buffer" (a running statistic). dims: logical, whole. copies: for each copy that the devices
    hold, the devices that it is read from."""

    name: str
    role: str
    dtype: DType
    dims: tuple[int, ...]
    copies: tuple[tuple[int, ...], ...]

    def keys(self) -> list[str]:  # with them a variable is a row of a table too: dict(variable), variable["name"]
        return [each.name for each in fields(self)]

    def __getitem__(self, name: str) -> Any:
        if name not in self.keys():
            raise KeyError(name)
        return self.dtype.name if name == "dtype" else getattr(self, name)


@dataclass(frozen=True)
class Entry:
    """What devices do in a run of one batch size. run: "train" or "eval". batch: samples. planned_here: by the job; the plan has the others."""

    run: str
    batch: int
    planned_here: bool


@dataclass(frozen=True)
class Device:
    """kind: "cpu", "ref", "null", "lag" or "lag_cpu". node: which machine, from 0. rank: which device of all. local_rank: which of its node.
    memory_bytes: that a plan may take; 0: not said."""

    kind: str
    node: int
    rank: int
    local_rank: int
    memory_bytes: int


@dataclass(frozen=True)
class Memory:
    """Bytes of one device by what they hold: parameters, gradients (and their sums), state (of the optimizer), buffers (running statistics).
    copies (of variables that live in the host's memory): of a plan. inputs, workspace (of kernels): of a job; in a plan inputs are activations.
    activations: the rest of the arena. host: in the host's memory instead. total: of the device, without host."""

    parameters: int
    gradients: int
    state: int
    buffers: int
    copies: int
    inputs: int
    activations: int
    workspace: int
    host: int
    total: int


def _filled(kind: type, function, *arguments: Any) -> Any:
    """The struct that a function of whale.h fills, its last parameter."""
    out = kind(struct_size=ctypes.sizeof(kind))
    check(function(*arguments, byref(out)))
    return out


def port(session: int, kind: str, number: int) -> Port:
    p = _filled(_abi.whale_port, getattr(lib, f"whale_session_{kind}_port"), session, number)
    return Port(text_of(p.name), BY_NUMBER[p.dtype], tuple(p.dims[:p.rank]), p.batch_dim, bool(p.in_step), bool(p.in_eval))


def slices(session: int, run: int, batch: int, number: int) -> list[tuple[slice, ...]]:
    """The boxes of an input that a rank's devices read."""
    rank, count = len(port(session, "input", number).dims), c_size_t()
    check(lib.whale_session_slice_count(session, run, batch, number, byref(count)))
    begin, end, boxes = (c_int64 * max(1, rank))(), (c_int64 * max(1, rank))(), []
    for i in range(count.value):
        check(lib.whale_session_slice(session, run, batch, number, i, begin, end))
        boxes.append(tuple(map(slice, begin[:rank], end[:rank])))
    return boxes


def variable(session: int, index: int) -> Variable:
    v = _filled(_abi.whale_variable, lib.whale_session_variable, session, index)
    copies, devices, count = [], POINTER(c_int32)(), c_size_t()
    for copy in range(v.copies):
        check(lib.whale_session_variable_devices(session, index, copy, byref(devices), byref(count)))
        copies.append(tuple(devices[:count.value]))
    return Variable(text_of(v.name), _ROLES[v.role], BY_NUMBER[v.dtype], tuple(v.dims[:v.rank]), tuple(copies))


def entries(of: str, handle: int) -> list[Entry]:
    """of: "plan" or "session"."""
    rows = [_filled(_abi.whale_entry, getattr(lib, f"whale_{of}_entry"), handle, i) for i in range(getattr(lib, f"whale_{of}_entry_count")(handle))]
    return [Entry(_RUNS[row.run], row.batch, bool(row.planned_here)) for row in rows]


def device(plan: int, index: int) -> Device:
    d = _filled(_abi.whale_device, lib.whale_plan_device, plan, index)
    return Device(_KINDS[d.kind], d.node, d.rank, d.local_rank, d.memory_bytes)


def memory(of: str, handle: int, device: int) -> Memory:
    m = _filled(_abi.whale_memory, getattr(lib, f"whale_{of}_memory"), handle, device)
    return Memory(*(getattr(m, each.name) for each in fields(Memory)))
