"""A progress bar without dependencies: tqdm where it is installed, a plain line on a terminal, silence elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Iterable, Iterator, TypeVar

T = TypeVar("T")


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def progress(batches: Iterable[T], total: int | None = None, *, text: str = "step") -> Iterator[T]:
    """Iterates over ``batches`` and shows how far it is. total: how many there are, None: their length if they have one. text: what one
    is called."""
    if total is None:
        try:
            total = len(batches)  # type: ignore[arg-type]
        except TypeError:
            total = None
    try:
        from tqdm.auto import tqdm
        yield from tqdm(batches, total=total, desc=text)
        return
    except ImportError:
        pass
    shown, start, last = sys.stderr.isatty(), time.monotonic(), 0.0
    for done, batch in enumerate(batches, 1):
        yield batch
        now = time.monotonic()
        if shown and (now - last > 0.1 or done == total):
            last = now
            rate = done / max(now - start, 1e-9)
            tail = f"/{total}  {_duration((total - done) / rate)} left" if total else ""
            print(f"\r{text} {done}{tail}  {rate:.1f}/s   ", end="", file=sys.stderr, flush=True)
    if shown and last:
        print(file=sys.stderr)
