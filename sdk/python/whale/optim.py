"""Optimizers and learning-rate schedules: what ``Graph.minimize`` is given. The update itself is ops of the graph."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

from . import _abi


@dataclass(frozen=True)
class Schedule:
    """A learning rate over updates: linear warm-up, then ``kind``'s decay until ``total_steps``, down to ``final`` of the peak.

    kind: "constant", "linear", "cosine" or "inverse_sqrt"."""

    kind: str = "constant"
    warmup: int = 0
    total_steps: int = 0
    final: float = 0.0


_SCHEDULES = {"constant": _abi.WHALE_LR_CONSTANT, "linear": _abi.WHALE_LR_LINEAR, "cosine": _abi.WHALE_LR_COSINE,
              "inverse_sqrt": _abi.WHALE_LR_INVERSE_SQRT}


def cosine(total_steps: int, warmup: int = 0, final: float = 0.0) -> Schedule:
    return Schedule("cosine", warmup, total_steps, final)


def linear(total_steps: int, warmup: int = 0, final: float = 0.0) -> Schedule:
    return Schedule("linear", warmup, total_steps, final)


@dataclass(frozen=True)
class Optimizer:
    """The base of all optimizers."""

    learning_rate: float = 1e-3

    def _fields(self) -> dict:
        return {}

    def options(self) -> _abi.whale_training_options:
        schedule = getattr(self, "schedule", Schedule())
        if schedule.kind not in _SCHEDULES:
            raise ValueError(f"no such schedule: {schedule.kind!r}; there are {', '.join(_SCHEDULES)}")
        values = dict(beta1=0.9, beta2=0.999, epsilon=1e-8, decay_rate=-0.8, clip_threshold=1.0, accumulation=1,
                      learning_rate=self.learning_rate, schedule=_SCHEDULES[schedule.kind], warmup_steps=schedule.warmup,
                      total_steps=schedule.total_steps, final_fraction=schedule.final)
        values.update(self._fields())
        return _abi.whale_training_options(struct_size=ctypes.sizeof(_abi.whale_training_options), **values)


@dataclass(frozen=True)
class SGD(Optimizer):
    """p -= lr (g + weight_decay p), with momentum m = momentum m + g, and Nesterov's form of it.

    lazy: of an embedding table, only the rows that the step looked up are decayed and updated; its gradient is never made as a whole.
    split: for precision "bf16" without momentum: the fp32 weight in two halves. The high half is the model's bf16 weight, the low half is
    optimizer state ("<name>/low"); the memory is that of fp32 alone and the updates are those of fp32 (Kalamkar et al., 2020)."""

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    schedule: Schedule = field(default_factory=Schedule)
    lazy: bool = False
    split: bool = False

    def _fields(self) -> dict:
        return dict(optimizer=_abi.WHALE_OPTIMIZER_SGD, momentum=self.momentum, nesterov=int(self.nesterov),
                    weight_decay=self.weight_decay, lazy=int(self.lazy), split=int(self.split))


@dataclass(frozen=True)
class _AdamFamily(Optimizer):
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    schedule: Schedule = field(default_factory=Schedule)
    _kind = _abi.WHALE_OPTIMIZER_ADAM

    def _fields(self) -> dict:
        return dict(optimizer=self._kind, beta1=self.betas[0], beta2=self.betas[1], epsilon=self.epsilon,
                    weight_decay=self.weight_decay, lazy=int(getattr(self, "lazy", False)))


@dataclass(frozen=True)
class Adam(_AdamFamily):
    """Adam (Kingma & Ba, 2015), bias-corrected; weight decay is added to the gradient. lazy: as in SGD."""

    lazy: bool = False


@dataclass(frozen=True)
class AdamW(_AdamFamily):
    """Adam with decoupled weight decay (Loshchilov & Hutter, 2019). lazy: as in SGD."""

    weight_decay: float = 0.01
    lazy: bool = False
    _kind = _abi.WHALE_OPTIMIZER_ADAMW


@dataclass(frozen=True)
class Lamb(_AdamFamily):
    """LAMB (You et al., 2020): Adam's direction scaled by the ratio of norms of each parameter."""

    epsilon: float = 1e-6
    _kind = _abi.WHALE_OPTIMIZER_LAMB


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """Adagrad (Duchi et al., 2011): p -= lr g / (sqrt(sum of g^2) + epsilon). lazy: as in SGD."""

    epsilon: float = 1e-10
    weight_decay: float = 0.0
    schedule: Schedule = field(default_factory=Schedule)
    lazy: bool = False

    def _fields(self) -> dict:
        return dict(optimizer=_abi.WHALE_OPTIMIZER_ADAGRAD, epsilon=self.epsilon, weight_decay=self.weight_decay,
                    lazy=int(self.lazy))


@dataclass(frozen=True)
class Adafactor(Optimizer):
    """Adafactor (Shazeer & Stern, 2018): factored second moments for matrices, update clipped by its RMS."""

    epsilon: float = 1e-30
    decay_rate: float = -0.8
    clip_threshold: float = 1.0
    weight_decay: float = 0.0
    schedule: Schedule = field(default_factory=Schedule)

    def _fields(self) -> dict:
        return dict(optimizer=_abi.WHALE_OPTIMIZER_ADAFACTOR, epsilon=self.epsilon, decay_rate=self.decay_rate,
                    clip_threshold=self.clip_threshold, weight_decay=self.weight_decay)
