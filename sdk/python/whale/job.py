"""Plans and jobs: from a graph to running steps."""

from __future__ import annotations

import ctypes
import json
import os
from ctypes import byref, c_double, c_int32, c_void_p
from typing import Any, Iterable, Mapping, Sequence

import numpy as np

from . import _abi
from ._library import Handle, InvalidArgument, NotFound, bytes_of, check, engine, lib, make, string, take_bytes, take_text
from .arrays import Array, fit, view, widen
from .dtypes import DType, as_dtype
from .graph import Graph


class Plan:
    """What every device does, as a value: printed, saved, loaded, run. Made by ``whale.plan`` or ``Plan.load``."""

    def __init__(self, handle: Handle):
        self._handle = handle
        self._description: dict | None = None

    @classmethod
    def load(cls, path: str) -> "Plan":
        return cls(make("whale_plan_release", lib.whale_plan_load, engine(), string(str(path))))

    def save(self, path: str) -> None:
        check(lib.whale_plan_save(self._handle.pointer, string(str(path))))

    def serialize(self) -> bytes:
        return take_bytes(lib.whale_plan_serialize, self._handle.pointer)

    def print(self) -> str:
        """Every instruction of every class of devices."""
        return take_text(lib.whale_plan_print, self._handle.pointer)

    def summary(self) -> str:
        """Devices, their shares, memory and communication; fits a terminal."""
        return take_text(lib.whale_plan_summary, self._handle.pointer)

    def to_dict(self) -> dict:
        if self._description is None:
            self._description = json.loads(take_text(lib.whale_plan_json, self._handle.pointer))
        return self._description

    def bridges(self) -> list[dict]:
        """What moves between devices in a step, most expensive first, and what the other legal ways would cost.

        ``tensor``, ``from`` and ``to`` (layouts), ``axis``, ``count``, ``runs`` (micro-batches); ``chosen`` and each of
        ``alternatives``: ``name``, ``bytes`` received by the device that gets most, ``seconds``, of one run."""
        return json.loads(take_text(lib.whale_plan_bridges, self._handle.pointer, 1))

    def start(self, seed: int = 0, *, nan: str = "error", threads: int = 0, loss_scale: float = 0,
              loss_scale_growth: int = 0) -> "Job":
        """Opens the devices and initializes the parameters.

        nan: "error" (a loss that is not finite raises) or "ignore". threads: per CPU device, 0: its share of the cores.
        With ``precision="float16"``, loss_scale: of the first step, 0: 65536; loss_scale_growth: steps without an overflow
        until it doubles, 0: 2000."""
        if nan not in ("error", "ignore"):
            raise ValueError("nan is 'error' or 'ignore'")
        options = _abi.whale_session_options(ctypes.sizeof(_abi.whale_session_options), seed, int(nan == "ignore"), threads,
                                              loss_scale, loss_scale_growth)
        return Job(self, make("whale_session_release", lib.whale_session_create, engine(), self._handle.pointer, byref(options)))

    def svg(self) -> str:
        """A picture: devices, their samples, compute and communication over the step, memory."""
        from .display import plan_svg
        return plan_svg(self.to_dict())

    def __repr__(self) -> str:
        return self.summary()

    def _repr_html_(self) -> str:
        from .display import plan_html
        return plan_html(self)


