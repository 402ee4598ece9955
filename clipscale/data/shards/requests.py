"""Requests for ranges of remote objects, on fsspec's event loop.

A request has a time limit, takes no more bytes than it asks for, and says by its error whether it may be repeated.
"""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Mapping
from concurrent import futures
from contextlib import asynccontextmanager, suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote, unquote

from clipscale.common.errors import UserError
from clipscale.common.remote import NO_CREDENTIALS, check_credentials, no_credentials
from clipscale.data.addresses import bucket_of, scheme_of

if TYPE_CHECKING:
    import aiohttp

# Seconds of a server's silence after which a request is repeated.
WAIT_S = 30.0
# Least bytes of a cut-off answer that count as progress. A server that sends a byte a request must not hold a reader.
MIN_PROGRESS_BYTES = 1 << 14
# The time limit of a request allows for at least this speed.
MIN_REQUEST_BYTES_PER_S = 1 << 16
# Counter of requests that timed out.
NO_ANSWER = "no_answer"
# Counter of requests to a server that cannot be found.
UNKNOWN_HOST = "unknown_host"
# The exceptions of aiohttp and botocore for a server that cannot be found.
_NO_HOST = ("ClientConnectorDNSError", "EndpointConnectionError")
# HTTP statuses of failures that may pass.
_TRANSIENT = {408, 425, 429, 500, 502, 503, 504}
# HTTP statuses of a redirect.
_MOVED = {301, 302, 303, 307, 308}
# Most redirects that are followed.
REDIRECTS = 10
# Settings of fsspec's http that are sent only to the server in the user's address.
_SECRETS = ("headers", "auth", "cookies", "params")
_RANGE = re.compile(r"bytes ([0-9]{1,18})-[0-9]{1,18}/([0-9]{1,18})$")
# Characters of an address that are sent as they are, since it may be signed; others, such as spaces, are quoted.
_IN_ADDRESSES = "!#$%&'()*+,/:;=?@[]~"


class ObjectState(NamedTuple):
    """What identifies the content of an object, or of a file."""

    # Bytes.
    size: int
    # ETag, generation or time of change.
    version: str


Request = futures.Future[tuple[bytes, ObjectState]]


