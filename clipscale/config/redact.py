"""Keeps secrets out of everything that a run writes, prints or sends.

Secrets are the query and the `user:password@` of an address, tokens of known form, values under names such as `api_key`, and environment
variables that have such a name or that the configuration reads with `${oc.env:NAME}`. A variable's value becomes `${oc.env:NAME}` again,
so that `restored` finds it; everything else becomes HIDDEN.
"""

import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from traceback import format_exception
from typing import Any, TextIO, cast
from urllib.parse import quote

HIDDEN = "***"
READ = "CLIPSCALE_ENV_READ"
"""Environment variable with the names of those that the configuration reads, for the processes of a run."""
LEAST = 8
"""Shorter values of environment variables are words and numbers, not secrets."""
ORDINARY = re.compile(
    r"HOME|USER|LOGNAME|PATH|PWD|SHELL|LANG|TERM|TMPDIR|HOSTNAME|RANK|WORLD_SIZE|LOCAL_RANK|(SLURM|SUBMITIT|LC)_\w+"
)
"""Variables that everybody has. Their values are no secrets, even if the configuration reads them."""
SECRET_VARIABLE = re.compile(
    r"TOKEN(?!IZ)|SECRET|PASSW|CREDENTIAL|(API|ACCESS|PRIVATE|ACCOUNT)_?KEY|_(KEY|AUTH|PWD|PAT|SAS|DSN|COOKIE)$|^(WDS_.*|NETRC)$"
)
SECRET_NAME = re.compile(
    r"(?i)(^|[_.-])(tokens?|secrets?|password|passwd|passphrase|credentials?|api_?key|access_?key(_id)?|private_?key|key_?id|sig|signature)$"
)
"""Names of settings, in free-form dictionaries, whose values are secrets."""
QUERY = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://[^\s?'\"<>]*)\?[^\s'\"<>]+")
USERINFO = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)[^\s/'\"<>]+@")
ASSIGNED = re.compile(
    r"(?i)((?<![a-z/])(?:token|secret|password|passwd|passphrase|api_?key|access_?key(?:_?id)?|private_?key)"
    r"(?:\s*=\s*['\"]?|['\"]\s*:\s*['\"]))(?!\$\{|null\b|\*\*\*)[^\s'\"&,;}\]]{4,}"
)
"""`api_key=...`, `"token": "..."`."""
TOKENS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|A[KS]IA[0-9A-Z]{16}|gh[oprsu]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|sk-[\w-]{20,}"
    r"|xox[abeprs]-[\w-]{10,}|AIza[\w-]{30,}|ya29\.[\w.-]{20,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
)
AUTHORIZATION = re.compile(r"(?i)(\bbearer\s+|\bauthorization:\s*(?:basic\s+|token\s+)?)[A-Za-z0-9+/=._~-]{12,}")


def remember(name: str) -> None:
    """The configuration reads this environment variable: its value is a secret, in this process and those that it starts."""
    names = os.environ.get(READ, "").split(",")
    if name not in names:
        os.environ[READ] = ",".join(filter(None, [*names, name]))


def secret_variables() -> dict[str, str]:
    """Secret value -> the variable that has it, the longest value first."""
    read = os.environ.get(READ, "").split(",")
    found = {}
    for name, value in os.environ.items():
        asked = name in read and not ORDINARY.fullmatch(name) and not value.isdecimal()
        if len(value) < LEAST or not (asked or SECRET_VARIABLE.search(name)):
            continue
        if value.startswith(("/", "~")) and os.path.exists(os.path.expanduser(value)):  # noqa: PTH110, PTH111 (texts, not paths)
            continue
        found[value] = found[quote(value, safe="")] = name
    return dict(sorted(found.items(), key=lambda item: -len(item[0])))


def redact(text: str, secrets: dict[str, str] | None = None) -> str:
    """The text without secrets: those of `secret_variables()`, if `secrets` does not have them already."""
    for value, name in (secret_variables() if secrets is None else secrets).items():
        if value in text:
            text = text.replace(value, f"${{oc.env:{name}}}")
    if "://" in text:
        text = USERINFO.sub(rf"\1{HIDDEN}@", QUERY.sub(rf"\1?{HIDDEN}", text))
    text = AUTHORIZATION.sub(rf"\1{HIDDEN}", TOKENS.sub(HIDDEN, text))
    return ASSIGNED.sub(rf"\1{HIDDEN}", text)


def redacted(tree: Any, secrets: dict[str, str] | None = None) -> Any:
    """Nested values without secrets, in their keys, their texts and under names such as `api_key`. `secrets` as in `redact`."""
    secrets = secret_variables() if secrets is None else secrets
    if isinstance(tree, dict):
        return {
            redacted(key, secrets): HIDDEN
            if isinstance(value, str) and SECRET_NAME.search(str(key))
            else redacted(value, secrets)
            for key, value in tree.items()
        }
    if isinstance(tree, list | tuple):
        return type(tree)(redacted(value, secrets) for value in tree)
    return redact(tree, secrets) if isinstance(tree, str) else tree


def restored(tree: Any) -> Any:
    """Nested values with `${oc.env:NAME}` replaced by the variable's value, where the variable is set."""
    if isinstance(tree, dict):
        return {key: restored(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return list(map(restored, tree))
    if not isinstance(tree, str):
        return tree

    def value(match: re.Match[str]) -> str:
        if match[1] in os.environ:
            remember(match[1])
        return os.environ.get(match[1], match[0])

    return re.sub(r"\$\{oc\.env:(\w+)\}", value, tree)


def incomplete(text: str) -> bool:
    """Whether a stored text lacks a secret: it is hidden, or its environment variable is not set."""
    return HIDDEN in text or "${oc.env:" in text


class RedactedStream:
    """A text stream that writes no secrets."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(redact(text))
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def redacted_output() -> Iterator[None]:
    """Takes the secrets out of what this process prints. Tracebacks of uncaught errors stay without them afterwards."""
    if isinstance(sys.stdout, RedactedStream):
        yield
        return
    sys.excepthook = lambda kind, error, trace: sys.stderr.write(redact("".join(format_exception(kind, error, trace))))
    threading.excepthook = lambda given: sys.excepthook(
        given.exc_type, given.exc_value or given.exc_type(), given.exc_traceback
    )
    out, err = (cast(TextIO, RedactedStream(stream)) for stream in (sys.stdout, sys.stderr))
    with redirect_stdout(out), redirect_stderr(err):
        yield
