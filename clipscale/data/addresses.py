"""Paths and addresses of shards: their schemes, folders and names."""

import re

_SCHEME = re.compile(r"^[a-z][a-z0-9+.-]+:", re.IGNORECASE)


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


def without_query(url: str) -> str:
    """The address without its query, which may be a signature: with another signature it names the same shard."""
    return url if is_local(url) else url.partition("?")[0]


def basename(url: str) -> str:
    """The last part of a path or address."""
    return without_query(url).rpartition("/")[2]


def dirname(url: str) -> str:
    """The folder of a path or address: all before its last part, also before a query."""
    return without_query(url)[: without_query(url).rfind("/") + 1]