def plan(graph: Graph, devices: str | None = None, *, strategy: str = "", fetch: Sequence[str] = (), accumulation: int = 0,
         precision: str | None = None, bucket_bytes: int = 0, zero: int = 0, state_shares: Sequence[float] = (),
         recompute: str | Sequence[str] = "none", gradient_dtype: str | None = None, adasum: bool = False, exact: bool = False,
         offload: Sequence[str] = (), update: str = "auto", matmul_chunks: int = 0,
         overlap: bool = True, fusion: bool = True) -> Plan:
    """Plans a graph for devices such as ``"cpu:4"``, ``"cpu@0,cpu@1*2"`` or ``"ref:3"`` (default: one CPU device with all cores).

    strategy: of unannotated ops, replaces the graph's. fetch: names that steps will fetch besides the graph's outputs;
    ``"grad:PARAMETER"`` is a gradient. accumulation: micro-batches a step, 0: the graph's. zero: 1 cuts optimizer state over
    replicas, 2 gradients too, 3 parameters too, by ``state_shares`` (a weight per replica; default equal; of sliced updates too). recompute:
    ``"none"``, ``"selective"`` or ``"full"``, activations computed again for the backward pass; a list: of each pipeline
    stage. gradient_dtype: what gradients are summed in between devices. adasum: combine them by Adasum. exact: bitwise equal results for any replicas
    of whole micro-batches, any pipeline, schedule, ZeRO level and recompute. offload: what waits in the host's memory,
    of ``"state"``, ``"gradients"``, ``"parameters"``, ``"activations"``. update: ``"whole"``, ``"sliced"`` (replicas update a slice
    each and gather) or ``"auto"``, by cost. matmul_chunks: of products beside their collective, 0: by cost, 1: none. overlap,
    fusion: for comparison."""
    graph.seal()
    cluster = make("whale_cluster_release", lib.whale_cluster_create, engine(), string(devices or "cpu:1"))
    options = _abi.whale_plan_options()
    options.struct_size = ctypes.sizeof(options)
    options.strategy = string(strategy)
    names = (_abi.whale_str * max(1, len(fetch)))(*[string(name) for name in fetch])
    keep = [name.encode() for name in fetch]
    for row, data in zip(names, keep):
        row.data, row.size = data, len(data)
    options.fetch, options.fetch_count = ctypes.cast(names, ctypes.POINTER(_abi.whale_str)), len(fetch)
    options.accumulation, options.bucket_bytes = accumulation, bucket_bytes
    if precision is not None:
        options.precision = {"float32": 1, "bfloat16": 2, "float64": 3, "float16": 4}[as_dtype(precision).name]
    options.zero, options.adasum, options.exact = zero, int(adasum), int(exact)
    shares = (ctypes.c_double * max(1, len(state_shares)))(*state_shares)
    options.state_shares, options.state_share_count = shares, len(state_shares)
    policies = ("none", "selective", "full")
    for policy in [recompute] if isinstance(recompute, str) else recompute:
        if policy not in policies:
            raise InvalidArgument(f"recompute is '{policy}', expected 'none', 'selective' or 'full'", "INVALID_ARGUMENT")
    if isinstance(recompute, str):
        options.recompute = policies.index(recompute)
    else:
        options.stage_recompute = (ctypes.c_int32 * max(1, len(recompute)))(*map(policies.index, recompute))
        options.stage_recompute_count = len(recompute)
    if update not in ("auto", "whole", "sliced"):
        raise InvalidArgument(f"update is '{update}', expected 'auto', 'whole' or 'sliced'", "INVALID_ARGUMENT")
    options.update, options.matmul_chunks = ("auto", "whole", "sliced").index(update), matmul_chunks
    if gradient_dtype is not None:
        options.gradient_dtype = as_dtype(gradient_dtype).number + 1
    options.offload = string(offload if isinstance(offload, str) else ",".join(offload))
    options.no_overlap, options.no_fusion = int(not overlap), int(not fusion)
    return Plan(make("whale_plan_release", lib.whale_plan_create, engine(), graph._pointer, cluster.pointer, byref(options)))


