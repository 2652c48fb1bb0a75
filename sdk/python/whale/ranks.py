"""Worlds: the ranks that run plans together."""

from __future__ import annotations

from ctypes import byref, c_int32, c_void_p, sizeof
from typing import TYPE_CHECKING

from . import _abi, arguments
from ._library import Handle, InvalidArgument, check, engine, interruptible, lib, make, string

if TYPE_CHECKING:
    from .job import Plan


class World:
    """The ranks (processes, or parts of one) that run a plan together, seen from one of them.

    Each rank plans the same graph and starts a job of it: ``wh.plan(g, devices="cpu:4", world=world).start()``. The job holds the devices
    that are the rank's, and their parts of variables. All ranks make the same calls in the same order, each on a thread or in a process of
    its own: ``start`` (FailedPrecondition on every rank when plans, options or versions are not the same), ``step``, ``eval`` (whole
    batches, or ``Local`` of this rank's; the same outputs asked for), ``read``. What a rank fails with, or that it cancels, closes its job or runs something else, is
    raised on every rank: ``error.rank`` says whose it is.

    rank: of this one, from 0. size: how many there are. It serves any number of jobs."""

    def __init__(self, handle: Handle):
        self._handle = handle
        handle.gone = "this world is closed; make another one with whale.world()"

    @property
    def rank(self) -> int:
        return lib.whale_world_rank(self._handle.pointer)

    @property
    def size(self) -> int:
        return lib.whale_world_size(self._handle.pointer)

    def devices(self, plan: Plan) -> list[int]:
        """The devices of the plan that are this rank's, by number."""
        of, out = c_int32(), []
        for device in range(lib.whale_plan_device_count(plan._handle.pointer)):
            check(lib.whale_world_device_rank(self._handle.pointer, plan._handle.pointer, device, byref(of)))
            if of.value == self.rank:
                out.append(device)
        return out

    def close(self) -> None:
        """Leaves the other ranks, once its jobs are closed too; also done when it is collected. A process is a rank of one meeting once at a time: close
        both before ``whale.world`` is called again."""
        self._handle.close()

    def __repr__(self) -> str:
        return "<whale.World: closed>" if self._handle.closed else f"<whale.World: rank {self.rank} of {self.size}>"


def worlds(ranks: int) -> list[World]:
    """Worlds of ``ranks`` ranks in this process, by rank: each for a thread of its own. They share flat messages and nothing else, so that
    what a plan does between processes is tried without them."""
    out = (c_void_p * arguments.integer("ranks", ranks, 1, 4096))()
    check(lib.whale_world_create_inproc(ranks, out))
    return [World(Handle(pointer, "whale_world_release")) for pointer in out]


def world(rank: int | None = None, size: int | None = None, *, address: str = "", port: int = 0, token: str = "", timeout: float = 0, run_timeout: float = 0) -> World:
    """This process among those of its job, which all call it: ``world = wh.world()`` and ``wh.plan(graph, world=world)`` make a program of one
    process one of many. Waits until all are there.

    Without arguments, as its launcher says in the environment: ``whale launch``, torchrun's variables, mpirun, PMIx
    (prterun), srun; with none, it is alone.
    rank, size: of this process, where the environment does not say them. address, port: of rank 0's host, which listens there and nowhere
    else; default address: 127.0.0.1. token: a secret of the job, default: WHALE_JOB_TOKEN. timeout: seconds until a process that does not
    come, or is silent, is given up; default: WHALE_TIMEOUT, or 30. run_timeout: seconds for which nothing moves in a step (or evaluation,
    read, save), and no rank is at work, until it ends with DeadlineExceeded: a rank is there and has not called it, or what was sent does not
    arrive; default: WHALE_RUN_TIMEOUT, or 600.

    Raises DeadlineExceeded (a process has not come), Unauthenticated (another token), FailedPrecondition (another size, two of one rank, or a world that
    this process has made there before and not closed), Unavailable (no address to listen on, no UCX, no PMIx) and InvalidArgument."""
    if (rank is None) != (size is None):
        raise InvalidArgument("rank and size: give both, or none for what the environment says")
    place, secret = string(arguments.text("address", address)), string(arguments.text("token", token))
    patience, run_patience = arguments.number("timeout", timeout, 0, 1e6), arguments.number("run_timeout", run_timeout, 0, 1e6)
    options = _abi.whale_world_options(sizeof(_abi.whale_world_options), arguments.integer("rank", rank or 0, 0, 65535),
                                       arguments.integer("size", size or 0, 0, 65536), place, arguments.integer("port", port, 0, 65535), secret, patience, run_timeout_seconds=run_patience)
    cancel = make("whale_cancel_release", lib.whale_cancel_create)
    options.cancel = cancel.pointer
    return World(interruptible(lambda: make("whale_world_release", lib.whale_world_create, engine(), byref(options)), cancel.pointer))
