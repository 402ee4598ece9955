"""Text that is safe to print: without control characters, and without passwords in addresses."""

import re


def printable(text: object) -> str:
    """The text on one line: what is not printable, newlines included, becomes an escape such as `\\x1b`."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def without_password(text: str) -> str:
    """The text with `://` in the place of `://USER:PASSWORD@`."""
    return re.sub(r"://[^\s/'\"<>]+@", "://", text)  # the scheme is not in the pattern: time would be squared
