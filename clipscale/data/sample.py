"""A raw sample of a shard: the rule by which members' names form samples, its members, its picture and captions."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from clipscale.common import files
from clipscale.data.hashing import utf8

KEY_RULE = "KEY ends at the first dot of the name"
# `dotted_names_message` names this many members.
MAX_DOTTED = 4
# Members that webdataset reserves for itself.
_META = re.compile(r"__[^/]*__($|/)")
# Bytes of a member's name; a longer one belongs to no sample, as on file systems.
MAX_NAME_BYTES = 4096

# Extensions of pictures, in lower case: of members of a shard, and of files. The writer, training and evaluation all
# use this list. If a sample has several pictures, the first in this order is used.
IMAGE_TYPES = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "jpe", "jfif", "mpo", "apng")

# Size limit of an encoded picture.
MAX_IMAGE_BYTES = 64 << 20
# Size limit of a caption or json member; a parser may need thirty times as much memory.
MAX_TEXT_BYTES = 1 << 20
# A character of a text that can be seen: no white space, control characters, and letters without width or ink.
_VISIBLE = re.compile(
    "[^\\s\0-\x1f\x7f\xad\u115f\u1160\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f\u2800\u3164\ufe00-\ufe0f\ufeff]"
)


def size_limits_of(pictures: Iterable[str], texts: Iterable[str] = ()) -> dict[str, int]:
    """The members to read and their size limits: extension -> bytes."""
    return dict.fromkeys(texts, MAX_TEXT_BYTES) | dict.fromkeys(pictures, MAX_IMAGE_BYTES)


class BrokenSampleError(Exception):
    """A sample that cannot be used. `reason` is one of a small set of words; such samples are counted by it."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


# ---- members ----


def key_and_extension(name: str) -> tuple[str, str] | None:
    """The sample key and extension in a member's name, or None if it belongs to no sample.

    webdataset's rule: the key ends at the first dot after the last slash.
    """
    if len(name) > MAX_NAME_BYTES or _META.match(name):
        return None
    folder, slash, file = name.rpartition("/")
    stem, dot, extension = file.partition(".")
    if not stem or not dot:
        return None
    return f"{folder}{slash}{stem}", extension.lower()


def dotted_pictures(extensions: Iterable[str]) -> list[str]:
    """The extensions with a dot that end like a picture's: `2024.jpg` of IMG0.2024.jpg, whose key is IMG0."""
    return [name for name in extensions if "." in name and name.rpartition(".")[2] in IMAGE_TYPES]


def dotted_names_message(extensions: Sequence[str]) -> str:
    """The first of a sample's extensions with dots, and why they are no members of a pair."""
    return f"holds {', '.join(f'.{name[:40]}' for name in extensions[:MAX_DOTTED])}: {KEY_RULE}"


