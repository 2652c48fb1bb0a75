"""Names that had another name (docs/words.md): using the old one is an error that says the new."""

from __future__ import annotations

import functools
import json
import sys
from typing import Any, Callable, Mapping

# Keys of what to_dict, reshards, choices and the like give.
KEYS = {"layout": "device_order or sharding", "chunks": "virtual_stages", "schedule": "lr_schedule", "stream": "queue", "streams": "queues",
        "slot": "version", "slots": "versions or capacity"}


class Report(dict):
    """A dict whose KeyError says what a key is called now."""

    def __missing__(self, key: Any) -> Any:
        raise KeyError(f"{key}: it is called {KEYS[key]} now" if key in KEYS else key)


def report(text: str | bytes) -> Any:
    """JSON of the library."""
    return json.loads(text, object_hook=Report)


def refuse(function: str, given: Mapping[str, Any], names: Mapping[str, str]) -> None:
    for before, now in names.items():
        if before in given:
            raise TypeError(f"{function}() has no argument '{before}'; it is called '{now}' now")


def arguments(**names: str) -> Callable:
    """Of a function: arguments by their old names, and what they are called now."""

    def decorate(function: Callable) -> Callable:
        @functools.wraps(function)
        def call(*args: Any, **given: Any) -> Any:
            refuse(function.__name__, given, names)
            return function(*args, **given)

        return call

    return decorate


def attribute(owner: str, name: str, names: Mapping[str, str]) -> AttributeError:
    """What ``__getattr__`` raises."""
    told = f"; it is called '{names[name]}' now" if name in names else ""
    return AttributeError(f"{owner} has no attribute '{name}'{told}")


def module_attribute(name: str, names: Mapping[str, str]) -> Exception:
    """What ``__getattr__`` of the module raises. ``from whale import NAME`` asks for it too, and replaces an AttributeError by words of
    its own."""
    if name in names and sys._getframe(2).f_code.co_name == "_handle_fromlist":
        return ImportError(f"cannot import name '{name}' from 'whale'; it is called '{names[name]}' now", name=name)
    return attribute("module 'whale'", name, names)