class SourceError(Exception):
    """A shard cannot be read further. `reason` is a fixed word, under which its lost samples are counted."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(detail or reason)
        self.reason = reason


class TransientError(SourceError):
    """A request failed in a way that may pass. `reason` names its counter."""

    # The answer's header Retry-After.
    retry_after = ""


def start_request(url: str, start: int, stop: int) -> Request:
    """Begin a request for bytes start..stop of an object."""
    from fsspec.asyn import get_loop

    return asyncio.run_coroutine_threadsafe(_request(url, start, stop), get_loop())


async def _request(url: str, start: int, stop: int) -> tuple[bytes, ObjectState]:
    """Bytes start..stop, or fewer where the object ends or the answer is cut off, and the object's state.

    Raises TransientError, SourceError for what does not pass, and UserError without credentials.
    """
    begun = time.monotonic()
    limit = WAIT_S + (stop - start) / MIN_REQUEST_BYTES_PER_S
    try:
        if scheme_of(url) in ("http", "https"):
            data, state = await _from_web(url, start, stop, limit)
        elif scheme_of(url) == "hf":  # the hub's file system has no asyncio, and makes an API call for each block
            from huggingface_hub.utils import build_hf_headers

            address = await asyncio.wait_for(asyncio.to_thread(_hub_address, url), WAIT_S)
            data, state = await _from_web(address, start, stop, limit, build_hf_headers())
        else:
            data, state = await asyncio.wait_for(_from_file_system(url, start, stop), limit)
    except (SourceError, UserError):
        raise
    except TimeoutError as error:
        seconds = time.monotonic() - begun
        raise TransientError(NO_ANSWER, f"no answer of {stop - start} bytes within {seconds:.3g} s") from error
    except (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError) as error:
        raise SourceError("missing_shard", f"{type(error).__name__}: {error}") from error
    except Exception as error:  # each library raises exceptions of its own
        if type(error).__name__ in NO_CREDENTIALS:
            raise no_credentials(f"data.train: {bucket_of(url)}", error) from error
        reason = UNKNOWN_HOST if type(error).__name__ in _NO_HOST else "failed_request"
        raise TransientError(reason, f"{type(error).__name__}: {error}") from error
    missing = min(stop, state.size) - start - len(data)
    if missing > 0 and len(data) < MIN_PROGRESS_BYTES:
        came = f"{len(data)} of {len(data) + missing} bytes came in {time.monotonic() - begun:.3g} s"
        raise TransientError("short_answer", came)
    return data, state


async def _from_file_system(url: str, start: int, stop: int) -> tuple[bytes, ObjectState]:
    """Bytes start..stop and the object's state, by fsspec's file system, with its credentials and settings."""
    from fsspec.core import url_to_fs

    await asyncio.to_thread(check_credentials, scheme_of(url), f"data.train: {bucket_of(url)}")
    system, path = url_to_fs(url, use_listings_cache=False)
    data = await system._cat_file(path, start=start, end=stop)
    # Asked after the bytes: if the version is still the one of the first request, the bytes are of that version.
    info = await system._info(path)
    version = next((str(info[name]) for name in ("generation", "ETag", "etag") if name in info), "")
    return data[: stop - start], ObjectState(int(info["size"]), version)


@asynccontextmanager
async def _http_get(
    url: str, limit: float, span: Mapping[str, str], *, send_secrets: bool = True, headers: Mapping[str, str] = {}
) -> AsyncIterator["aiohttp.ClientResponse"]:
    """The answer to a request of at most `limit` seconds, by fsspec's http session with its settings.

    Follows at most REDIRECTS redirects. `span`: the header that names a range. `send_secrets`: send the user's _SECRETS
    and these `headers`. After a redirect to another server neither is sent any more.
    """
    import aiohttp
    from yarl import URL

    timeout = aiohttp.ClientTimeout(limit, sock_connect=WAIT_S, sock_read=WAIT_S)
    for redirects_left in range(REDIRECTS, -1, -1):
        session, options = await _session_and_options(send_secrets)
        secret_headers = headers if send_secrets else {}
        options["headers"] = {**options.get("headers", {}), **secret_headers, **span, "Accept-Encoding": "identity"}
        address = URL(quote(url, safe=_IN_ADDRESSES), encoded=True)
        host = unquote(address.raw_host or "")
        if not host.isascii():
            address = address.with_host(host)  # encodes it by IDNA, as the DNS has it
        options["allow_redirects"] = False
        async with session.get(address, timeout=timeout, auto_decompress=False, **options) as answer:
            is_redirect = answer.status in _MOVED and "Location" in answer.headers
            if not is_redirect or redirects_left == 0:
                yield answer
                return
            target = answer.url.join(URL(answer.headers["Location"], encoded=True))
            send_secrets = send_secrets and target.origin() == answer.url.origin()
        url = str(target)


async def _session_and_options(send_secrets: bool) -> tuple["aiohttp.ClientSession", dict[str, Any]]:
    """fsspec's http session, and the options of its requests: the user's settings, without _SECRETS if not
    `send_secrets`."""
    from fsspec import filesystem
    from fsspec.config import conf

    def allowed(settings: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in settings.items() if send_secrets or name not in _SECRETS}

    configured = allowed(conf.get("http", {}).get("client_kwargs", {}))
    system = filesystem("http", client_kwargs={"trust_env": True, **configured})  # True: HTTPS_PROXY
    return await system.set_session(), allowed(system.kwargs)


async def _receive(answer: "aiohttp.ClientResponse", data: bytearray, size: int) -> None:
    """Add what comes to `data`, until it has `size` bytes. Raises what aiohttp raises."""
    while len(data) < size and not answer.content.at_eof():
        data += await answer.content.read(size - len(data))


def first_bytes(url: str, most: int, *, secrets: bool) -> bytes:
    """The first bytes of an object of the web, by a request that any server answers, within two minutes.

    `secrets`: send the headers that the user has set for fsspec's http, to this server alone. Raises TimeoutError,
    OSError for another status than 200, and what aiohttp raises.
    """
    from fsspec.asyn import get_loop

    async def request() -> bytes:
        data = bytearray()
        async with _http_get(url, 4 * WAIT_S, {}, send_secrets=secrets) as answer:
            if answer.status != 200:
                raise OSError(f"HTTP status {answer.status}")
            await _receive(answer, data, most)
        return bytes(data)

    limited = asyncio.wait_for(request(), 4 * WAIT_S)
    return asyncio.run_coroutine_threadsafe(limited, get_loop()).result()


async def _from_web(
    url: str, start: int, stop: int, limit: float, headers: Mapping[str, str] = {}
) -> tuple[bytes, ObjectState]:
    """Bytes start..stop that arrive within `limit` seconds, and the object's state.

    fsspec's own `_cat_file` does not serve. It reads all of an answer, however long a hostile server makes it. It
    returns neither the version of the bytes, nor the bytes that came before an error.
    """
    from aiohttp import ClientError

    span = {"Range": f"bytes={start}-{stop - 1}"}
    async with _http_get(url, limit, span, headers=headers) as answer:
        if answer.status in _TRANSIENT:
            busy = TransientError(f"http_{answer.status}")
            busy.retry_after = answer.headers.get("Retry-After", "")
            raise busy
        if answer.status == 416:
            raise SourceError("changed_shard" if start else "unreadable_shard", "shorter than it was, or empty")
        if answer.status == 200:
            raise SourceError("unreadable_shard", "the server answers no requests for ranges of bytes")
        if answer.status != 206:
            raise SourceError("missing_shard", f"HTTP status {answer.status}")
        received = _RANGE.match(answer.headers.get("Content-Range", ""))
        if received is None or int(received[1]) != start:
            raise TransientError("wrong_range", answer.headers.get("Content-Range", "no Content-Range"))
        version = answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""
        state = ObjectState(int(received[2]), version)
        data = bytearray()
        size = min(stop, state.size) - start
        with suppress(ClientError, TimeoutError):  # the next request goes on behind what came
            await _receive(answer, data, size)
    return bytes(data), state


@lru_cache(1 << 12)
def _hub_address(url: str) -> str:
    from fsspec.core import url_to_fs

    system, path = url_to_fs(url)
    return str(system.url(path))
