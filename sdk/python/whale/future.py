"""What is under way beside the caller: planning, saving, loading."""

from __future__ import annotations

import functools
import math
import os
import time
from ctypes import byref, c_double, c_int32, c_int64, c_void_p
from typing import Callable, Generic, Iterable, Optional, TypeVar

from . import arguments
from ._library import FailedPrecondition, Handle, check, lib

T = TypeVar("T")
_LOOK = 0.1  # seconds between looks at Ctrl-C


class Future(Generic[T]):
    """Made by ``whale.plan_async``, ``Job.save_async`` and ``Job.load_async``: the work goes on beside the caller on a thread of the library.
    One thread at a time. A plan that nobody holds the future of any more is cancelled; a save or a load is completed."""

    def __init__(self, handle: Handle, _cancel: Handle, _finish: Callable[[Handle], T]):
        self._event, self._cancel, self._finish, self._process = handle, _cancel, _finish, os.getpid()

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        if os.getpid() != self._process:
            raise FailedPrecondition("this future belongs to the process that this one was forked from, and so does the work", "FAILED_PRECONDITION")
        return bool(lib.whale_event_query(self._event.pointer))

    def cancel(self) -> None:
        """Asks it to stop: ``result`` then raises Cancelled and nothing has changed, unless it is too late, and it ends well."""
        lib.whale_cancel_trigger(self._cancel.pointer)

    def result(self, timeout: Optional[float] = None) -> T:
        """What came of it, or raises what went wrong, as the call without ``_async`` does. Waits, at most ``timeout`` seconds (TimeoutError; the
        work goes on, as ``done()`` says: planning's own ``timeout`` is DeadlineExceeded, a TimeoutError too), None: as long as it takes. Ctrl-C ends the waiting alone."""
        if wait_any([self], timeout) is None:
            raise TimeoutError(f"it has not ended within {timeout} s and goes on; ask again, or cancel()")
        check(lib.whale_event_wait(self._event.pointer, c_double(-1), byref(c_int32())))
        return self._value

    @functools.cached_property
    def _value(self) -> T:
        return self._finish(self._event)


def wait_any(futures: Iterable[Future], timeout: Optional[float] = None) -> Optional[Future]:
    """Waits until one of ``futures`` has ended and returns it, of several the first in order; None: none has within ``timeout`` seconds (None: as long as
    it takes)."""
    if not hasattr(futures, "__iter__"):
        raise arguments.wrong("futures", futures, "a sequence of futures")
    all_of = [arguments.instance(f"futures[{i}]", each, Future, "a whale.Future, as whale.plan_async returns") for i, each in enumerate(futures)]
    if not all_of:
        raise arguments.wrong("futures", all_of, "one future or more: nothing would ever end")
    end = None if timeout in (None, math.inf) else time.monotonic() + arguments.number("timeout", timeout, 0)
    events, index = (c_void_p * len(all_of))(*(each._event.pointer for each in all_of)), c_int64(-1)
    while True:
        left = _LOOK if end is None else min(_LOOK, max(0.0, end - time.monotonic()))
        check(lib.whale_event_wait_any(events, len(all_of), c_double(left), byref(index)))
        if index.value >= 0:
            return all_of[index.value]
        if end is not None and time.monotonic() >= end:
            return None