class Job:
    """A plan on real devices. One thread at a time; Ctrl-C stops the running step and leaves the job as before it."""

    def __init__(self, plan: Plan, handle: Handle):
        self.plan = plan
        self._handle = handle
        entries = {entry["name"]: entry for entry in plan.to_dict()["entries"]}
        self._inputs: dict[str, dict[str, DType]] = {
            name: {each["name"]: as_dtype(each["dtype"]) for each in entry["inputs"]} for name, entry in entries.items()}
        self._outputs = {name: [each["name"] for each in entry["outputs"]] for name, entry in entries.items()}

    def _run(self, entry: str, function, feeds: Mapping[str, Any], fetch: Sequence[str]) -> dict[str, np.ndarray]:
        expected = self._inputs.get(entry)
        if expected is None:
            raise InvalidArgument(f"this plan has no '{entry}' entry: the graph does not call minimize()", "FAILED_PRECONDITION")
        unknown = [name for name in feeds if name not in expected]
        if unknown:
            raise InvalidArgument(f"no such input: '{unknown[0]}'; the inputs are {', '.join(map(repr, expected))}",
                                  "INVALID_ARGUMENT")
        tensors = [view(fit(name, value, expected[name]), expected[name]) for name, value in feeds.items()]
        inputs = (_abi.whale_named_tensor * max(1, len(feeds)))()
        names = [name.encode() for name in feeds]
        for row, name, tensor in zip(inputs, names, tensors):
            row.name, row.tensor = _abi.whale_str(name, len(name)), tensor.pointer
        outputs = (_abi.whale_named_tensor * max(1, len(fetch)))()
        wanted = [name.encode() for name in fetch]
        for row, name in zip(outputs, wanted):
            row.name = _abi.whale_str(name, len(name))
        cancel = make("whale_cancel_release", lib.whale_cancel_create)
        out = c_void_p()
        check(function(self._handle.pointer, inputs, len(feeds), outputs, len(fetch), cancel.pointer, byref(out)))
        event, done = out.value, c_int32(0)
        try:
            while not done.value:  # short waits, so that Ctrl-C is seen
                check(lib.whale_event_wait(event, c_double(0.1), byref(done)))
        except KeyboardInterrupt:
            lib.whale_cancel_trigger(cancel.pointer)
            raise
        finally:
            lib.whale_event_release(event)  # waits for the run when it has not ended
        return {name: widen(Array(Handle(outputs[i].tensor, "whale_tensor_release"))) for i, name in enumerate(fetch)}

    def step(self, fetch: Sequence[str] = (), /, **inputs: Any) -> Any:
        """One training step on a batch; returns the loss, a float: the one before the update.

        Inputs by name: numpy arrays or anything with DLPack. A smaller last batch is legal. With ``fetch``, returns
        ``(loss, {name: array})``: graph outputs and names given to ``whale.plan(fetch=...)``, whole batch, in sample order; what a plan
        computes in bfloat16 comes as float32."""
        fetch = [fetch] if isinstance(fetch, str) else list(fetch)
        values = self._run("train", lib.whale_session_step, inputs, ["loss", *fetch])
        loss = float(np.asarray(values.pop("loss"), np.float64))
        return (loss, values) if fetch else loss

    def eval(self, fetch: Sequence[str] | None = None, /, **inputs: Any) -> dict[str, np.ndarray]:
        """The forward pass on the current parameters: dropout off, running statistics used, nothing updated.

        Returns {name: array}; fetch None: every output whose inputs are given."""
        if fetch is None:
            fetch = self._outputs.get("eval", [])
            if len(inputs) < len(self._inputs.get("eval", {})):
                fetch = [name for name in fetch if name != "loss"]
        fetch = [fetch] if isinstance(fetch, str) else list(fetch)
        return self._run("eval", lib.whale_session_eval, inputs, fetch)

    def read(self, name: str) -> np.ndarray:
        """A variable by name: a parameter, a running statistic, or optimizer state as ``"PARAMETER/SLOT"``."""
        return Array(make("whale_tensor_release", lib.whale_session_read, self._handle.pointer, string(name))).numpy()

    def write(self, name: str, value: Any) -> None:
        """Replaces a variable on every device."""
        dtype = next((as_dtype(row["dtype"]) for row in self.variables() if row["name"] == name), None)
        if dtype is None:
            raise NotFound(f"no such variable: '{name}'", "NOT_FOUND")
        tensor = view(fit(name, value, dtype), dtype)
        check(lib.whale_session_write(self._handle.pointer, string(name), tensor.pointer))

    def variables(self) -> list[dict]:
        """[{name, role, dtype, dims}] of all variables."""
        return json.loads(take_text(lib.whale_session_variables, self._handle.pointer))

    def parameters(self) -> dict[str, np.ndarray]:
        """Every parameter by name."""
        return {row["name"]: self.read(row["name"]) for row in self.variables() if row["role"] == "parameter"}

    @property
    def learning_rate(self) -> float:
        """Of the next step. Setting it fixes it; set it to None to follow the schedule again."""
        return lib.whale_session_learning_rate(self._handle.pointer)

    @learning_rate.setter
    def learning_rate(self, value: float | None) -> None:
        check(lib.whale_session_set_learning_rate(self._handle.pointer, -1.0 if value is None else value))

    @property
    def iteration(self) -> int:
        """Steps made, also those whose update was skipped."""
        return lib.whale_session_iteration(self._handle.pointer)

    @property
    def updates(self) -> int:
        return lib.whale_session_updates(self._handle.pointer)

    def save(self, directory: str | os.PathLike) -> None:
        """Writes a checkpoint: safetensors and an index, under a temporary name, then renamed: a failure leaves the previous one."""
        check(lib.whale_session_save(self._handle.pointer, string(os.fspath(directory))))

    def load(self, directory: str | os.PathLike) -> None:
        """Restores parameters, optimizer state and counters, saved under any plan of the same model."""
        check(lib.whale_session_load(self._handle.pointer, string(os.fspath(directory))))

    def trace(self, enable: bool = True) -> None:
        """Records when each instruction runs, from the next step on."""
        check(lib.whale_session_trace(self._handle.pointer, int(enable)))

    def timeline(self) -> str:
        """The last traced step as Chrome trace JSON: open it at ui.perfetto.dev."""
        return take_text(lib.whale_session_timeline, self._handle.pointer)

    def report(self) -> dict:
        """Bytes by class for each device, and the seconds of the last step in ops, collectives and waiting."""
        return json.loads(take_text(lib.whale_session_report, self._handle.pointer))

    def close(self) -> None:
        """Stops the devices and frees their memory; also done when the job is collected."""
        self._handle.close()

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def devices() -> list[dict]:
    """The back ends: whether each can be opened, and if not, why."""
    out = _abi.whale_text()
    check(lib.whale_engine_devices(engine(), 1, byref(out)))
    try:
        return json.loads(bytes_of(out))
    finally:
        lib.whale_text_release(byref(out))
