"""Settings that have a new name. The old name is accepted for one release, with a notice."""

import os
import sys
from collections.abc import Container
from copy import deepcopy
from functools import cache
from typing import Any

RENAMED = {
    "data.lanes": "data.shard_streams",
    "host": "host_memory",
    "near": "near_duplicates",
    "picture": "image_bytes",
}
"""Old dotted key -> new, in the same section. An entry is removed one release after it was added."""


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

    `defaults`: all declared settings. Composed values hold them too, so that the old name in an experiment file stands beside the
    default under the new name.
    """
    values = deepcopy(values)
    for old, new in RENAMED.items():
        *path, old_leaf = old.split(".")
        new_leaf = new.rpartition(".")[2]
        given, declared = section(values, path), section(defaults, path)
        if old_leaf in given and new_leaf in declared:
            notice(old, new)
            value = given.pop(old_leaf)
            if given.get(new_leaf, declared[new_leaf]) == declared[new_leaf]:
                given[new_leaf] = value
    return values


def section(values: dict[str, Any], path: list[str]) -> dict[str, Any]:
    """The nested dictionary at a path; empty if there is none."""
    for part in path:
        inside = values.get(part)
        values = inside if isinstance(inside, dict) else {}
    return values
