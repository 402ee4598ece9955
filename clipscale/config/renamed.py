"""Settings that have a new name. The old name is accepted for one release, with a notice."""

import os
import sys
from collections.abc import Container
from copy import deepcopy
from functools import cache
from typing import Any

RENAMED = {
    "cache.keep": "cache.activation_budget",
    "data.lanes": "data.shard_streams",
    "host": "host_memory",
    "near": "near_duplicates",
    "picture": "image_bytes",
}
"""Old dotted key -> new, for all verbs. An entry goes one release after it came."""


def current(key: str, declared: Container[str]) -> str:
    """The new name of a setting that is among the keys `declared`, with a notice; every other key unchanged."""
    new = RENAMED.get(key, key)
    if new == key or new not in declared:
        return key
    notice(key, new)
    return new


@cache
def notice(old: str, new: str) -> None:
    """One line on stderr, once per process and on the first rank only."""
    if os.environ.get("RANK", "0") == "0":
        print(f"notice: {old} is now called {new}; the next release refuses the old name", file=sys.stderr)


def with_current_names(values: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Nested settings with every old name replaced. A value under the new name wins, unless it is the default.

    `defaults` is the nested dictionary of all declared settings; the composed values hold those, so that an old name in an experiment
    file always meets its new name.
    """
    values = deepcopy(values)
    for old, new in RENAMED.items():
        *old_path, old_leaf = old.split(".")
        *new_path, new_leaf = new.split(".")
        source, target, default = section(values, old_path), section(values, new_path), section(defaults, new_path)
        if source is None or old_leaf not in source or default is None or new_leaf not in default:
            continue
        notice(old, new)
        value = source.pop(old_leaf)
        if target is None:
            raise AssertionError(f"{new}: a setting moves within its section only")
        if target.get(new_leaf, default[new_leaf]) == default[new_leaf]:
            target[new_leaf] = value
    return values


def section(values: dict[str, Any], path: list[str]) -> dict[str, Any] | None:
    """The nested dictionary at a path; None where there is none."""
    found: Any = values
    for part in path:
        found = found.get(part) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else None
