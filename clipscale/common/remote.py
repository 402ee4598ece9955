"""Servers and their stores: time limits of requests, a line about a wait, credentials, and the address of a copy.

The limits are this program's own: the libraries behind fsspec try for minutes, each in its own way.
"""

import os
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from importlib.util import find_spec
from threading import Thread, Timer
from typing import TypeVar

from clipscale.common.errors import UserError, one_line
from clipscale.common.terminal import is_main_rank, log_line

T = TypeVar("T")

# Seconds in which a server answers a small request.
ANSWER_S = 60.0
# The time limit of a large request allows for at least this speed.
MIN_BYTES_PER_S = 1 << 20
# After this many seconds a line says what is waited for.
ANNOUNCE_S = 10.0
# Seconds between two looks at the progress of a request.
LOOK_S = 1.0
# The exceptions that botocore and google-auth raise without credentials.
NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError")
GOOGLE = ("gs", "gcs")
# How a user gives credentials.
GOOGLE_REMEDY = (
    "gcloud auth application-default login, or GOOGLE_APPLICATION_CREDENTIALS=FILE; for public data "
    "FSSPEC_GS_TOKEN=anon"
)
AMAZON_REMEDY = "aws configure, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; for public data FSSPEC_S3_ANON=true"


def within_time(
    work: Callable[[], T],
    awaited: str,
    limit_s: float,
    *,
    progress: Callable[[], float] = lambda: 0.0,
    announce: bool = True,
) -> T:
    """Run `work` in a thread, which is abandoned after `limit_s` without `progress`. Returns what `work` returns.

    `announce`: after ANNOUNCE_S a line says that `awaited` is waited for. Raises what `work` raises, and TimeoutError.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    started_at = time.monotonic()
    progressed_at = started_at
    last = progress()
    while not wait([future], LOOK_S).done:
        now = time.monotonic()
        present = progress()
        if present != last:
            last = present
            progressed_at = now
        if now - progressed_at > limit_s:
            raise TimeoutError(f"no answer within {limit_s:.0f} s")
        if announce and is_main_rank() and now - started_at > ANNOUNCE_S:
            log_line(f"waiting for {awaited}", error=True)
            announce = False
    return future.result()


@contextmanager
def announced(awaited: str) -> Iterator[None]:
    """If the body takes more than ANNOUNCE_S, a line says that `awaited` is waited for. Sets no time limit."""
    timer = Timer(ANNOUNCE_S, log_line, [f"waiting for {awaited}"], {"error": True})
    timer.daemon = True
    if is_main_rank():
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def check_credentials(scheme: str, subject: str) -> None:
    """Raise UserError for an address of Google's store if there are no credentials.

    gcsfs would try without them for minutes. This may ask the machine's metadata server, for seconds.
    """
    if scheme not in GOOGLE or "STORAGE_EMULATOR_HOST" in os.environ:
        return
    from fsspec import get_filesystem_class
    from fsspec.config import conf

    get_filesystem_class(scheme)  # raises ImportError if the scheme's library is not installed
    if any(name in conf.get(each, {}) for each in GOOGLE for name in ("token", "endpoint_url")):
        return
    from google import auth

    try:
        auth.default()
    except Exception as error:
        raise no_credentials(subject, error) from error


def no_credentials(subject: str, error: BaseException) -> UserError:
    """The UserError for an error of NO_CREDENTIALS."""
    reason = one_line(error).partition(". ")[0]
    remedy = GOOGLE_REMEDY if type(error).__name__ == "DefaultCredentialsError" else AMAZON_REMEDY
    return UserError(f"{subject} has no credentials ({reason}); {remedy}")


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
