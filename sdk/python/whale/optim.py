"""Optimizers and learning-rate schedules: what ``Graph.minimize`` is given. The update itself is ops of the graph."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

from . import _abi, arguments, renamed


@dataclass(frozen=True)
class LRSchedule:
    """A learning rate over updates: linear warm-up from 0, then ``kind``'s decay until ``total_steps``, down to ``final`` of the peak.

    kind: "constant", "linear", "cosine" or "inverse_sqrt". warmup: updates. total_steps: updates, warm-up included; linear and
    cosine need it, the others have none. final: 0 to 1; of all but constant."""

    kind: str = "constant"
    warmup: int = 0
    total_steps: int = 0
    final: float = 0.0

    def __post_init__(self) -> None:
        arguments.choice("kind", self.kind, _LR_SCHEDULES)
        arguments.integer("warmup", self.warmup, 0)
        arguments.integer("total_steps", self.total_steps, 0)
        arguments.number("final", self.final, 0, 1)
        ends = self.kind in ("linear", "cosine")
        if ends and self.total_steps <= self.warmup:
            raise arguments.wrong("total_steps", self.total_steps, f"more than the {self.warmup} updates of the warm-up: a {self.kind} schedule ends there")
        if not ends and self.total_steps:
            raise arguments.wrong("total_steps", self.total_steps, f"0: a schedule of kind '{self.kind}' has no end")
        if self.kind == "constant" and self.final:
            raise arguments.wrong("final", self.final, "0: a constant schedule does not decay")


_LR_SCHEDULES = {"constant": _abi.WHALE_LR_CONSTANT, "linear": _abi.WHALE_LR_LINEAR, "cosine": _abi.WHALE_LR_COSINE,
              "inverse_sqrt": _abi.WHALE_LR_INVERSE_SQRT}


def cosine(total_steps: int, warmup: int = 0, final: float = 0.0) -> LRSchedule:
    """Linear warm-up over ``warmup`` updates, then half a cosine down to ``final`` of the peak at update ``total_steps``."""
    return LRSchedule("cosine", warmup, total_steps, final)


def linear(total_steps: int, warmup: int = 0, final: float = 0.0) -> LRSchedule:
    """Linear warm-up over ``warmup`` updates, then a line down to ``final`` of the peak at update ``total_steps``."""
    return LRSchedule("linear", warmup, total_steps, final)


# What a number of an optimizer may be.
RANGES = {"learning_rate": (0, 1e30), "momentum": (0, 1), "epsilon": (0, 1e30), "weight_decay": (0, 1e30), "decay_rate": (-1e30, 0),
           "clip_threshold": (0, 1e30)}
_RENAMED = {"schedule": "lr_schedule", "lazy": "sparse_updates", "split": "split_master_weights"}
_FLAGS = ("nesterov", "sparse_updates", "split_master_weights")
_ZEROS = {"learning_rate": _abi.WHALE_ZERO_LEARNING_RATE, "beta1": _abi.WHALE_ZERO_BETA1, "beta2": _abi.WHALE_ZERO_BETA2,
          "epsilon": _abi.WHALE_ZERO_EPSILON, "decay_rate": _abi.WHALE_ZERO_DECAY_RATE}


@dataclass(frozen=True)
class Optimizer:
    """The base of all optimizers. learning_rate: the peak of ``lr_schedule``, which is constant unless given. weight_decay: of parameters
    of rank >= 2, unless ``whale.parameter(decay=...)`` says otherwise."""

    learning_rate: float = 1e-3

    def __new__(cls, *args: object, **given: object):
        renamed.refuse(cls.__name__, given, _RENAMED)
        return super().__new__(cls)

    def __getattr__(self, name: str) -> object:
        raise renamed.attribute(type(self).__name__, name, _RENAMED)

    def __post_init__(self) -> None:
        if type(self) in (Optimizer, _AdamFamily):
            raise TypeError("Optimizer is the base of SGD, Adam, AdamW, Lamb, Adagrad and Adafactor; use one of these")
        for name, (low, high) in RANGES.items():
            if hasattr(self, name):
                arguments.number(name, getattr(self, name), low, high)
        if hasattr(self, "clip_threshold"):
            arguments.positive("clip_threshold", self.clip_threshold)
        for name in _FLAGS:
            arguments.flag(name, getattr(self, name, False))
        arguments.instance("lr_schedule", getattr(self, "lr_schedule", LRSchedule()), LRSchedule, "an LRSchedule such as whale.cosine(1000, warmup=100)")
        betas = getattr(self, "betas", (0.0, 0.0))
        if not isinstance(betas, (tuple, list)) or len(betas) != 2:
            raise arguments.wrong("betas", betas, "two numbers such as (0.9, 0.999)")
        for i, beta in enumerate(betas):
            arguments.fraction(f"betas[{i}]", beta)

    def _fields(self) -> dict:
        return {}

    def options(self) -> _abi.whale_training_options:
        lr_schedule = getattr(self, "lr_schedule", LRSchedule())
        values = dict(learning_rate=self.learning_rate, lr_schedule=_LR_SCHEDULES[lr_schedule.kind], warmup_steps=lr_schedule.warmup,
                      total_steps=lr_schedule.total_steps, final_fraction=lr_schedule.final)
        values.update(self._fields())
        # What is 0 here is meant: the defaults are those of this class.
        zeros = sum(bit for name, bit in _ZEROS.items() if values.get(name) == 0)
        return _abi.whale_training_options(struct_size=ctypes.sizeof(_abi.whale_training_options), zeros=zeros, **values)


@dataclass(frozen=True)
class SGD(Optimizer):
    """p -= lr (g + weight_decay p), with momentum m = momentum m + g, then p -= lr m. nesterov: p -= lr (g + momentum m).

    sparse_updates: of an embedding table, only the rows that the step looked up (embedding, embedding_bag) are decayed and updated; its gradient is never made
    as a whole. A table that is read by gather is updated as a whole.
    An error where the model has no such table.
    split_master_weights: for precision "bfloat16" without momentum (in another precision there is nothing to split: plain SGD): the fp32 weight in two halves. The high half is the model's bf16 weight, the low half is
    optimizer state ("<name>/low"); the memory is that of fp32 alone and the updates are those of fp32 (Kalamkar et al., 2020)."""

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    lr_schedule: LRSchedule = field(default_factory=LRSchedule)
    sparse_updates: bool = False
    split_master_weights: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and not self.momentum:
            raise arguments.wrong("nesterov", self.nesterov, "a momentum with it, such as momentum=0.9: it is a form of momentum")
        if self.split_master_weights and self.momentum:
            raise arguments.wrong("split_master_weights", self.split_master_weights, f"momentum 0 with it, found {self.momentum}")

    def _fields(self) -> dict:
        return dict(optimizer=_abi.WHALE_OPTIMIZER_SGD, momentum=self.momentum, nesterov=int(self.nesterov),
                    weight_decay=self.weight_decay, sparse_updates=int(self.sparse_updates), split_master_weights=int(self.split_master_weights))


@dataclass(frozen=True)
class _AdamFamily(Optimizer):
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    lr_schedule: LRSchedule = field(default_factory=LRSchedule)
    _kind = _abi.WHALE_OPTIMIZER_ADAM

    def _fields(self) -> dict:
        return dict(optimizer=self._kind, beta1=self.betas[0], beta2=self.betas[1], epsilon=self.epsilon,
                    weight_decay=self.weight_decay, sparse_updates=int(getattr(self, "sparse_updates", False)))


@dataclass(frozen=True)
class Adam(_AdamFamily):
    """Adam (Kingma & Ba, 2015), bias-corrected; weight decay is added to the gradient. sparse_updates: as in SGD."""

    sparse_updates: bool = False


@dataclass(frozen=True)
class AdamW(_AdamFamily):
    """Adam with decoupled weight decay (Loshchilov & Hutter, 2019). A parameter that the loss does not reach is left as it is, undecayed too.
    sparse_updates: as in SGD."""

    weight_decay: float = 0.01
    sparse_updates: bool = False
    _kind = _abi.WHALE_OPTIMIZER_ADAMW


@dataclass(frozen=True)
class Lamb(_AdamFamily):
    """LAMB (You et al., 2020): Adam's direction scaled by the ratio of norms of each parameter."""

    epsilon: float = 1e-6
    _kind = _abi.WHALE_OPTIMIZER_LAMB


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """Adagrad (Duchi et al., 2011): p -= lr g / (sqrt(sum of g^2) + epsilon). sparse_updates: as in SGD."""

    epsilon: float = 1e-10
    weight_decay: float = 0.0
    lr_schedule: LRSchedule = field(default_factory=LRSchedule)
    sparse_updates: bool = False

    def _fields(self) -> dict:
        return dict(optimizer=_abi.WHALE_OPTIMIZER_ADAGRAD, epsilon=self.epsilon, weight_decay=self.weight_decay,
                    sparse_updates=int(self.sparse_updates))


@dataclass(frozen=True)
class Adafactor(Optimizer):
    """Adafactor (Shazeer & Stern, 2018): factored second moments for matrices, update clipped by its RMS.

    decay_rate: of the second moments, 1 - updates^decay_rate. clip_threshold: the largest RMS of an update. weight_decay: p -= weight_decay p
    beside each update, as ``optax.adafactor``'s weight_decay_rate: it is not multiplied by the learning rate nor follows its schedule, as in the other optimizers
    (and in the Adafactors of PyTorch and Transformers); for those, give their weight decay times the learning rate."""

    epsilon: float = 1e-30
    decay_rate: float = -0.8
    clip_threshold: float = 1.0
    weight_decay: float = 0.0
    lr_schedule: LRSchedule = field(default_factory=LRSchedule)

    def _fields(self) -> dict:
        return dict(optimizer=_abi.WHALE_OPTIMIZER_ADAFACTOR, epsilon=self.epsilon, decay_rate=self.decay_rate,
                    clip_threshold=self.clip_threshold, weight_decay=self.weight_decay)
