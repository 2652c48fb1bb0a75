"""Plans and jobs: from a graph to running steps."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import warnings
import weakref
from ctypes import byref, c_double, c_int32, c_int64, c_void_p
from typing import Any, Iterable, Iterator, Mapping, Sequence

import numpy as np

from . import _abi, arguments, records, renamed
from ._library import (FailedPrecondition, Handle, InvalidArgument, NotFound, WhaleError, check, encoded, engine, interruptible, lib, make, string,
                       take_bytes, take_text, text_of)
from .arrays import fit, numpy_of, view, widened
from .dtypes import DType, as_dtype
from .future import Future
from .graph import Graph, precision_number
from .local import Local, gathered
from .optim import RANGES
from .ranks import World
from .records import Device, Entry, Memory, Port, Variable
from .report import Profile, Report, report_of, traces_of


def _proof(timeout: float, progress: bool, function: Any, *of: Any) -> dict:
    options = _abi.whale_proof_options()
    options.struct_size = ctypes.sizeof(options)
    options.timeout_seconds = arguments.number("timeout", timeout, 0)
    options.progress = int(arguments.flag("progress", progress))
    cancel = make("whale_cancel_release", lib.whale_cancel_create)
    options.cancel = cancel.pointer
    return json.loads(interruptible(lambda: take_text(function, *of, byref(options)), cancel.pointer))


class Plan:
    """What every device does, as a value: printed, saved, loaded, run. Made by ``whale.plan`` or ``Plan.load``.

    world: the ranks that its jobs run in; None: this process alone."""

    def __init__(self, handle: Handle, world: World | None = None):
        self._handle = handle
        self.world = world
        self._description: dict | None = None

    @classmethod
    def load(cls, path: str) -> "Plan":
        return cls(make("whale_plan_release", lib.whale_plan_load, engine(), string(arguments.path("path", path))))

    @classmethod
    def parse(cls, data: bytes) -> "Plan":
        """A plan from ``data``, the bytes of ``serialize``."""
        data = arguments.instance("data", data, bytes, "the bytes that Plan.serialize gave")
        return cls(make("whale_plan_release", lib.whale_plan_parse, engine(), data, len(data)))

    def __reduce__(self):
        return Plan.parse, (self.serialize(),)

    def save(self, path: str) -> None:
        check(lib.whale_plan_save(self._handle.pointer, string(arguments.path("path", path))))

    def serialize(self) -> bytes:
        return take_bytes(lib.whale_plan_serialize, self._handle.pointer)

    def print(self) -> str:
        """Every instruction of every class of devices."""
        return take_text(lib.whale_plan_print, self._handle.pointer)

    def summary(self) -> str:
        """Devices, their shares, memory and communication; fits a terminal."""
        return take_text(lib.whale_plan_summary, self._handle.pointer)

    def devices(self) -> list[Device]:
        """The devices, in the plan's order."""
        return [records.device(self._handle.pointer, i) for i in range(lib.whale_plan_device_count(self._handle.pointer))]

    def memory(self, device: int) -> Memory:
        """Bytes that a step takes of one device."""
        return records.memory("plan", self._handle.pointer, arguments.integer("device", device, 0))

    def entries(self) -> list[Entry]:
        """The batch sizes that it has been made for."""
        return records.entries("plan", self._handle.pointer)

    def to_dict(self) -> dict:
        if self._description is None:
            self._description = renamed.report(take_text(lib.whale_plan_json, self._handle.pointer))
        return self._description

    def __getattr__(self, name: str) -> Any:
        raise renamed.attribute("Plan", name, {"bridges": "reshards"})

    def reshards(self) -> list[dict]:
        """What moves between devices in a step, most expensive first, and what the other legal ways would cost.

        ``tensor``, ``from`` and ``to`` (shardings), ``axis``, ``count``, ``runs`` (micro-batches); ``chosen`` and each of
        ``alternatives``: ``name``, ``bytes`` received by the device that gets most, ``seconds``, of one run."""
        return renamed.report(take_text(lib.whale_plan_reshards_json, self._handle.pointer))

    def choices(self) -> dict:
        """Every cut, as it was chosen before anything was moved.

        ``strategy``; ``variables``: ``name``, ``sharding`` (its storage sharding), ``count``; ``ops``: ``name``, ``op``, ``phase``, ``cuts`` (the
        factor along each axis, or "whole"), ``results`` (types and shardings), ``count``, ``price``; ``step``: the price of a step for
        the devices that have most to do. A price: ``compute_seconds``, ``move_seconds``, ``moved_bytes`` (received), by the
        cost model, nothing beside anything. Ops of repeated blocks are one row."""
        return renamed.report(take_text(lib.whale_plan_choices_json, self._handle.pointer))

    def simulate(self) -> dict:
        """One step as the simulator walks the plan, instruction for instruction: ``seconds``; ``classes`` of devices that do the same at the same
        time: ``devices``, ``compute_seconds``, ``phases``, ``communication_seconds``, ``hidden_seconds`` of it (beside computation),
        ``idle_seconds``; ``instructions`` that were walked and ``walk_seconds``."""
        return json.loads(take_text(lib.whale_plan_simulate_json, self._handle.pointer))

    def prove(self, timeout: float = 0, progress: bool = True) -> dict:
        """Whether the plan is equal to the one-device program of its source, found without running it or opening a device (docs/proof.md).
        Raises nothing for a plan that is not: ``verdict`` says it.

        ``verdict``: ``"proven"``, ``"refuted"``, or ``"not covered"`` (there is no rule for something in it: nothing is said); ``text``:
        lines for a person; ``program``: a hash of the source, "" where the plan contradicts itself; ``entries``: of each ``entry`` (``"train"``, ``"eval"``), ``batch``, ``verdict``, ``what`` (proven: the
        statement; else what was expected and found, or has no rule), ``construct`` that has no rule, ``walked``: how many instructions
        were, ``path``: who made what it reads, and ``at``, as far as it is known: ``device``, ``segment``, and where an instruction is the
        reason its ``number``, ``verb``, ``instruction``, ``scope``, ``micro_batch`` (-1: the segment runs once). An entry that is proven in exact mode has an ``order``, text: those of two
        plans of one program that have the same give the same bits; ``orders`` has the same of each variable and output, by name.

        timeout
            Seconds that the proof may take (``DeadlineExceeded``), 0: any. Ctrl-C stops it too.
        progress
            A bar on a terminal (stderr), where it takes more than a second."""
        return _proof(timeout, progress, lib.whale_plan_prove_json, self._handle.pointer)

    @staticmethod
    def prove_file(path: str, timeout: float = 0, progress: bool = True) -> dict:
        """``prove`` of a plan file, also of one that contradicts itself (a wait is missing, devices do not agree on a collective, ...) or its
        model, which ``load`` does not take: it is refuted, and ``at`` and ``path`` say where.

        timeout
            Seconds that the proof may take (``DeadlineExceeded``), 0: any. Ctrl-C stops it too.
        progress
            A bar on a terminal (stderr), where it takes more than a second."""
        return _proof(timeout, progress, lib.whale_plan_file_prove_json, engine(), string(arguments.path("path", path)))

    def in_float64(self) -> "Plan":
        """The same plan on reference devices in float64: every group, transfer and instruction stays, and nothing rounds to fewer
        bits. What a plan in float32 or 16 bits computes wrongly, this one does too, and no rounding hides it. Float inputs take
        float64."""
        return Plan(make("whale_plan_release", lib.whale_plan_in_float64, self._handle.pointer))

    def start(self, seed: int = 0, *, nan: str = "error", threads: int = 0, loss_scale: float = 0,
              loss_scale_growth: int = 0, pin: bool = True, bf16_instructions: bool = True, plan_in_run: bool = True,
              world: World | None = None) -> "Job":
        """Opens the devices and initializes the parameters.

        seed: of initializers and random ops, 0 to 2^64 - 1. nan: "error" (a loss that is not finite
        raises, and the message says whether its step was applied; docs/promises.md) or "ignore". threads: per CPU device, at most the cores of this process; 0: its share of them. With ``precision="float16"`` alone, loss_scale: of the first step, 2^-14 to 2^24,
        0: 65536; loss_scale_growth: steps without an overflow until it doubles, 0: 2000. pin: CPU devices run on cores of their own,
        the least used ones of this process' jobs; False: wherever the system puts them. bf16_instructions: False: CPU devices multiply
        bfloat16 in float32, as on processors without instructions for it. plan_in_run: False: a step or evaluation of a batch size that was
        not asked for (``train_batches`` and ``eval_batches`` of ``whale.plan``, ``Job.prepare``) is FailedPrecondition instead of being planned when
        it comes. world: the ranks that run the plan, None: those that it was made
        for, or this process alone; waits until all have started."""
        world = self.world if world is None else arguments.instance("world", world, World, "a whale.World")
        arguments.choice("nan", nan, ("error", "ignore"))
        cores = len(os.sched_getaffinity(0))
        if arguments.integer("threads", threads, 0) > cores:
            raise arguments.wrong("threads", threads, f"at most {cores}, the cores that this process may run on")
        if arguments.number("loss_scale", loss_scale, 0) and not 2**-14 <= loss_scale <= 2**24:
            raise arguments.wrong("loss_scale", loss_scale, "a number from 2**-14 to 2**24, or 0")
        options = _abi.whale_session_options(ctypes.sizeof(_abi.whale_session_options), arguments.integer("seed", seed, 0, 2**64 - 1),
                                              int(nan == "ignore"), threads,
                                              float(loss_scale), arguments.integer("loss_scale_growth", loss_scale_growth, 0), int(not arguments.flag("pin", pin)),
                                              int(not arguments.flag("bf16_instructions", bf16_instructions)),
                                              None if world is None else world._handle.pointer, int(arguments.flag("plan_in_run", plan_in_run)))
        cancel = make("whale_cancel_release", lib.whale_cancel_create)
        options.cancel = cancel.pointer
        return Job(self, interruptible(lambda: make("whale_session_release", lib.whale_session_create, engine(), self._handle.pointer,
                                                    byref(options)), cancel.pointer), world)

    def svg(self) -> str:
        """A picture: devices, their samples, compute and communication over the step, memory."""
        from .display import plan_svg
        return plan_svg(self.to_dict())

    def show(self, measured: str | os.PathLike | Sequence[str | os.PathLike] = ()) -> Report:
        """The plan as a page: the cluster with each device's load and memory, a timeline of one step, shares and why, reshards with bytes. A
        notebook shows it. measured: a file of a run's timeline (``whale run --trace``, ``Profile.trace``), or one of each rank: it stands beside
        the predicted one. docs/reports.md."""
        return report_of(self._handle.pointer, traces_of(measured))

    def report(self, path: str | os.PathLike, measured: str | os.PathLike | Sequence[str | os.PathLike] = ()) -> None:
        """Writes the page of ``show(measured)`` to a file, ``path``: HTML that needs no network."""
        self.show(measured).save(path)

    def timeline(self) -> str:
        """One step as the simulator has it, as Chrome trace JSON, as ``Job.timeline`` has a run's: open it at ui.perfetto.dev."""
        return take_text(lib.whale_plan_timeline_json, self._handle.pointer)

    def __repr__(self) -> str:
        return self.summary()

    def _repr_html_(self) -> str:
        from .display import plan_html
        return plan_html(self)


