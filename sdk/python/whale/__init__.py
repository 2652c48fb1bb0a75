"""libwhale: distributed training of a local model.

    import whale as wh
    g = wh.Graph()
    with g:
        x, y = wh.input("x", (64, 784)), wh.input("y", (64,), wh.int32)
        with wh.replica():
            loss = wh.nn.cross_entropy(wh.nn.linear(x, 10), y)
        g.minimize(loss, wh.SGD(0.1))
    job = wh.plan(g, devices="cpu:2").start(seed=0)
    loss = job.step(x=..., y=...)
"""

from . import data, display, nn, ops, renamed as _renamed
from ._library import (Aborted, AlreadyExists, Cancelled, DataLoss, DeadlineExceeded, FailedPrecondition, Internal, InvalidArgument, NotFound,
                       OutOfRange, PermissionDenied, ResourceExhausted, Unauthenticated, Unavailable, Unimplemented, WhaleError, configure, lib as _lib)
from .dtypes import bfloat16, bool_, DType, float16, float32, float64, int8, int32, int64, uint8
from .graph import (Graph, Init, Scope, Tensor, cluster, constant, from_array, from_file, input, normal, ones, parameter, pipeline, replica, scope,
                    split, stage, truncated_normal, uniform, zeros)
from .future import Future, wait_any
from .job import (Interrupted, Job, Plan, candidates, devices, drain_log, estimate, import_profile, inspect_checkpoint, plan, plan_async, predict, probe,
                  profile, validate)
from .local import Local
from .optim import SGD, Adafactor, Adagrad, Adam, AdamW, Lamb, Optimizer, LRSchedule, cosine, linear
from .progress import progress
from .ranks import World, world, worlds
from .records import Device, Entry, Memory, Port, Variable
from .report import Profile, Report

__version__: str = _lib.whale_version().decode()
load = Graph.load


def __getattr__(name: str):
    raise _renamed.module_attribute(name, {"Schedule": "LRSchedule"})
