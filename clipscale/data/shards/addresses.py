"""Addresses of shards, the error of a shard, and hashes of names.

Imports nothing of this folder, so every module of it may import this one.
"""

import hashlib
import re

# Prefix of the counters of events that cost no sample, such as repeated requests.
EVENT = "event:"
# The event of a shard that has changed since it was indexed, and is read without its index.
CHANGED = "changed_shard"
_SCHEME = re.compile(r"^[a-z][a-z0-9+.-]+:", re.IGNORECASE)


class SourceError(Exception):
    """A shard cannot be read further. `reason` is a fixed word, under which its lost samples are counted."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(detail or reason)
        self.reason = reason


def is_local(url: str) -> bool:
    """Whether the address is a path on this machine rather than a URL."""
    return not _SCHEME.match(url)


def as_path(name: str) -> str:
    """The name of a local file, as a path that no function takes for a URL, such as `./pipe:x.tar`."""
    return name if is_local(name) else f"./{name}"


def scheme_of(url: str) -> str:
    """The scheme in lower case, empty for a path."""
    return "" if is_local(url) else url.partition(":")[0].lower()


def bucket_of(url: str) -> str:
    """The scheme and the bucket or server of an address."""
    return "/".join(url.split("/")[:3])


def unsigned(url: str) -> str:
    """The address without its query, which may be a signature: with another signature it names the same shard."""
    return url if is_local(url) else url.partition("?")[0]


def basename(url: str) -> str:
    """The last part of a path or address."""
    return unsigned(url).rpartition("/")[2]


def dirname(url: str) -> str:
    """The folder of a path or address: all before its last part."""
    return url[: url.rfind("/") + 1]


def utf8(text: str) -> str:
    """The text with escapes for lone surrogates, among them the bytes of a name that is not UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()


def hash64(data: str | bytes) -> int:
    """A 64-bit hash of bytes or of any text, also of a path that is not UTF-8."""
    encoded = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    return int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "little")


def digest(text: str) -> str:
    """The hash of a text as sixteen hexadecimal digits."""
    return hash64(text).to_bytes(8, "little").hex()