def inspect_checkpoint(directory: str | os.PathLike) -> dict:
    """What the checkpoint in ``directory`` holds, after checking every byte of it: format, library, id, checksums (False: an older one, which has none),
    model, seed, iteration, updates, learning_rate, optimizer (that made the state; None: an older checkpoint, which does not say), ranks (that wrote it), and tensors, a list of name, file, dtype, dims and bytes (of several ranks also parts). Raises what ``Job.load``
    raises."""
    return json.loads(take_text(lib.whale_checkpoint_inspect_json, string(arguments.path("directory", directory))))


def plan(graph: Graph, devices: str | None = None, *, strategy: str = "", fetch: Sequence[str] = (), accumulation: int = 0,
         precision: str | None = None, bucket_bytes: int = 0, zero: int = 0, state_shares: Sequence[float] = (),
         recompute: str | Sequence[str] = "none", gradient_dtype: str | None = None, adasum: bool = False, exact: bool = False,
         offload: Sequence[str] = (), update: str = "auto", matmul_chunks: int = 0, prefetch: int = 0, accumulate_dtype: str | None = None,
         train_batches: Sequence[int] = (), eval_batches: Sequence[int] = (), overlap: bool = True, fusion: bool = True, timeout: float = 0,
         world: World | None = None, profile: Mapping[str, Any] | str | os.PathLike | None = None, objective: str = "throughput",
         budget: float = 0, min_throughput: float = 0, search_seconds: float = 0, present: "Plan | str" = "") -> Plan:
    """Plans a graph for devices; seals the graph. Needs no device, and raises what cannot be planned (``InvalidArgument``, with the scope,
    the op and the line of the program that made it).

    devices
        ``"cpu:4"`` (four devices over this process' cores), ``"cpu@0,cpu@1*2"`` (by cores), ``"ref:3"`` (float64 oracle), ``"null:8"``
        (executes nothing); with their memory ``"null-80GB:8"``, of which plans take no more (``ResourceExhausted`` says by how much, on
        which device, and what would help). Default: one CPU device with all cores. In a world: the devices of all ranks together, in even
        runs; default one CPU device a rank. Planned for but not here: ``"8xV100-32GB + 8xP100-16GB"``, ``"4 nodes of 8xA100-80GB, 800Gb/s"``,
        ``"file:cluster.json"`` (docs/clusters.md).
    strategy
        Of unannotated ops, as text: ``"replica(2) > pipeline(2, micro_batches=4)"``; replaces the graph's. ``"local"``: one device,
        whatever the annotations say. ``"auto"``: searched for; the plan's notes say over what it was chosen.
    fetch
        Names that steps will fetch besides the graph's outputs; ``"grad:PARAMETER"`` is a gradient.
    accumulation
        Micro-batches a step, 0: the graph's. It never changes the result.
    precision
        ``"float32"``, ``"bfloat16"``, ``"float16"`` or ``"float64"`` (``ref`` devices); None: the graph's.
    zero
        1 cuts optimizer state over replicas, 2 gradients too, 3 parameters too.
    state_shares
        Of what ``zero`` or a sliced update cuts, a weight per replica; default equal. An error without either.
    recompute
        ``"none"``, ``"selective"`` or ``"full"``: activations computed again for the backward pass; a list: of each pipeline stage.
    gradient_dtype, adasum
        What gradients of replicas are summed in (``"bfloat16"``, ``"float16"``), or combined by Adasum instead. They change the
        arithmetic on purpose; not with ``exact``.
    accumulate_dtype
        What gradients are summed in over micro-batches (``"bfloat16"``, ``"float16"``: half the memory; ``"float32"`` of 16-bit parameters'
        gradients: fewer roundings). It changes the arithmetic on purpose; not with ``exact`` or ``adasum``. None: their own type.
    exact
        Bitwise equal results for any replicas of whole micro-batches, any pipeline, schedule, ZeRO level and recompute.
    offload
        What waits in the host's memory: ``"state"``, ``"gradients"``, ``"parameters"``, ``"activations"``, one or several.
    update
        ``"whole"``, ``"sliced"`` (replicas update a slice each and gather) or ``"auto"``, by cost.
    bucket_bytes
        Bytes of gradients that are summed at once, 0: 4 MiB.
    matmul_chunks
        Pieces of a product that run beside its collective, 0: by cost, 1: whole.
    prefetch
        ZeRO 3: gathers of parameters ahead of the one that is read, 0: as late as the computation before hides them, by the cost model, where that takes no more memory. More of them are in memory at once, and are waited for less.
    train_batches, eval_batches
        Batch sizes besides the graph's that steps (at most the graph's) and evaluations (any) will have: planned now and saved with the plan,
        not when the first one comes. ``Job.prepare`` does it later.
    overlap, fusion
        False: communication in turn with computation; every op by itself. For comparison.
    timeout
        Seconds that planning may take (``DeadlineExceeded``), 0: any. Ctrl-C stops it too.
    world
        The ranks that run the plan (``whale.world``, ``whale.worlds``); every one makes it, with the same arguments.
    profile
        Figures of the machine that choices go by: what ``whale.probe`` gave, a file of it, or a mapping of figures by name
        (``{"link.bytes_per_second": 1e9}``), or what ``whale.profile`` measured of the model (docs/profiles.md). None: those of devices that nobody
        has measured. The plan keeps them.
    present
        Of strategy ``"auto"``: the plan that runs now, or its strategy: what is near it is looked at and nothing else, for a device that was lost,
        added or is slower.
    objective, budget, min_throughput, search_seconds
        Of strategy ``"auto"``: ``"throughput"`` or ``"price"`` of a step; what a step may cost at most, in the currency of the devices' prices,
        0: anything; samples a second at least; seconds that a search may take, about, 0: 10.

    ``zero``, ``gradient_dtype``, ``adasum``, ``update``, ``matmul_chunks`` and ``prefetch`` are about what several devices do: on one they are legal and
    change nothing. Options of training (these but ``matmul_chunks`` and ``prefetch``, and ``accumulation``, ``train_batches``, ``accumulate_dtype``, ``state_shares``, ``recompute``, ``bucket_bytes``, ``offload`` of anything but
    parameters) have no meaning for a graph without ``minimize`` and are errors there. What an option finds nothing of (``zero`` without replicas, ``offload`` of
    state that the optimizer does not keep) is legal, and one of the plan's notes says so."""
    cluster, options, cancel = _planning(**locals())
    return Plan(interruptible(lambda: make("whale_plan_release", lib.whale_plan_create, engine(), graph._pointer, cluster.pointer,
                                           byref(options)), cancel.pointer), world)


