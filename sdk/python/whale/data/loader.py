"""Batches of a dataset, of which each rank reads what its devices need."""

from __future__ import annotations

import contextlib
import hashlib
import queue
import threading
import weakref
from typing import TYPE_CHECKING, Any, Iterator, Mapping, Sequence

import numpy as np

from .. import arguments
from .._library import FailedPrecondition, InvalidArgument, WhaleError
from ..arrays import as_numpy
from ..local import Local

if TYPE_CHECKING:
    from ..job import Job


class SampleError(WhaleError):
    """A sample that the dataset did not give, or one that is not what the model wants. index: which. What the dataset raised is its __cause__."""

    def __init__(self, message: str, index: int):
        super().__init__(message, "INVALID_ARGUMENT")
        self.index = index


class Loader:
    """Batches of ``dataset`` for ``job``, without end or for some epochs: ``for batch in loader: job.step(**batch)``.

    dataset
        By input: a mapping to what has a length and gives a sample for a number (an array, ``whale.data.npy(..)``, any such object); or by
        sample: what has a length and gives a mapping with every input, or with ``names`` a tuple. Samples are arrays or numbers, without
        the dimension that counts them.
    job
        Whose rank reads only what its devices do (``Job.slices``), and gets ``whale.Local``. None: whole batches as arrays.
    batch
        Samples on all ranks together.
    seed, shuffle
        Epoch e goes through the dataset in an order that follows from (seed, e) alone, or as it is. All ranks, and any number of
        them, have the same batches.
    epochs
        After how many it ends, None: never.
    drop_last
        Whether samples at the end of an epoch that fill no batch are left out, or are a smaller one.
    prefetch
        Batches that a thread reads ahead, which alone uses the dataset then; 0: none, ``next`` reads.
    names
        Of a tuple's elements.

    What the dataset raises, or gives in another shape, is a SampleError of the ``next`` whose batch it is, on this rank alone; the other ranks' step
    ends with its words. The next call gives the next batch, as theirs do; ``load_state`` of what ``state`` gave before it, on all ranks, tries that
    one again. A step whose ranks feed parts of different batches is FailedPrecondition on all, and changes nothing. One thread at a time. ``close`` ends the thread; a loader that nobody holds has ended it too."""

    def __init__(self, dataset: Any, batch: int, *, job: "Job | None" = None, seed: int = 0, shuffle: bool = True, epochs: int | None = None,
                 drop_last: bool = True, prefetch: int = 2, names: Sequence[str] = ()):
        self._seed = arguments.integer("seed", seed, 0, 2**63 - 1)
        self._epochs = None if epochs is None else arguments.integer("epochs", epochs, 0)
        self._prefetch = arguments.integer("prefetch", prefetch, 0, 2**16)
        self._batches = _Batches(dataset, arguments.integer("batch", batch, 1), job, arguments.flag("shuffle", shuffle),
                                 arguments.flag("drop_last", drop_last), arguments.names("names", names))
        self._job = (lambda: None) if job is None else weakref.ref(job)
        self._at = (0, 0)  # epoch, batch of it: the next one to give
        self._reader: _Reader | None = None
        self._end_reader = lambda: None
        self._closed = False

    def __len__(self) -> int:
        """Batches of an epoch."""
        return self._batches.count

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        if self._closed:
            raise FailedPrecondition("this loader is closed", "FAILED_PRECONDITION")
        if self._epochs is not None and self._at[0] >= self._epochs:
            raise StopIteration
        try:
            batch = self._next()
        except Exception as error:
            if (job := self._job()) is not None:  # the other ranks' step waits for this one
                with contextlib.suppress(WhaleError):
                    job.refuse(error)
            self._at = self._batches.after(*self._at)  # as the other ranks, which have this batch
            raise
        self._at = self._batches.after(*self._at)
        return batch

    def _next(self) -> dict[str, Any]:
        if self._prefetch == 0:
            return self._batches.read(self._seed, *self._at)
        if self._reader is None:
            self._reader = _Reader(self._batches, self._seed, self._at, self._epochs, self._prefetch)
            self._end_reader = weakref.finalize(self, self._reader.stop)
        try:
            return self._reader.take()
        except BaseException:  # also Ctrl-C: what was read ahead is read again
            self._stop()
            raise

    def state(self) -> dict[str, int]:
        """Where it is: what ``load_state`` takes, on any number of ranks, to go on with the batch behind the one that was given last. It is small,
        and JSON has all of it: save it beside the job's checkpoint."""
        return {"seed": self._seed, "epoch": self._at[0], "batch": self._at[1], "samples": self._batches.samples, "batch_size": self._batches.size}

    def load_state(self, state: Mapping[str, int]) -> None:
        """Goes on from ``state``, of a loader of the same dataset and batch; the seed is that of the state."""
        try:
            seed, epoch, batch, samples, size = (arguments.integer(name, state[name], 0) for name in ("seed", "epoch", "batch", "samples", "batch_size"))
        except (KeyError, TypeError):
            raise arguments.wrong("state", state, "what Loader.state() gave") from None
        if (samples, size) != (self._batches.samples, self._batches.size):
            raise arguments.wrong("state", state, f"a state of {self._batches.samples} samples in batches of {self._batches.size}")
        if batch >= self._batches.count:
            raise arguments.wrong("state", state, f"a batch below {self._batches.count}")
        self._stop()
        self._seed, self._at = seed, (epoch, batch)

    def _stop(self) -> None:
        self._end_reader()
        self._reader = None

    def close(self) -> None:
        """Ends the thread, when it has read the sample that it is at."""
        self._closed = True
        self._stop()

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class _Batches:
    """The batches of any epoch, each as a rank reads it."""

    def __init__(self, dataset: Any, size: int, job: "Job | None", shuffle: bool, drop_last: bool, names: list[str]):
        self._columns = dataset if isinstance(dataset, Mapping) else None
        self._dataset, self._names, self._shuffle, self.size = dataset, names, shuffle, size
        lengths = {name: len(column) for name, column in dataset.items()} if self._columns is not None else {"": _length(dataset)}
        self.samples = next(iter(lengths.values()), 0)
        for name, length in lengths.items():
            if length != self.samples:
                raise InvalidArgument(f"'{name}' has {length} samples, '{next(iter(lengths))}' has {self.samples}", "INVALID_ARGUMENT")
        self.count = self.samples // size if drop_last else -(-self.samples // size)
        if self.count == 0:
            raise InvalidArgument(f"the dataset has {self.samples} samples, which fill no batch of {size}", "INVALID_ARGUMENT")
        self._order: tuple[tuple[int, int], np.ndarray] | None = None
        # By batch size: asked for here, on the thread of the job.
        sizes = {min(size, self.samples - k * size) for k in (0, self.count - 1)}
        self._slices = None if job is None else {each: job.slices(each) for each in sizes}
        self._ports = {} if job is None else {port.name: port for port in job.inputs() if port.batch_dim >= 0}
        self._given = list(self._columns) if self._columns is not None else names or list(self._ports)  # the inputs
        if job is not None:
            for name in self._given:
                if name not in self._ports:
                    raise InvalidArgument(f"no such input: '{name}'; those that count samples are {', '.join(map(repr, self._ports))}",
                                          "INVALID_ARGUMENT")

    def after(self, epoch: int, batch: int) -> tuple[int, int]:
        return (epoch, batch + 1) if batch + 1 < self.count else (epoch + 1, 0)

    def order(self, seed: int, epoch: int) -> np.ndarray:
        """Of the epoch's samples. By the raw numbers of a generator whose stream numpy never changes."""
        if not self._shuffle:
            return np.arange(self.samples)
        known = self._order
        if known is None or known[0] != (seed, epoch):
            raw = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(self.samples)
            self._order = known = (seed, epoch), np.argsort(raw, kind="stable")
        return known[1]

    def read(self, seed: int, epoch: int, batch: int, stopped: Any = bool) -> dict[str, Any]:
        """stopped: whether nobody wants it any more."""
        indices = self.order(seed, epoch)[batch * self.size:(batch + 1) * self.size].tolist()
        if self._slices is None:
            samples = {}
            for row, index in enumerate(indices):
                if stopped():
                    break
                for name, sample in self._sample(index, None).items():
                    samples.setdefault(name, []).append(self._array(name, index, sample))
            return {name: np.stack(list_of) for name, list_of in samples.items()}
        slices = {name: self._slices[len(indices)][name] for name in self._given}
        wanted: dict[int, list[str]] = {}  # by row of the batch, the inputs that read it
        for name, boxes in slices.items():
            for box in boxes:
                for row in range(box[self._ports[name].batch_dim].start, box[self._ports[name].batch_dim].stop):
                    wanted.setdefault(row, []).append(name)
        parts: dict[str, list[np.ndarray]] = {}
        for row in sorted(wanted):
            if stopped():
                break
            index = indices[row]
            for name, sample in self._sample(index, wanted[row]).items():
                port = self._ports[name]
                shape = port.dims[:port.batch_dim] + port.dims[port.batch_dim + 1:]
                array = self._array(name, index, sample)
                if array.shape != shape:
                    raise SampleError(f"sample {index} of '{name}' has shape {array.shape}, expected {shape}", index)
                box = slices[name][0]  # in these dimensions all boxes are alike
                parts.setdefault(name, []).append(array[box[:port.batch_dim] + box[port.batch_dim + 1:]])
        local = {name: Local(np.stack(parts[name], self._ports[name].batch_dim) if name in parts else [], len(indices)) for name in slices}
        for each in local.values():
            each._same = self._number(seed, epoch, batch)
        return local

    def _number(self, seed: int, epoch: int, batch: int) -> int:
        """Of the batch: another one where other samples are in it. Never 0."""
        which = (self.samples, self.size, seed if self._shuffle else None, epoch if self._shuffle else 0, batch)
        return int.from_bytes(hashlib.blake2b(repr(which).encode(), digest_size=8).digest(), "little") or 1

    def _sample(self, index: int, names: list[str] | None) -> dict[str, Any]:
        """Of the inputs `names`, None: all that there are."""
        try:
            if self._columns is not None:
                return {name: self._columns[name][index] for name in (self._columns if names is None else names)}
            sample = self._dataset[index]
            if self._names:
                if len(sample) != len(self._names):
                    raise ValueError(f"{len(sample)} elements for the names {', '.join(self._names)}")
                sample = dict(zip(self._names, sample))
            if not isinstance(sample, Mapping):
                raise TypeError(f"expected a mapping by input, or with names=.. a tuple, found {type(sample).__name__}")
            return {name: sample[name] for name in (sample if names is None else names)}
        except Exception as error:
            raise SampleError(f"sample {index} of the dataset could not be read: {type(error).__name__}: {error}", index) from error

    @staticmethod
    def _array(name: str, index: int, sample: Any) -> np.ndarray:
        try:
            return as_numpy(sample)
        except ValueError as error:
            raise SampleError(f"sample {index} of '{name}' is no array: {error}", index) from error