@dataclass
class RawSample:
    """The members of one sample, still encoded: extension (lower case) -> bytes."""

    url: str
    key: str
    index: int
    members: dict[str, bytes] = field(repr=False)
    # Reason why this sample is unusable, although the rest of its shard can be read; empty if it is usable.
    error: str = ""
    detail: str = ""
    # The bytes from this sample's first header to the next sample's first header, plus the bytes that its links stand
    # for. The number is the same whether the sample is wanted or not, with an index or without.
    num_bytes: int = 0
    # How many of these bytes links stand for.
    link_bytes: int = 0

    # The number of earlier copies of this sample in the shard, which sample weights make.
    repeat: int = 0
    # Probability that the sample appears in an epoch, from 1 on always.
    keep_probability: float = 1.0
    # Extensions with a dot, such as 2024.jpg of IMG.2024.jpg. A key ends at the first dot of a name, so these members
    # are not read.
    dotted_extensions: list[str] = field(default_factory=list, repr=False)
    # The json member, kept only until a subset has looked up the uid in it. Empty where no subset needs it.
    json_bytes: bytes = field(default=b"", repr=False)

    @classmethod
    def missing(cls, url: str, reason: str, detail: str) -> "RawSample":
        """A placeholder for a sample that cannot be read."""
        return cls(url, "", -1, {}, reason, detail)

    @property
    def is_missing(self) -> bool:
        """Whether it is a placeholder."""
        return self.index < 0

    def admit(
        self, name: str, extension: str, size: int, size_limits: Mapping[str, int] | None, link_error: str = ""
    ) -> bool:
        """Admit a member, or spoil the sample for one that it cannot have. Returns whether to read it.

        `size_limits`: from `size_limits_of`; None to read all members. `link_error`: why a link cannot be read.

        These spoil the sample: a member that repeats, a link that cannot be read, a member over its limit, and a member
        that brings the sample's total over MAX_IMAGE_BYTES.
        """
        if self.error or (size_limits is not None and extension not in size_limits):
            return False
        most = MAX_IMAGE_BYTES if size_limits is None else size_limits[extension]
        all_bytes = size + sum(map(len, self.members.values()))
        if extension in self.members:
            self.mark_unusable("repeated_member", name)
        elif link_error:
            self.mark_unusable("link", f"{name}: {link_error}")
        elif size > most or all_bytes > MAX_IMAGE_BYTES:
            self.mark_unusable("too_large", f"{name}: {size} bytes")
        return not self.error

    def note_dotted_extensions(self, extensions: Iterable[str], size_limits: Mapping[str, int]) -> None:
        """Note which of its extensions only end like a member to read. Spoils the sample if all its pictures are such.

        `size_limits`: of the members to read.
        """
        names = list(extensions)
        self.dotted_extensions = [
            name for name in names if name not in size_limits and name.rpartition(".")[2] in size_limits
        ]
        if dotted_pictures(self.dotted_extensions) and not self.error and not self.members.keys() & {*IMAGE_TYPES}:
            self.mark_unusable("dot_in_key", dotted_names_message(self.dotted_extensions))

    def mark_unusable(self, reason: str, detail: str) -> None:
        """Make it an unusable sample: sets its error, and drops its members."""
        self.members = {}
        self.error = reason
        self.detail = detail


# ---- what they hold ----


def image_bytes(members: dict[str, bytes]) -> bytes:
    """The first picture of a sample, by IMAGE_TYPES. Raises BrokenSampleError: `no_image`, `empty_image`."""
    for name in IMAGE_TYPES:
        if name in members:
            if not members[name]:
                raise BrokenSampleError("empty_image")
            return members[name]
    raise BrokenSampleError("no_image")


def captions_in(members: dict[str, bytes], source: str) -> list[str]:
    """The captions of a sample's source, an entry of `data.captions`: a member's extension (`txt`), or `json:FIELD`.

    The field holds a text or a list of texts.

    Raises BrokenSampleError: `no_caption`, `empty_caption`, `caption_not_utf8`, `bad_json`.
    """
    name, _, field = source.partition(":")
    if name not in members:
        raise BrokenSampleError("no_caption")
    text = text_of(members[name])
    texts = [text]
    if field:
        value = json_fields(text).get(field)
        values = value if isinstance(value, list) else [value]
        texts = [item for item in values if isinstance(item, str)]
        if not texts:
            raise BrokenSampleError("no_caption", f"no text in field {field!r}")
        if any(not item.isascii() and utf8(item) != item for item in texts):
            raise BrokenSampleError("caption_not_utf8", "lone surrogates")
    texts = [text for text in map(visible_text, texts) if text]
    if not texts:
        raise BrokenSampleError("empty_caption")
    return texts


def first_caption(members: dict[str, bytes], sources: Sequence[str]) -> str:
    """The first text of the first source that has one. `clipscale embed` and training with its features use it.

    Raises BrokenSampleError with the first source's reason if none has a text.
    """
    for source in sources:
        with suppress(BrokenSampleError):
            return captions_in(members, source)[0]
    return captions_in(members, sources[0])[0]


def text_of(data: bytes) -> str:
    """The text of these bytes, by `files.encoding_of`. Raises BrokenSampleError `caption_not_utf8`."""
    try:
        return data.decode(files.encoding_of(data))
    except UnicodeDecodeError as error:
        # Replacing the bytes would train the text tower on noise. Such captions are rare, and more than one letter is
        # usually damaged.
        raise BrokenSampleError("caption_not_utf8", str(error)) from error


def json_fields(text: str | bytes) -> dict[str, object]:
    """The fields of a json member; none if it is not an object. Raises BrokenSampleError `bad_json`."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BrokenSampleError("bad_json", str(error)) from error
    return fields if isinstance(fields, dict) else {}


def visible_text(text: str) -> str:
    """The text without the white space, zeros and byte order marks at its ends; empty if nothing of it can be seen."""
    return text.strip("\ufeff\x00 \t\r\n") if _VISIBLE.search(text) else ""