def plan_async(graph: Graph, devices: str | None = None, *, world: World | None = None, **options: Any) -> Future[Plan]:
    """``whale.plan`` beside the caller, who goes on; the future's ``result()`` is the plan. devices, world, options: those of ``whale.plan``. What
    is wrong with them is raised here, what cannot be planned by ``result()``."""
    cluster, planning, cancel = _planning(graph, devices, world=world, **options)
    stop = functools.partial(lib.whale_cancel_trigger, cancel.pointer)  # or whoever drops the future would wait for the plan
    stop.keep = cancel
    event = make("whale_event_release", lib.whale_plan_create_async, engine(), graph._pointer, cluster.pointer, byref(planning), first=(stop,))
    return Future(event, cancel, lambda ended: Plan(make("whale_plan_release", lib.whale_event_plan, ended.pointer), world))


def estimate(graph: Graph, devices: str | None = None, *, quick: bool = False, **options: Any) -> dict:
    """What ``whale.plan`` of the same arguments would take, also where that does not fit; seals the graph. ``options``: those of
    ``whale.plan``. About two thirds of planning's time (evaluation is not planned, nothing is verified), and a third where a few of many
    like layers stand for all. ``quick``: for one choice among many: a third of that again, where one layer more is not asked whether it
    says the same: of shallow models and pipelines memory is then more than 2 % off in one of six setups, and a pipeline that would be
    faster otherwise is not looked for. To rank choices by, not to fill devices by.

    ``strategy``; ``seconds`` of a step by the cost model; ``classes`` of devices whose parts have the same sizes: ``devices`` (their
    numbers), ``seconds`` of their own work, ``memory`` and ``host_memory`` (bytes: ``parameters``, ``gradients``, ``state``, ``buffers``,
    ``copies``, ``activations``, ``total``), ``memory_limit`` (what one of them may take; 0: not said). Raises what ``whale.plan`` raises,
    but for ``ResourceExhausted``: that a plan does not fit is what one asks. Memory is what the plan would say, of models with many like
    layers within 2 %; where the evaluation alone needs memory to be dearer, the plan's training holds less. Seconds leave out what waits
    for what: the plan's timeline is longer."""
    cluster, planning, cancel = _planning(graph, devices, **options)
    planning.quick = int(arguments.flag("quick", quick))
    return json.loads(interruptible(lambda: take_text(lib.whale_plan_estimate_json, engine(), graph._pointer, cluster.pointer,
                                                      byref(planning)), cancel.pointer))


