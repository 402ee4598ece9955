"""Keeps secrets out of files.

A value that came from `${oc.env:NAME}` is written as `${oc.env:NAME}`, and an address without its password.
"""

import os

from clipscale.common.errors import UserError
from clipscale.common.text import without_password

# Environment variable that lists the variables that the configuration reads. All processes of a run inherit it.
READ_VARIABLES = "CLIPSCALE_ENV_READ"
# Shorter values are words and numbers, not secrets.
MIN_SECRET_LENGTH = 8


def from_environment(name: str, *default: str | None) -> str | None:
    """The resolver of `${oc.env:NAME}` and `${oc.env:NAME,DEFAULT}`. Raises UserError without a value."""
    if name not in os.environ and not default:
        raise UserError(f"${{oc.env:{name}}}: the environment variable {name} is not set; export it")
    names = os.environ.get(READ_VARIABLES, "").split(",")
    os.environ[READ_VARIABLES] = ",".join(filter(None, {*names, name}))
    return os.environ.get(name, *default)


def without_secrets(tree: object) -> object:
    """Nested values as they may be written to files: each text by `text_without_secrets`, lists for tuples."""
    if isinstance(tree, dict):
        return {key: without_secrets(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [without_secrets(value) for value in tree]
    return text_without_secrets(tree) if isinstance(tree, str) else tree


def text_without_secrets(text: str) -> str:
    """A text as it may be written to files: without secrets and without `user:password@`."""
    for name in os.environ.get(READ_VARIABLES, "").split(","):
        value = os.environ.get(name, "")
        if len(value) >= MIN_SECRET_LENGTH:
            text = text.replace(value, f"${{oc.env:{name}}}")
    return without_password(text)