def _length(dataset: Any) -> int:
    try:
        return len(dataset)
    except TypeError:
        raise arguments.wrong("dataset", dataset, "a mapping by input, or what has a length and gives samples by number") from None


class _Reader:
    """A thread that reads batches ahead of whoever takes them."""

    def __init__(self, batches: _Batches, seed: int, at: tuple[int, int], epochs: int | None, ahead: int):
        self._stopped = threading.Event()
        self._ready: queue.Queue = queue.Queue()
        self._room = threading.Semaphore(ahead)
        self._thread = threading.Thread(target=self._run, args=(batches, seed, at, epochs), name="whale.data.Loader", daemon=True)
        self._thread.start()

    def _run(self, batches: _Batches, seed: int, at: tuple[int, int], epochs: int | None) -> None:
        while epochs is None or at[0] < epochs:
            self._room.acquire()
            if self._stopped.is_set():
                return
            try:
                self._ready.put((batches.read(seed, *at, self._stopped.is_set), None))
            except BaseException as error:
                self._ready.put((None, error))
                return
            at = batches.after(*at)

    def take(self) -> dict[str, Any]:
        batch, error = self._ready.get()
        if error is not None:
            raise error
        self._room.release()
        return batch

    def stop(self) -> None:
        self._stopped.set()
        self._room.release()
        if self._thread is not threading.current_thread():
            self._thread.join()