def candidates(graph: Graph, devices: str | None = None, **options: Any) -> dict:
    """What strategy ``"auto"`` looks through; seals the graph. ``options``: those of ``whale.plan``.

    ``fits``; ``candidates``, the best first: ``strategy``, ``options`` (``"zero 1, recompute full"``), ``devices`` (their numbers), ``seconds`` of a
    step (0: not planned), ``simulated``, ``bytes`` of the fullest device, ``missing_bytes`` (0: it fits), ``price`` of a step, ``lost`` (why it is
    not the winner); ``not_tried``; ``pareto``: those of which none is both faster and cheaper, by rising price."""
    cluster, planning, cancel = _planning(graph, devices, **options)
    return json.loads(interruptible(lambda: take_text(lib.whale_plan_search_json, engine(), graph._pointer, cluster.pointer, byref(planning)),
                                    cancel.pointer))


def predict(graph: Graph, devices: str, counts: Sequence[int], batches: Sequence[int] = (), **options: Any) -> list[dict]:
    """The best strategy for the first so many devices and for each batch size, as a scheduler of many jobs asks; seals the graph. ``counts``: of
    devices; ``batches``: samples of a step, none: the graph's own. ``options``: those of ``whale.plan``.

    A row for each count and batch: ``devices``, ``batch``, ``strategy``, ``options``, ``seconds``, ``samples_per_second``, ``bytes`` of the fullest
    device, ``price`` of a step; or ``error`` where nothing fits."""
    cluster, planning, cancel = _planning(graph, devices, **options)
    numbers = [arguments.shape(name, sizes, 1) for name, sizes in (("counts", counts), ("batches", batches))]
    lists = [(ctypes.c_int64 * max(1, len(sizes)))(*sizes) for sizes in numbers]
    return json.loads(interruptible(lambda: take_text(lib.whale_plan_predict_json, engine(), graph._pointer, cluster.pointer, byref(planning),
                                                      lists[0], len(numbers[0]), lists[1], len(numbers[1])), cancel.pointer))


def validate(path: str | os.PathLike, form: str = "", profiles: str | os.PathLike = "") -> dict:
    """What the cost model and the planner say of rows that somebody measured (docs/validation.md): ``form``, ``rows``, and what that form measures.
    ``form``: default by the file's columns; ``profiles``: a folder that the form reads besides."""
    return json.loads(take_text(lib.whale_engine_validate_json, engine(), string(os.fspath(path)), string(arguments.text("form", form)),
                                string(os.fspath(profiles))))


def _planning(graph: Graph, devices: str | None, *, strategy: str = "", fetch: Sequence[str] = (), accumulation: int = 0,
              precision: str | None = None, bucket_bytes: int = 0, zero: int = 0, state_shares: Sequence[float] = (),
              recompute: str | Sequence[str] = "none", gradient_dtype: str | None = None, adasum: bool = False, exact: bool = False,
              offload: Sequence[str] = (), update: str = "auto", matmul_chunks: int = 0, prefetch: int = 0, accumulate_dtype: str | None = None,
              train_batches: Sequence[int] = (), eval_batches: Sequence[int] = (), overlap: bool = True, fusion: bool = True,
              timeout: float = 0, world: World | None = None,
              profile: Mapping[str, Any] | str | os.PathLike | None = None, objective: str = "throughput", budget: float = 0,
              min_throughput: float = 0, search_seconds: float = 0, present: "Plan | str" = "") -> tuple[Handle, Any, Handle]:
    """Cluster, options and cancel token of ``plan``'s arguments, checked."""
    if world is not None:
        devices = devices or f"cpu:{arguments.instance('world', world, World, 'a whale.World').size}"
    arguments.instance("graph", graph, Graph, "a whale.Graph")
    for name, value in dict(adasum=adasum, exact=exact, overlap=overlap, fusion=fusion).items():
        arguments.flag(name, value)
    for name, value in dict(accumulation=accumulation, zero=zero, gradient_dtype=gradient_dtype, accumulate_dtype=accumulate_dtype, adasum=adasum,
                             state_shares=state_shares, train_batches=train_batches).items():
        if (len(value) if hasattr(value, "__len__") else value) and not graph.trained:
            raise arguments.wrong(name, value, "a graph that calls minimize(): this one is not trained")
    graph.seal()
    if devices is not None and (not devices or not isinstance(devices, str)):
        raise arguments.wrong("devices", devices, "text such as 'cpu:4', or None")
    cluster = make("whale_cluster_release", lib.whale_cluster_create, engine(), string(devices or "cpu:1"))
    options = _abi.whale_plan_options()
    options.struct_size = ctypes.sizeof(options)
    options.strategy = string(arguments.text("strategy", strategy or ""))
    fetch = arguments.names("fetch", fetch)
    names = (_abi.whale_str * max(1, len(fetch)))()
    keep = [encoded(name) for name in fetch]
    for row, data in zip(names, keep):
        row.data, row.size = data, len(data)
    options.fetch, options.fetch_count = ctypes.cast(names, ctypes.POINTER(_abi.whale_str)), len(fetch)
    options.accumulation = arguments.integer("accumulation", accumulation, 0, 2**31 - 1)
    options.bucket_bytes = arguments.integer("bucket_bytes", bucket_bytes, 0)
    if precision is not None:
        options.precision = precision_number(precision)
    options.zero, options.adasum, options.exact = arguments.integer("zero", zero, 0, 3), int(adasum), int(exact)
    state_shares = arguments.numbers_of("state_shares", state_shares, 0)
    shares = (ctypes.c_double * max(1, len(state_shares)))(*state_shares)
    options.state_shares, options.state_share_count = shares, len(state_shares)
    batches = []
    for name, sizes in (("train", train_batches), ("eval", eval_batches)):
        sizes = arguments.shape(f"{name}_batches", sizes, 1)
        batches.append((ctypes.c_int64 * max(1, len(sizes)))(*sizes))
        setattr(options, f"{name}_batches", batches[-1])
        setattr(options, f"{name}_batch_count", len(sizes))
    policies = ("none", "selective", "full")
    policies_given = arguments.names("recompute", recompute)
    if not policies_given:
        raise arguments.wrong("recompute", recompute, "'none', 'selective' or 'full', or one of them for each stage")
    for policy in policies_given:
        arguments.choice("recompute", policy, policies)
    if isinstance(recompute, str):
        options.recompute = policies.index(recompute)
    else:
        options.stage_recompute = (ctypes.c_int32 * max(1, len(recompute)))(*map(policies.index, recompute))
        options.stage_recompute_count = len(recompute)
    forms = ("auto", "whole", "sliced")
    options.update = forms.index(arguments.choice("update", update, forms))
    options.matmul_chunks = arguments.integer("matmul_chunks", matmul_chunks, 0, 2**31 - 1)
    options.prefetch = arguments.integer("prefetch", prefetch, 0, 2**31 - 1)
    if gradient_dtype is not None:
        options.gradient_dtype = as_dtype(gradient_dtype).number
    if accumulate_dtype is not None:
        options.accumulate_dtype = as_dtype(accumulate_dtype).number
    options.offload = string(",".join(arguments.names("offload", offload)))
    if profile is not None:
        path = "" if isinstance(profile, Mapping) else arguments.path("profile", profile)
        text = "file:" + os.fspath(path) if path else json.dumps(dict(profile))
        if path and not _text_of(path).strip():
            raise InvalidArgument(f"profile {profile!r}: the file is empty; whale.profile and whale.probe give what belongs there", "INVALID_ARGUMENT")
        options.profile = string(text)
    options.no_overlap, options.no_fusion = int(not overlap), int(not fusion)
    objectives = ("throughput", "price")
    options.objective = objectives.index(arguments.choice("objective", objective, objectives))
    options.most_price = arguments.number("budget", budget, 0)
    options.least_throughput = arguments.number("min_throughput", min_throughput, 0)
    options.search_seconds = arguments.number("search_seconds", search_seconds, 0)
    options.ranks = world.size if world is not None else 1
    options.present = string(present.to_dict()["strategy"] if isinstance(present, Plan) else arguments.text("present", present))
    cancel = make("whale_cancel_release", lib.whale_cancel_create)
    options.cancel, options.timeout_seconds = cancel.pointer, arguments.number("timeout", timeout, 0)
    options.keep = keep, names, shares, batches
    return cluster, options, cancel


