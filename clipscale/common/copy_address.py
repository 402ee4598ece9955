"""Checks the address of a run's copy, `checkpoint.copy`, without asking a server."""

import re
from importlib.util import find_spec

from clipscale.common.errors import UserError


def check_copy_address(address: str) -> None:
    """Raise UserError for a `checkpoint.copy` that cannot keep a copy. Asks no server.

    It cannot if fsspec cannot open it, if fsspec takes it for a pattern, or if its files end with this process.
    """
    protocol, slashes, _ = address.partition("://")
    if not slashes or protocol == "file":
        return
    import fsspec
    from fsspec.registry import known_implementations

    library = known_implementations.get(protocol, {})
    if protocol not in fsspec.available_protocols():
        raise UserError(f"checkpoint.copy={address}: there is no {protocol}; give a folder, or s3://BUCKET/PATH")
    if protocol == "memory" or re.search(r"[*?[]", address):
        raise UserError(f"checkpoint.copy={address}: give a folder, or an address in a bucket without * ? [")
    if "class" in library and find_spec(library["class"].partition(".")[0]) is None:
        raise UserError(f"checkpoint.copy={address}: {library.get('err', 'its library is not installed')}")
