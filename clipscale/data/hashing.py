"""Hashes of names and texts, also of those that are not UTF-8."""

import hashlib


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