class Interrupted(KeyboardInterrupt):
    """Ctrl-C while ``Job.step`` or ``Job.eval`` ran. The job is whole and can go on.

    applied: whether the step was made (parameters, optimizer state and counters are those after it) or not (all are those
    before it). iteration: of the job now, what ``job.iteration`` says; the batch to go on with."""

    def __init__(self, message: str, applied: bool, iteration: int):
        super().__init__(message)
        self.applied, self.iteration = applied, iteration


class Job:
    """A plan on real devices. One thread at a time. In a ``world`` of several ranks, which all make its calls, it has the devices that are this one's.

    Ctrl-C during a step raises ``whale.Interrupted``, a KeyboardInterrupt that says whether the step was applied: until the
    first variable is written it stops the step and leaves the job as before it, from then on the step completes. A
    KeyboardInterrupt that is no ``Interrupted`` came before the step began or after it had returned. docs/promises.md."""

    def __init__(self, plan: Plan, handle: Handle, world: World | None):
        self.plan = plan
        self._handle = handle
        self._world = world
        self._variables: list[Variable] | None = None
        self._inputs: dict[str, dict[str, DType]] = {}
        self._outputs: dict[str, list[str]] = {}
        self._batch_dims = {port.name: port.batch_dim for port in self.inputs()}
        self._numbers: dict[str, tuple[dict[str, int], dict[str, int]]] = {}  # of inputs and outputs, by entry
        for name in ("train", "eval"):
            inputs, outputs = ([(number, port) for number, port in enumerate(ports) if getattr(port, f"in_{name}")]
                               for ports in (self.inputs(), self.outputs()))
            if outputs:
                self._inputs[name] = {port.name: port.dtype for _, port in inputs}
                self._outputs[name] = [port.name for _, port in outputs]
                self._numbers[name] = ({port.name: number for number, port in inputs}, {port.name: number for number, port in outputs})
        self._sizes: set[tuple] = set()  # of batches that have been run
        self._beside_now: Future | None = None  # the last save or load beside the caller
        self._tracing = False
        self._runs = 0

    def inputs(self) -> list[Port]:
        """What steps and evaluations are given."""
        return [records.port(self._handle.pointer, "input", i) for i in range(lib.whale_session_input_count(self._handle.pointer))]

    def outputs(self) -> list[Port]:
        """What can be fetched."""
        return [records.port(self._handle.pointer, "output", i) for i in range(lib.whale_session_output_count(self._handle.pointer))]

    def entries(self) -> list[Entry]:
        """The batch sizes that are planned, the newest last: the plan's, those of ``prepare``, and up to 16 that runs planned."""
        return records.entries("session", self._handle.pointer)

    def memory(self, device: int) -> Memory:
        """Bytes that the job has taken on one device of the plan; gradients and inputs are those of the last run."""
        return records.memory("session", self._handle.pointer, arguments.integer("device", device, 0))

    def refuse(self, error: BaseException) -> None:
        """Instead of the next call that all ranks of a world make (step, eval, read, save, load), where this one cannot make it: the others'
        call ends with ``error``'s words and this rank, and the calls behind it meet as ever. What these calls raise themselves, and a
        ``whale.data.Loader`` of this job, the others have been told already. Without other ranks it does nothing."""
        code = getattr(_abi, f"WHALE_{getattr(error, 'code', '')}", _abi.WHALE_ABORTED)
        text = str(error) if isinstance(error, WhaleError) else f"{type(error).__name__}: {error}"
        check(lib.whale_session_refuse(self._handle.pointer, code, string(text)))

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """What is raised inside, before libwhale's call, is told to the other ranks, which make that call."""
        try:
            yield
        except Exception as error:
            with contextlib.suppress(WhaleError):  # closed, or at work: nobody waits for this call
                self.refuse(error)
            raise

    def _run(self, entry: str, function, feeds: Mapping[str, Any], fetch: Sequence[str] | None, finish) -> Any:
        """Runs an entry; returns finish({name: array})."""
        with self._telling():
            expected = self._inputs.get(entry)
            if expected is None:
                raise FailedPrecondition(f"this plan has no '{entry}' entry: the graph does not call minimize()", "FAILED_PRECONDITION")
            unknown = [name for name in feeds if name not in expected]
            if unknown:
                raise InvalidArgument(f"no such input: '{arguments.brief(unknown[0])}'; the inputs are {', '.join(map(repr, expected))}",
                                      "INVALID_ARGUMENT")
            feeds, batch, same = gathered(feeds, self._batch_dims)
            if batch is not None:
                function = functools.partial(_run_slices, _abi.WHALE_RUN_STEP if entry == "train" else _abi.WHALE_RUN_EVAL, batch)
            tensors = [view(fit(name, value, expected[name]), expected[name]) for name, value in feeds.items()]
            numbers, fetched = self._numbers[entry]
            for name in fetch:
                if name not in fetched:
                    raise InvalidArgument(f"there is no output '{arguments.brief(name)}'; the plan has: {', '.join(fetched)}. Others are fetched by "
                                          "naming them when the plan is made", "INVALID_ARGUMENT")
            inputs = (c_int32 * max(1, len(feeds)))(*(numbers[name] for name in feeds))
            given = (c_void_p * max(1, len(feeds)))(*(tensor.pointer for tensor in tensors))
            wanted = (c_int32 * max(1, len(fetch)))(*(fetched[name] for name in fetch))
            outputs = (c_void_p * max(1, len(fetch)))()
            if self._beside_now is not None and not self._beside_now.done():  # `iteration` would wait for it
                raise FailedPrecondition("a save or a load of this job is under way; ask its future for the result first", "FAILED_PRECONDITION")
        cancel = make("whale_cancel_release", lib.whale_cancel_create)
        before, event, done = self.iteration, c_void_p(), c_int32(0)
        try:  # whenever Ctrl-C comes from here on, what is raised says what became of the step
            try:
                if same:
                    check(lib.whale_session_same(self._handle.pointer, same))
                start = lambda: check(function(self._handle.pointer, inputs, given, len(feeds), wanted, outputs, len(fetch), cancel.pointer,
                                               byref(event)))
                sizes = (entry, batch, *(tuple(getattr(value, "shape", ())) for value in feeds.values()))
                if sizes in self._sizes:
                    start()
                else:  # a batch of a new size is planned first, which takes a while
                    interruptible(start, cancel.pointer)
                    self._sizes.add(sizes)
                while not done.value:  # short waits, so that Ctrl-C is seen
                    check(lib.whale_event_wait(event, c_double(0.1), byref(done)))
                values = {}
                for i, name in enumerate(fetch):
                    pointer, outputs[i] = outputs[i], None
                    values[name] = widened(Handle(pointer, "whale_tensor_release"))
                result = finish(values)
                self._runs += 1
            except BaseException:
                lib.whale_cancel_trigger(cancel.pointer)
                raise
            finally:
                lib.whale_event_release(event)  # waits for the run when it has not ended
                for pointer in outputs[:len(fetch)]:
                    lib.whale_tensor_release(pointer)
            return result
        except KeyboardInterrupt:
            now = self.iteration  # waits too
            raise Interrupted(_interrupted(entry, now, now != before), now != before, now) from None

    def step(self, fetch: Sequence[str] = (), /, **inputs: Any) -> Any:
        """One training step on a batch; returns the loss, a float: the one before the update.

        Inputs by name: numpy arrays or anything with DLPack, whole batches, or all of them ``whale.Local``: what this rank's devices read of
        one. A smaller last batch is legal: means are over its own samples; numbers written
        into the model (``x.shape[0]``, ``1 / 8``) and fills that no op lays along samples stay. It is refused (``Unimplemented``) where samples
        meet before the loss other than by a sum, mean or maximum: ``a @ b.T`` of two batches, a softmax over the batch.

        With ``fetch``, returns ``(loss, {name: array})``: graph outputs and names given to ``whale.plan(fetch=...)``, whole batch, in
        sample order; what a plan computes in bfloat16 comes as float32."""
        with self._telling():
            fetch = arguments.names("fetch", fetch)

        def finish(values: dict[str, np.ndarray]) -> Any:
            loss = float(np.asarray(values["loss"], np.float64))
            return (loss, {name: values[name] for name in fetch}) if fetch else loss

        return self._run("train", lib.whale_session_step, inputs, fetch if "loss" in fetch else ["loss", *fetch], finish)

    def eval(self, fetch: Sequence[str] | None = None, /, **inputs: Any) -> dict[str, np.ndarray]:
        """The forward pass on the current parameters: dropout off, running statistics used, nothing updated. Inputs as of ``step``.

        Returns {name: array}; fetch None: every output, without the loss when not all inputs are given. InvalidArgument when an
        output needs an input that is missing."""
        if fetch is None:
            fetch = self._outputs.get("eval", [])
            if len(inputs) < len(self._inputs.get("eval", {})):
                fetch = [name for name in fetch if name != "loss"]
        with self._telling():
            fetch = arguments.names("fetch", fetch)
        return self._run("eval", lib.whale_session_eval, inputs, fetch, lambda values: values)

    def slices(self, batch: int | None = None, *, run: str = "train") -> dict[str, list[tuple[slice, ...]]]:
        """What this rank's devices read of each input in a step (run "eval": an evaluation) of ``batch`` samples on all ranks together, None: the
        graph's own: ``whole[box]`` for each ``box`` of the input's list, in the order of their samples. No process needs to read more of its data.
        ``job.step(x=whale.Local([x[box] for box in job.slices()["x"]]))`` gives it to a step.

        Several boxes of one input are different ranges of samples, as a replica has them of several micro-batches; in other dimensions they are
        alike, and less than all where a ``split`` by height or sequence reads no more. An empty list: this rank's devices read nothing of the
        input. In a world of one, or without a world: everything. A size that is not planned yet is planned, as by a step."""
        arguments.choice("run", run, list(self._numbers))
        number = {"train": _abi.WHALE_RUN_STEP, "eval": _abi.WHALE_RUN_EVAL}[run]
        samples = 0 if batch is None else arguments.integer("batch", batch, 1)
        return {port: records.slices(self._handle.pointer, number, samples, index) for port, index in self._numbers[run][0].items()}

    def prepare(self, *, train_batches: Sequence[int] = (), eval_batches: Sequence[int] = ()) -> None:
        """Plans what runs of other batch sizes need, so that they plan nothing. train_batches: of steps, at most the plan's. eval_batches: of
        evaluations. What is there already is left, and where one cannot be made those before it stay. The largest of each come first, whose memory
        serves the others. In a world every rank prepares by itself what all will run."""
        cancel = make("whale_cancel_release", lib.whale_cancel_create)
        wanted = [(_abi.WHALE_RUN_STEP, arguments.shape("train_batches", train_batches, 1)),
                  (_abi.WHALE_RUN_EVAL, arguments.shape("eval_batches", eval_batches, 1))]
        for run, sizes in wanted:
            for size in sorted(sizes, reverse=True):
                interruptible(lambda: check(lib.whale_session_prepare(self._handle.pointer, run, size, cancel.pointer)), cancel.pointer)

    def read(self, name: str, copy: int = 0) -> np.ndarray:
        """A variable by name: a parameter, a running statistic, or optimizer state as ``"PARAMETER/STATE"``.

        ``copy``: which of the copies that the devices hold, for checking that they agree; ``variables()`` lists the devices that
        each is read from. InvalidArgument when there is no such copy. In a world all ranks read alike, and every one gets the whole."""
        with self._telling():
            wanted, number = string(arguments.text("name", name)), c_int64(arguments.integer("copy", copy, 0))
        if self._world is None:
            return numpy_of(make("whale_tensor_release", lib.whale_session_read_copy, self._handle.pointer, wanted, number, None))
        cancel = make("whale_cancel_release", lib.whale_cancel_create)
        read = functools.partial(make, "whale_tensor_release", lib.whale_session_read_copy, self._handle.pointer, wanted, number, cancel.pointer)
        return numpy_of(interruptible(read, cancel.pointer))

    def write(self, name: str, value: Any) -> None:
        """Replaces a variable on every device."""
        arguments.text("name", name)
        dtype = next((each.dtype for each in self.variables() if each.name == name), None)
        if dtype is None:
            raise NotFound(f"no such variable: '{name}'; job.variables() lists them", "NOT_FOUND")
        tensor = view(fit(name, value, dtype), dtype)
        check(lib.whale_session_write(self._handle.pointer, string(name), tensor.pointer))

    def variables(self) -> list[Variable]:
        """All variables, in the order of the plan."""
        pointer = self._handle.pointer
        if self._variables is None:  # they stay as they are
            self._variables = [records.variable(pointer, i) for i in range(lib.whale_session_variable_count(pointer))]
        return list(self._variables)

    def parameters(self) -> dict[str, np.ndarray]:
        """Every parameter by name."""
        return {each.name: self.read(each.name) for each in self.variables() if each.role == "parameter"}

    def _answer(self, function) -> Any:
        """Of a function without a status, where a negative number means that there is no answer: asking for the report says why."""
        value = function(self._handle.pointer)
        if value < 0:
            self.report()
        return value

    @property
    def learning_rate(self) -> float:
        """Of the next step. Setting it fixes it; set it to None to follow the schedule again."""
        return self._answer(lib.whale_session_learning_rate)

    @learning_rate.setter
    def learning_rate(self, value: float | None) -> None:
        rate = -1.0 if value is None else arguments.number("learning_rate", value, *RANGES["learning_rate"])
        check(lib.whale_session_set_learning_rate(self._handle.pointer, rate))

    @property
    def iteration(self) -> int:
        """Steps made, also those whose update was skipped."""
        return self._answer(lib.whale_session_iteration)

    @property
    def updates(self) -> int:
        """Updates made: what the learning rate's schedule and Adam's bias correction count."""
        return self._answer(lib.whale_session_updates)

    def save(self, directory: str | os.PathLike) -> None:
        """Writes a checkpoint: ``directory`` with ``model.safetensors``, ``optimizer.safetensors`` and ``whale.json``.

        Whatever fails or dies, the directory holds the previous checkpoint or the new one, whole. Nothing else in it is touched;
        it may be the working directory. While another save of this directory is under way, in any thread or process, this one
        raises Aborted and does nothing. Null devices hold no values: FailedPrecondition, and what is there stays. Ctrl-C leaves the previous one.

        In a world all ranks save alike, into one directory that all of them see; each writes files of its own beside one ``whale.json``, and
        any plan of any number of ranks loads them. What fails on one rank is raised on all, with its ``rank``.
        """
        with self._telling():
            path = _target(directory)
        self._completed(lib.whale_session_save_async, path)

    def save_async(self, directory: str | os.PathLike) -> Future[None]:
        """``save`` to ``directory`` beside the caller. Until it has ended a step, an evaluation, ``prepare``, a save or a load of this job is FailedPrecondition;
        what reads or writes variables and counters waits for it, ``close`` too. Cancelled it leaves the previous checkpoint."""
        with self._telling():
            path = _target(directory)
        return self._beside(lib.whale_session_save_async, path, lambda _: None)

    def _completed(self, function, path: str) -> None:
        cancel = make("whale_cancel_release", lib.whale_cancel_create)
        event = make("whale_event_release", function, self._handle.pointer, string(path), cancel.pointer)
        interruptible(lambda: check(lib.whale_event_wait(event.pointer, c_double(-1), byref(c_int32()))), cancel.pointer)

    def _beside(self, function, path: str, finish) -> Future:
        cancel = make("whale_cancel_release", lib.whale_cancel_create)
        self._beside_now = Future(make("whale_event_release", function, self._handle.pointer, string(path), cancel.pointer), cancel, finish)
        return self._beside_now

    def load(self, directory: str | os.PathLike) -> None:
        """Restores parameters, optimizer state, counters and seed from ``directory``, saved under any plan of the same model.

        Every byte is checked before anything changes: a damaged checkpoint raises DataLoss that names file and
        tensor. A load beside a save sees one checkpoint or the other. Those of older libwhales have no checksums: a warning.
        State that another optimizer made is InvalidArgument; ``inspect_checkpoint`` and ``report()["loaded"]`` name it as ``optimizer``.
        Where the checkpoint holds optimizer state and this plan's optimizer keeps none, the state is left out, and a warning says so;
        ``report()["loaded"]["left_out"]`` names it, also for plans that are not trained. Weights of ``SGD(split_master_weights=True)``, which are in two
        halves, load into whole ones and the other way round, to the bit. In a world all ranks load alike, each what its devices need; what fails
        on one is raised on all, and leaves them as they were.
        """
        with self._telling():
            path = arguments.path("directory", directory)
        self._completed(lib.whale_session_load_async, path)
        self._warn_of_loaded(path)

    def load_async(self, directory: str | os.PathLike) -> Future[None]:
        """``load`` from ``directory`` beside the caller, as ``save_async``. Cancelled it leaves the job as it was. ``result()`` gives the warnings."""
        with self._telling():
            path = arguments.path("directory", directory)
        me = weakref.ref(self)

        def finish(_: Handle) -> None:
            job = me()
            if job is not None and not job._handle.closed:
                job._warn_of_loaded(path, 6)

        return self._beside(lib.whale_session_load_async, path, finish)

    def _warn_of_loaded(self, path: str, stacklevel: int = 3) -> None:
        loaded = self.report()["loaded"]
        if loaded["directory"] != path:  # another has been loaded since
            return
        if loaded["left_out"] and "train" in self._inputs:
            warnings.warn(f"'{path}' holds optimizer state{' of ' + loaded['optimizer'] if loaded['optimizer'] else ''} ({len(loaded['left_out'])} tensors, such as '{loaded['left_out'][0]}') and the "
                          "optimizer of this plan keeps none: it was left out, and what this job saves is without it. Plan with the "
                          "optimizer that the checkpoint was trained with to go on with it", stacklevel=stacklevel)
        if not loaded["checksums"]:
            warnings.warn(f"'{path}' was saved by an older libwhale and has no checksums: a changed byte in it would "
                          "not have been noticed. Save it again to have them", stacklevel=stacklevel)

    def trace(self, enable: bool = True) -> None:
        """Records when each instruction runs, from the next step on; enable False: no longer."""
        check(lib.whale_session_trace(self._handle.pointer, int(arguments.flag("enable", enable))))
        self._tracing = enable

    @contextlib.contextmanager
    def profile(self) -> Iterator[Profile]:
        """Records the last step or evaluation inside of its block: ``with job.profile() as profile: job.step(...)``, then ``profile.show()``,
        which a notebook shows, or ``profile.report("r.html")``: the measured timeline beside the predicted one. ``profile.trace("t.json")`` writes it for a
        trace viewer. In a world of several processes each records its own devices: ``Plan.report`` takes the files of all."""
        before, runs, profile = self._tracing, self._runs, Profile(self.plan)
        self.trace()
        try:
            yield profile
            if runs == self._runs:
                raise FailedPrecondition("nothing ran inside of the block of job.profile(): there is no timeline", "FAILED_PRECONDITION")
            profile._timeline = self.timeline()
        finally:
            if not self._handle.closed:
                self.trace(before)

    def timeline(self) -> str:
        """The last traced step as Chrome trace JSON: open it at ui.perfetto.dev."""
        return take_text(lib.whale_session_timeline_json, self._handle.pointer)

    def report(self) -> dict:
        """Bytes by class for each device, and the seconds of the last step in ops, collectives and waiting. In a world of several
        processes ``message_bytes`` are what this one keeps for messages of others, beside what the plan takes."""
        return json.loads(take_text(lib.whale_session_report_json, self._handle.pointer))

    def flight_record(self) -> dict:
        """What each queue of this process's devices is at, what it waits for, and its last instructions with their times. From any
        thread, also while a step is under way that does not end. ``json.dump`` it to a file, and ``whale inspect`` shows it."""
        return json.loads(take_text(lib.whale_session_flight_record_json, self._handle.pointer))

    def close(self) -> None:
        """Stops the devices and frees their memory; also done when the job is collected."""
        self._handle.close()

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _run_slices(run: int, batch: int, session: int, *rest: Any) -> int:
    return lib.whale_session_run_slices(session, run, batch, *rest)


