"""Ranks as actors of Ray: ``whale.ray.launch(train, 4)``. Ray (``pip install ray``) places them and starts their processes; ``import whale``
does not import it.

    import whale.ray

    def train(world):
        ...
        job = wh.plan(g, world=world).start()

    results = whale.ray.launch(train, num_ranks=4)
"""

from __future__ import annotations

import os
import secrets
import socket
import time
import traceback
from typing import Any, Callable, Mapping

from . import arguments
from ._library import InvalidArgument, WhaleError
from .ranks import world

try:
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as error:
    raise ImportError(f"whale.ray needs Ray ({error}): pip install ray") from error


class RankFailed(RuntimeError):
    """A rank of a launch has failed: ``rank`` says which. The exception that it raised, where it did not just die, is ``__cause__``."""

    def __init__(self, message: str, rank: int):
        super().__init__(message)
        self.rank = rank

    def __reduce__(self):
        return RankFailed, (str(self), self.rank)


def launch(fn: Callable[..., Any], num_ranks: int, *args: Any, devices_per_rank: int = 1, resources: Mapping[str, float] | None = None,
           placement: str = "PACK", timeout: float = 0, start_timeout: float = 60, grace: float = 5) -> list[Any]:
    """Runs ``fn(world, *args)`` on ``num_ranks`` ranks, each an actor of Ray, and returns what each returned, by rank. ``fn`` does the rest:
    ``wh.plan(graph, devices=..., world=world)``.

    Connects as ``ray.init()`` does, where the program has not. Python and libwhale are those of Ray's workers.

    devices_per_rank
        CPUs that Ray sets aside for each rank. The plan's devices are still the plan's own argument, of all ranks together:
        ``devices=f"cpu:{world.size * 2}"`` for two each.
    resources
        What Ray sets aside for each rank instead: ``{"CPU": 2, "GPU": 1}``.
    placement
        ``"PACK"`` (on few nodes), ``"SPREAD"`` (on many), ``"STRICT_PACK"`` (on one), ``"STRICT_SPREAD"`` (no two on one): Ray's strategies of
        placement groups.
    timeout
        Of the world (``wh.world``): seconds until a rank that is silent is given up; 0: WHALE_TIMEOUT, or 30.
    start_timeout
        Seconds that Ray has to find room for all ranks; then TimeoutError. More where a cluster grows on demand.
    grace
        Seconds to wait for the rank that failed where those that noticed are heard first.

    Raises RankFailed as soon as a rank has failed; it names that one rather than those that noticed. The others are ended: no actor is left,
    however this ends."""
    arguments.integer("num_ranks", num_ranks, 1, 65535)
    arguments.integer("devices_per_rank", devices_per_rank, 1, 65535)
    if placement not in ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"):
        raise InvalidArgument(f"placement: {placement!r}, expected PACK, SPREAD, STRICT_PACK or STRICT_SPREAD")
    if not ray.is_initialized():
        ray.init()
    bundle = dict(resources) if resources is not None else {"CPU": devices_per_rank}
    group = placement_group([bundle] * num_ranks, strategy=placement)
    actors: list[Any] = []
    try:
        if not group.wait(start_timeout):
            raise TimeoutError(f"Ray has not found room for {num_ranks} rank(s) of {bundle} each ({placement}) in {start_timeout:g} seconds; "
                               f"of {_amounts(ray.cluster_resources())} are free {_amounts(ray.available_resources())}")
        own = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU", "memory")}
        for rank in range(num_ranks):
            place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
            actors.append(ray.remote(_Rank).options(num_cpus=bundle.get("CPU", 0), num_gpus=bundle.get("GPU", 0), memory=bundle.get("memory"),
                                                    resources=own, scheduling_strategy=place, max_restarts=0).remote())
        places = [done[1] for done in _results([actor.place.remote() for actor in actors], [None] * num_ranks, grace)]
        one_node = len({node for node, *_ in places}) == 1
        address, port = _results([actors[0].meeting_place.remote(one_node)], places, grace)[0][1]
        token = secrets.token_hex(16)  # an argument, which no list of processes shows
        running = [actor.run.remote(fn, args, rank, num_ranks, address, port, token, timeout) for rank, actor in enumerate(actors)]
        return [value for _, value in _results(running, places, grace)]
    finally:
        for actor in actors:
            ray.kill(actor)
        remove_placement_group(group)


class _Rank:
    """The actor of a rank."""

    def place(self):
        return True, (ray.get_runtime_context().get_node_id(), socket.gethostname(), os.getpid())

    def meeting_place(self, one_node):
        """An address of this node, and a port that is free there."""
        address = "127.0.0.1" if one_node else ray.util.get_node_ip_address()
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.bind((address, 0))
            return True, (address, probe.getsockname()[1])

    def run(self, fn, args, rank, size, address, port, token, timeout):
        try:
            own = world(rank, size, address=address, port=port, token=token, timeout=timeout)
            return True, fn(own, *args)
        except Exception as error:
            text = f"{''.join(traceback.format_exception_only(type(error), error))}{traceback.format_exc()}"
            noticed = isinstance(error, WhaleError) and 0 <= error.rank < size and error.rank != rank
            try:
                ray.cloudpickle.loads(ray.cloudpickle.dumps(error.with_traceback(None)))
            except Exception:  # whatever a class of the user's makes of it
                error = None
            return False, (error, text, error.rank if noticed and error is not None else rank)


def _results(pending, places, grace):
    """Of the ranks, in order. Raises for the first that fails and does not point to another; where none such comes within ``grace`` seconds,
    for the one that is pointed to."""
    ranks = {reference: rank for rank, reference in enumerate(pending)}
    done, failures, until = {}, {}, None
    while len(done) + len(failures) < len(ranks):
        left = None if until is None else max(0, until - time.monotonic())
        ready, _ = ray.wait([r for r, rank in ranks.items() if rank not in done and rank not in failures], timeout=left)
        if not ready:
            break
        for reference in ready:
            rank = ranks[reference]
            try:
                worked, value = ray.get(reference)
            except ray.exceptions.RayError as error:  # its process is gone, or what it returned cannot be sent
                worked, value = False, (error, str(error), rank)
            (done if worked else failures)[rank] = (worked, value)
        if failures and until is None:
            until = time.monotonic() + grace
        if any(blamed == rank for rank, (_, (_, _, blamed)) in failures.items()):
            break
    if not failures:
        return [done[rank] for rank in range(len(ranks))]
    own = [rank for rank, (_, (_, _, blamed)) in failures.items() if blamed == rank]
    told = own[0] if own else next(iter(failures))
    error, text, blamed = failures[told][1]
    where = f" (host '{places[blamed][1]}', process {places[blamed][2]})" if places[blamed] is not None else ""
    died = isinstance(error, ray.exceptions.RayActorError)
    raise RankFailed(f"rank {blamed}{where} {'died' if died else 'failed'}: {text.strip()}", blamed) from error


def _amounts(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(resources.items()) if ":" not in name and "memory" not in name) or "nothing"
