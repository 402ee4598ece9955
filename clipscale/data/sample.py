"""A sample as it lies in a shard, and how members' names say what belongs to it."""

import re
from dataclasses import dataclass, field

_META = re.compile(r"__[^/]*__($|/)")
"""Members that webdataset keeps for itself."""
_NAME = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")
"""Key and extension by webdataset's rule: the key ends at the first dot after the last slash."""


@dataclass
class RawSample:
    """The members of one sample as they lie in the shard: extension (lower case) -> bytes."""

    url: str
    key: str
    index: int
    members: dict[str, bytes] = field(repr=False)
    damage: str = ""
    """The reason why this sample cannot be used although its shard can be read on."""
    detail: str = ""


def key_and_extension(name: str) -> tuple[str, str] | None:
    """The sample and the kind that a member's name says, or None where it says none."""
    match = None if _META.match(name) else _NAME.match(name)
    return (match[1], match[2].lower()) if match else None
