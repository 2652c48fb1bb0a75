"""What a function of the SDK was given, checked: an error names the Python argument, what was wanted and what was found."""

from __future__ import annotations

import math
import numbers
import operator
import os
from typing import Any, Iterable

import numpy as np

from ._library import InvalidArgument


def brief(text: str) -> str:
    """A name as messages show it."""
    return text if len(text) < 120 else text[:117] + "..."


def wrong(name: str, value: Any, wanted: str) -> InvalidArgument:
    shown = repr(value)
    return InvalidArgument(f"argument '{name}' is {shown if len(shown) < 80 else shown[:77] + '...'}, expected {wanted}", "INVALID_ARGUMENT")


def integer(name: str, value: Any, low: int = -2**63, high: int = 2**63 - 1) -> int:
    """An int, or what numpy has for one; never a float or a bool, which would be cut to something else."""
    full = f" from {low} to {high}"
    bounds = "" if low == -2**63 else f" {low} or more" if high == 2**63 - 1 else full
    try:
        result = operator.index(value)
    except TypeError:
        raise wrong(name, value, f"an integer{bounds}") from None
    if isinstance(value, bool) or result < low:
        raise wrong(name, value, f"an integer{bounds if result >= -2**63 else full}")
    if result > high:
        raise wrong(name, value, f"an integer{full}")
    return result


def number(name: str, value: Any, low: float = -math.inf, high: float = math.inf) -> float:
    """A finite number."""
    wanted = f"a number from {low:g} to {high:g}" if high < math.inf else f"a number, {low:g} or more" if low > -math.inf else "a finite number"
    if not isinstance(value, numbers.Real) or isinstance(value, bool) or not (_is_finite(value) and low <= value <= high):
        raise wrong(name, value, wanted)
    return real(name, value)


def _is_finite(value: numbers.Real) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond float64
        return False


def real(name: str, value: Any) -> float:
    """Any number, infinite or NaN too; no integer beyond 2**53 that would become another one."""
    try:
        result = None if isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError):
        result = None
    if result is None:
        raise wrong(name, value, "a number that float64 has")
    if isinstance(value, numbers.Integral) and int(result) != int(value):
        raise wrong(name, value, f"a number that float64 has, such as {int(result)}")
    return result


def fraction(name: str, value: Any) -> float:
    """A number from 0 to what is less than 1."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool) or not 0 <= value < 1:
        raise wrong(name, value, f"0 <= {name} < 1")
    return float(value)


def positive(name: str, value: Any) -> float:
    """A finite number above 0."""
    if isinstance(value, numbers.Real) and not value > 0:
        raise wrong(name, value, "a number above 0")
    return number(name, value)


def flag(name: str, value: Any) -> bool:
    """True or False, or numpy's; nothing that is merely true, as the text "no" is."""
    if not isinstance(value, (bool, np.bool_)):
        raise wrong(name, value, "True or False")
    return bool(value)


def choice(name: str, value: Any, choices: Iterable[str]) -> str:
    all_of = list(choices)
    if not isinstance(value, str) or value not in all_of:
        raise wrong(name, value, " or ".join(filter(None, [", ".join(map(repr, all_of[:-1])), repr(all_of[-1])])))
    return value


def text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise wrong(name, value, "text")
    return value


def path(name: str, value: Any) -> str:
    """A path as text; never None or a number, whose text would be a file's name."""
    try:
        return os.fsdecode(value)
    except TypeError:
        raise wrong(name, value, "a path") from None


def names(name: str, value: Any) -> list[str]:
    """One name or several."""
    if isinstance(value, str):
        return [value]
    try:
        several = list(value)
    except TypeError:
        raise wrong(name, value, "a name or a list of names") from None
    if not all(isinstance(each, str) for each in several):
        raise wrong(name, value, "a name or a list of names")
    return several


def shape(name: str, value: Any, low: int = 0) -> tuple[int, ...]:
    """Extents: a sequence of integers."""
    if isinstance(value, str):
        raise wrong(name, value, "a sequence of integers such as (32, 10)")
    try:
        extents = list(value)
    except TypeError:
        raise wrong(name, value, "a sequence of integers such as (32, 10)") from None
    return tuple(integer(f"{name}[{i}]", each, low) for i, each in enumerate(extents))


def numbers_of(name: str, value: Any, low: float = -math.inf) -> list[float]:
    if isinstance(value, str) or not hasattr(value, "__iter__"):
        raise wrong(name, value, "a list of numbers")
    return [number(f"{name}[{i}]", each, low) for i, each in enumerate(value)]


def instance(name: str, value: Any, kind: type, wanted: str) -> Any:
    if not isinstance(value, kind):
        raise wrong(name, value, wanted)
    return value
