"""What a rank gives of a batch, when it does not give all of it."""

from __future__ import annotations

from typing import Any, Mapping

import numpy as np

from . import arguments
from ._library import InvalidArgument
from .arrays import as_numpy


class Local:
    """In place of an input's whole batch: what this rank's devices read of it, ``job.slices()`` says which boxes.

    parts: a list of arrays, one a box, or one array that holds them one behind the other along the dimension that counts samples. batch: samples on
    all ranks together, the same for all inputs of a step; None: the graph's own. All inputs of a step that count samples are ``Local``, or none
    is; one of which this rank reads nothing may be left out. The result is that of whole batches, bit by bit."""

    def __init__(self, parts: Any, batch: int | None = None):
        self.parts = list(parts) if isinstance(parts, (list, tuple)) else parts
        self.batch = 0 if batch is None else arguments.integer("batch", batch, 1)
        self._same = 0  # which batch it is of, as a loader numbers them; 0: nobody says

    def array(self, dim: int) -> np.ndarray:
        """All parts along ``dim``, without a copy where there is one."""
        if not isinstance(self.parts, list):
            return self.parts
        return self.parts[0] if len(self.parts) == 1 else np.concatenate([as_numpy(part) for part in self.parts], dim)

    def __repr__(self) -> str:
        shapes = [tuple(np.shape(part)) for part in (self.parts if isinstance(self.parts, list) else [self.parts])]
        return f"<whale.Local: {shapes} of a batch of {self.batch or 'the graph'}>"


def gathered(feeds: Mapping[str, Any], batch_dims: Mapping[str, int]) -> tuple[dict[str, Any], int | None, int]:
    """The arrays of a run's inputs; the samples of the batch that they hold slices of (0: the graph's own), None: they are whole; and which batch it is,
    0: nobody says."""
    local = {name: value for name, value in feeds.items() if isinstance(value, Local)}
    if not local:
        return dict(feeds), None, 0
    batch = next(iter(local.values())).batch
    said = {value._same: name for name, value in local.items() if value._same}
    if len(said) > 1:
        raise InvalidArgument(f"{' and '.join(map(repr, said.values()))} are of different batches of a loader: give all inputs of one", "INVALID_ARGUMENT")
    for name, value in feeds.items():
        if name not in local and batch_dims[name] >= 0:
            raise InvalidArgument(f"'{name}' is a whole batch, and '{next(iter(local))}' is whale.Local: give all inputs alike", "INVALID_ARGUMENT")
        if name in local and value.batch != batch:
            raise InvalidArgument(f"'{name}' is of a batch of {value.batch or 'the graph'}, '{next(iter(local))}' of one of {batch or 'the graph'}",
                                  "INVALID_ARGUMENT")
    return {name: value.array(max(0, batch_dims[name])) if name in local else value for name, value in feeds.items()
            if name not in local or not isinstance(value.parts, list) or value.parts}, batch, next(iter(said), 0)
