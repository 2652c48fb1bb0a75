"""Reports: a plan, and what a run of it measured, as one HTML page that needs no network."""

from __future__ import annotations

import os
from html import escape
from typing import Any, Sequence

from . import _abi, arguments
from ._library import FailedPrecondition, lib, take_text


class Report:
    """A page for a browser. In a notebook it shows itself; ``save`` writes it to a file, ``html`` is its text."""

    def __init__(self, html: str):
        self.html = html

    def save(self, path: str | os.PathLike) -> None:
        with open(arguments.path("path", path), "w", encoding="utf-8") as file:
            file.write(self.html)

    def __repr__(self) -> str:
        return f"<whale.Report of {len(self.html):,} bytes: .save('plan.html') writes it, a browser shows it>"

    def _repr_html_(self) -> str:
        # A frame of its own: styles and scripts of page and notebook do not meet.
        return f'<iframe srcdoc="{escape(self.html)}" sandbox="allow-scripts" title="plan" width="100%" height="760" frameborder="0"></iframe>'


class Profile:
    """What ``Job.profile`` recorded: the last step or evaluation inside of its block, beside what the plan predicts."""

    def __init__(self, plan: Any):
        self._plan = plan
        self._timeline: str | None = None

    @property
    def timeline(self) -> str:
        """Chrome trace JSON: open it at ui.perfetto.dev."""
        if self._timeline is None:
            raise FailedPrecondition("nothing is recorded yet: a profile is read behind its block, `with job.profile() as profile: job.step(...)`",
                                     "FAILED_PRECONDITION")
        return self._timeline

    def show(self) -> Report:
        return report_of(self._plan._handle.pointer, [self.timeline])

    def report(self, path: str | os.PathLike) -> None:
        self.show().save(path)

    def trace(self, path: str | os.PathLike) -> None:
        """Writes ``timeline`` to a file."""
        with open(arguments.path("path", path), "w", encoding="utf-8") as file:
            file.write(self.timeline)


def report_of(plan: int, traces: Sequence[str]) -> Report:
    texts = [text.encode("utf-8", "surrogateescape") for text in traces]
    rows = (_abi.whale_str * max(1, len(texts)))()
    for row, text in zip(rows, texts):
        row.data, row.size = text, len(text)
    return Report(take_text(lib.whale_plan_report_html, plan, rows, len(texts)))


def traces_of(measured: str | os.PathLike | Sequence[str | os.PathLike]) -> list[str]:
    """The texts of trace files: one path or several."""
    paths = [measured] if isinstance(measured, (str, os.PathLike)) else list(measured)
    texts = []
    for path in paths:
        with open(arguments.path("measured", path), encoding="utf-8", errors="replace") as file:
            texts.append(file.read())
    return texts
