"""The captions of a raw sample: texts of its members, or of the fields of its json."""

import json
import re
from collections.abc import Sequence
from contextlib import suppress

from clipscale.data.hashing import utf8
from clipscale.data.sample import BrokenSampleError

# A character of a text that can be seen: no white space, control characters, and letters without width or ink.
_VISIBLE = re.compile(
    "[^\\s\0-\x1f\x7f\xad\u115f\u1160\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f\u2800\u3164\ufe00-\ufe0f\ufeff]"
)


def visible_text(text: str) -> str:
    """The text without the white space, zeros and byte order marks at its ends; empty if nothing of it can be seen."""
    return text.strip("\ufeff\x00 \t\r\n") if _VISIBLE.search(text) else ""


def encoding_of(start: bytes) -> str:
    """The encoding of a text: by its byte order mark, by the zero bytes of UTF-16 and UTF-32, else UTF-8."""
    return json.detect_encoding(start)


def text_of(data: bytes) -> str:
    """The text of these bytes, by `encoding_of`. Raises BrokenSampleError `caption_not_utf8`."""
    try:
        return data.decode(encoding_of(data))
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
