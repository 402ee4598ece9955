"""A sample as it lies in a shard, and how members' names say what belongs to it."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

_META = re.compile(r"__[^/]*__($|/)")
"""Members that webdataset keeps for itself."""
_NAME = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")
"""Key and extension by webdataset's rule: the key ends at the first dot after the last slash."""

MOST_BYTES = 64 << 20
"""Of a picture as it lies in a shard, unless `data.max_bytes` says otherwise."""
MOST_TEXT = 1 << 20
"""Of a caption or json member; a parser may make thirty times as much of it."""
TOO_LARGE = "too_large"
"""What samples are counted as that hold more than they may; it is never read."""


def limits(pictures: Iterable[str], texts: Iterable[str] = (), most: int = MOST_BYTES) -> dict[str, int]:
    """The members that are wanted, and the bytes that each may have: extension -> bytes."""
    return dict.fromkeys(texts, MOST_TEXT) | dict.fromkeys(pictures, most)


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
    extent: int = 0
    """Bytes from its first header to the next sample's, whatever is wanted of them (of a table: of its row): the same however it is
    read, with an index or without, and whether it is wanted or not."""
    later: Callable[[], None] | None = field(default=None, repr=False, compare=False)
    """Reads the members of a table's row, where they have not been read yet; raises nothing."""

    def fill(self) -> None:
        """Have the members that were left for later."""
        if self.later is not None:
            later, self.later = self.later, None
            later()

    def held(self) -> int:
        """Bytes of its members in memory."""
        return sum(map(len, self.members.values()))

    def admits(self, name: str, extension: str, size: int, kinds: Mapping[str, int] | None) -> bool:
        """Whether a member is to be read (`kinds`: as `limits` gives it; None: all are). One that is too large, by itself or with the
        others, breaks the sample: nothing is kept of it."""
        if self.damage or extension in self.members or (kinds is not None and extension not in kinds):
            return False
        most = MOST_BYTES if kinds is None else kinds[extension]
        together = most if kinds is None else max(kinds.values())
        if size <= most and self.held() + size <= together:
            return True
        self.members, self.damage, self.detail = {}, TOO_LARGE, f"{name}: {size} bytes"
        return False


def key_and_extension(name: str) -> tuple[str, str] | None:
    """The sample and the kind that a member's name says, or None where it says none."""
    match = None if _META.match(name) else _NAME.match(name)
    return (match[1], match[2].lower()) if match else None
