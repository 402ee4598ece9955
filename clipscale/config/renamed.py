"""Settings that have a new name. The old name is accepted for one release, with a notice."""

import os
from collections.abc import Container, Mapping
from functools import cache
from typing import Any

from clipscale.common.terminal import say
from clipscale.config.setting import Setting

RENAMED = {
    "data.lanes": "data.shard_streams",
    "host": "host_memory",
    "model.pretrained": "model.weights",
    "model.pretrained_image": "model.image.weights",
    "near": "near_duplicates",
    "picture": "image_bytes",
}
"""Old dotted key -> new, in the same section or one inside it. An entry is removed one release after it was added."""


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
        say(f"notice: {old} is now called {new}; the next release refuses the old name", error=True)


def with_current_names(values: dict[str, Any], prefix: str, settings: Mapping[str, Setting]) -> dict[str, Any]:
    """The values of one section, with every old name replaced. A value under the new name wins, unless it is the default.

    `prefix`: the section's name and a dot. Composed values hold all defaults, so that the old name in an experiment file stands beside the
    default under the new name.
    """
    result = dict(values)
    for name, value in values.items():
        new = current(f"{prefix}{name}", settings)
        if new != f"{prefix}{name}":
            del result[name]
            *inside, leaf = new.removeprefix(prefix).split(".")
            section = result
            for part in inside:
                section[part] = section = dict(section.get(part, {}))
            if section.get(leaf, settings[new].default) == settings[new].default:
                section[leaf] = value
    return result