def _target(directory: str | os.PathLike) -> str:
    path = arguments.path("directory", directory)
    if os.path.islink(path) and not os.path.exists(path):
        raise arguments.wrong("directory", directory, "a directory or a new name: it is a link that leads nowhere")
    return path


def _interrupted(entry: str, iteration: int, applied: bool) -> str:
    if entry != "train":
        return "the evaluation was interrupted; it changes nothing"
    if applied:
        return f"the step had begun to update and was completed: it is applied, and the job stands before step {iteration}"
    return f"the step was interrupted before it changed anything: it is not applied, and the job stands before step {iteration}"


def _text_of(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()


def probe(devices: str | None = None, *, world: World | None = None) -> dict:
    """Measures devices, and what is between them, all at once: some seconds. ``devices``: as of ``whale.plan``, cpu and ref ones; in a world those of
    all ranks, which call it alike, and each gets the same.

    ``devices``: of each ``flops_per_second`` (by dtype and size of a square product), ``bytes_per_second``, ``host``; ``links``
    of all pairs: ``from``, ``to``, ``bytes_per_second``, ``latency_seconds``; ``gather``, of all devices; ``profile``: figures for
    ``whale.plan(profile=...)``, which takes all of it too. docs/profiles.md."""
    if world is not None:
        devices = devices or f"cpu:{arguments.instance('world', world, World, 'a whale.World').size}"
    cluster = make("whale_cluster_release", lib.whale_cluster_create, engine(), string(arguments.text("devices", devices or "cpu:1")))
    cancel = make("whale_cancel_release", lib.whale_cancel_create)
    return json.loads(interruptible(lambda: take_text(lib.whale_engine_probe_json, engine(), cluster.pointer,
                                                      None if world is None else world._handle.pointer, cancel.pointer), cancel.pointer))


def profile(graph: Graph, devices: str | None = None, *, samples: Sequence[int] = (), seconds: float = 1, precision: str | None = None) -> dict:
    """Runs steps of the model on each device by itself, all at once, and gives what its ops took: for ``whale.plan(profile=...)``, which takes it
    as a dictionary or as a file of it. ``devices`` and ``precision`` as ``whale.plan`` has them; ``samples``: local batches; none: the graph's own, a half,
    a quarter of it, and so on; ``seconds``: of each. docs/profiles.md."""
    cluster, planning, cancel = _planning(graph, devices, precision=precision)
    sizes = arguments.shape("samples", samples, 1)
    batches = (ctypes.c_int64 * max(1, len(sizes)))(*sizes)
    duration = arguments.number("seconds", seconds, 0)
    return json.loads(interruptible(lambda: take_text(lib.whale_engine_profile_json, engine(), graph._pointer, cluster.pointer, byref(planning),
                                                      batches, len(sizes), duration), cancel.pointer))


def import_profile(path: str | os.PathLike, device: str = "") -> dict:
    """What others measured, as ``whale.profile`` gives it: a file of Sailor's or Metis's, or a table of ops. ``device``: the device type whose times
    they are, where the file's name does not say."""
    return json.loads(take_text(lib.whale_engine_profile_import_json, engine(), string(os.fspath(path)), string(arguments.text("device", device))))


def devices() -> list[dict]:
    """The back ends: whether each can be opened, and if not, why."""
    return json.loads(take_text(lib.whale_engine_devices_json, engine()))


def drain_log() -> list[dict]:
    """What the engine did and noticed since this was asked last (plans and their notes, jobs, checkpoints, changes of the loss scale), oldest
    first: ``severity`` ("info" or "warning"), ``nanoseconds`` since 1970, ``topic``, ``message``. Of more than 1,000 the oldest are dropped.
    Nothing is printed by the engine."""
    log, rows = make("whale_log_release", lib.whale_engine_drain_log, engine()), []
    for index in range(lib.whale_log_count(log.pointer)):
        record = _abi.whale_log_record(struct_size=ctypes.sizeof(_abi.whale_log_record))
        check(lib.whale_log_get(log.pointer, index, byref(record)))
        rows.append({"severity": "warning" if record.severity == _abi.WHALE_SEVERITY_WARNING else "info", "nanoseconds": record.nanoseconds,
                     "topic": text_of(record.topic), "message": text_of(record.message)})
    return rows
