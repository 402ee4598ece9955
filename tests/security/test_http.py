"""A server may be slow, endless, lying or broken: every request ends in time, with bounded memory, and with a reason that is counted."""

import gzip
import socket
import ssl
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import fsspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clipscale.cli.main import main
from clipscale.data.shards import remote_object
from clipscale.data.shards.access import Access, SourceError
from clipscale.data.shards.store import Store
from tests.conftest import TINY

pytestmark = pytest.mark.timeout(60)

ACCESS = Access(retries=1, wait_s=0.3)
PART = b"HTTP/1.1 206 Partial\r\nContent-Range: bytes 0-0/40\r\n"
WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 40\r\nETag: x\r\n\r\n" + b"a" * 40
Answer = Callable[[socket.socket], None]


@contextmanager
def server(answer: Answer, received: list[bytes] | None = None, *, reads: bool = True) -> Iterator[str]:
    """The address of a server that reads a request, if it `reads`, and lets `answer` do with the connection as it likes."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            asked = connection.recv(1 << 16) if reads else b""
            if received is not None:
                received.append(asked)
            answer(connection)

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listening.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}/0.tar"
    listening.shutdown(socket.SHUT_RDWR)
    listening.close()


def endless(first: bytes, then: bytes, pause: float = 0.0) -> Answer:
    """Sends `first`, and `then` again and again until the client leaves."""

    def answer(connection: socket.socket) -> None:
        connection.sendall(first)
        while True:
            connection.sendall(then)
            time.sleep(pause)

    return answer


def whole(data: bytes) -> Answer:
    return lambda connection: connection.sendall(data)


BLOCK = b"x" * (1 << 16)
REDIRECT = b"HTTP/1.1 302 Found\r\nLocation: /next\r\n"
ANSWERS: dict[str, Answer] = {
    "an endless body": endless(PART + b"\r\n", BLOCK),
    "an endless body in chunks": endless(PART + b"Transfer-Encoding: chunked\r\n\r\n", b"10000\r\n" + BLOCK + b"\r\n"),
    "an endless body of unknown length": endless(b"HTTP/1.1 200 OK\r\n\r\n", BLOCK),
    "an endless body of a redirection": endless(REDIRECT + b"\r\n", BLOCK),
    "a packed body of a redirection": endless(REDIRECT + b"Content-Encoding: gzip\r\n\r\n", gzip.compress(bytes(1 << 24))),
    "endless redirections": whole(REDIRECT + b"Content-Length: 0\r\n\r\n"),
    "a redirection to a file": whole(b"HTTP/1.1 302 Found\r\nLocation: file:///etc/passwd\r\nContent-Length: 0\r\n\r\n"),
    "a redirection to no address": whole(b"HTTP/1.1 302 Found\r\nLocation: http://[\xff\r\nContent-Length: 0\r\n\r\n"),
    "a cut before the status": whole(b""),
    "a cut on the first byte": whole(PART + b"Content-Length: 1\r\n\r\n"),
    "a cut in the first chunk": whole(PART + b"Transfer-Encoding: chunked\r\n\r\n"),
    "endless headers": endless(b"HTTP/1.1 206 Partial\r\n", b"X-More: " + b"y" * 60_000 + b"\r\n"),
    "slow headers": endless(PART, b"X", pause=0.05),
    "a slow status": endless(b"HTTP", b"/", pause=0.05),
    "a slow body": endless(b"HTTP/1.1 206 Partial\r\nContent-Range: bytes 0-39/40\r\nContent-Length: 40\r\n\r\n", b"x", pause=0.1),
    "slow sizes of chunks": endless(PART + b"Transfer-Encoding: chunked\r\n\r\n", b"0", pause=0.05),
    "a length that is no number": whole(b"HTTP/1.1 200 OK\r\nContent-Length: \xb2\r\n\r\n"),
    "a length of 5,000 digits": whole(b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n"),
    "a range of 5,000 digits": whole(b"HTTP/1.1 206 P\r\nContent-Range: bytes 0-0/" + b"9" * 5000 + b"\r\n\r\n"),
    "a wait that is no number": whole(b"HTTP/1.1 503 No\r\nRetry-After: \xb2\r\nContent-Length: 0\r\n\r\n"),
    "a wait of 500 digits": whole(b"HTTP/1.1 503 No\r\nRetry-After: " + b"9" * 500 + b"\r\nContent-Length: 0\r\n\r\n"),
}  # fmt: skip

READ_IN_PART = ("an endless body", "an endless body in chunks")
"""Those whose first 40 bytes are what was asked for."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_object, "LONGEST_WAIT_S", 0.05)


def read(url: str) -> bytes:
    stream = Store(ACCESS).open(url).stream
    try:
        data: bytes = stream.read()
        return data
    finally:
        stream.close()


@pytest.mark.parametrize("what", ANSWERS)
def test_a_request_ends_in_time_and_with_a_reason(what: str) -> None:
    tracemalloc.start()
    try:
        with server(ANSWERS[what]) as url:
            began = time.monotonic()
            if what in READ_IN_PART:
                assert len(read(url)) == 40
            else:
                with pytest.raises(SourceError):
                    read(url)
            assert time.monotonic() - began < 5
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


def test_an_honest_answer_is_read() -> None:
    with server(whole(WHOLE)) as url:
        assert read(url) == b"a" * 40


def test_one_byte_a_request_is_no_progress() -> None:
    """Each request gives one byte more: that would take days for a shard."""
    sent = []

    def answer(connection: socket.socket) -> None:
        sent.append(1)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        connection.sendall(bytes(len(sent)))

    with server(answer) as url, pytest.raises(SourceError):
        read(url)
    assert len(sent) < 10


def stat(url: str, sign: Callable[[Any], object] | None = None, wait_s: float = 20.0) -> tuple[int, str]:
    return remote_object.result(remote_object.submit(remote_object.HttpObject(url, wait_s, sign).stat()), lambda: None)


@pytest.mark.filterwarnings("ignore:.*[aA]uth:DeprecationWarning")  # aiohttp's, of settings that people have
@pytest.mark.parametrize("netrc", [False, True])
@pytest.mark.parametrize("signed", [False, True])
def test_credentials_stay_with_the_host_they_are_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, netrc: bool, signed: bool
) -> None:
    """A redirection to another host or port gets none. Where we sign, those of ~/.netrc and of fsspec's configuration stay away."""
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password secret\n" * netrc)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    client = {"headers": {"X-Key": "k"}, "cookies": {"c": "k"}}
    client |= {} if netrc else {"auth": aiohttp.BasicAuth("me", "secret")}
    monkeypatch.setitem(fsspec.config.conf, "http", {"client_kwargs": client, "headers": {"X-Other": "k"}})
    received: dict[str, list[bytes]] = {"own": [], "other": []}

    with server(whole(WHOLE), received["other"]) as elsewhere:
        elsewhere = elsewhere.replace("127.0.0.1", "localhost")
        moved = whole(f"HTTP/1.1 302 F\r\nLocation: {elsewhere}\r\nContent-Length: 0\r\n\r\n".encode())
        with server(moved, received["own"]) as url:
            assert stat(url, (lambda headers: headers.update(Authorization="Bearer s")) if signed else None) == (
                40,
                "x",
            )
    configured = [b"X-Key: k", b"X-Other: k", b"Cookie: c=k", b"Authorization: Basic"]
    assert [line in received["own"][0] for line in configured] == [not signed] * 4, received
    assert (b"Authorization: Bearer s" in received["own"][0]) == signed
    assert not any(line.split(b":")[0] in received["other"][0] for line in configured), received


def test_ten_redirections_are_followed_and_no_more() -> None:
    received: list[bytes] = []
    for most in (10, 11):
        moved = REDIRECT + b"Connection: close\r\nContent-Length: 0\r\n\r\n"
        received.clear()
        with server(lambda c: c.sendall(moved if len(received) <= most else WHOLE), received) as url:  # noqa: B023
            if most == 10:
                assert stat(url) == (40, "x")
            else:
                with pytest.raises(SourceError, match="TooManyRedirects"):
                    stat(url)
        assert len(received) == 11


def test_an_address_is_sent_as_it_is_signed() -> None:
    received: list[bytes] = []
    path = "/x%3Ay/z%7E?X=a%2Fb%3Ac&S=%2f&T=a%27b%28&U=a+b"
    with server(whole(WHOLE), received) as url:
        stat(url.replace("/0.tar", path))
        stat(url.replace("/0.tar", "/a b/\u00fc.tar"))
    assert [line.split(b" ")[1] for line in received] == [path.encode(), b"/a%20b/%C3%BC.tar"]


def test_a_server_that_is_silent_says_for_how_long() -> None:
    with (
        server(lambda _: time.sleep(2)) as url,
        pytest.raises(remote_object.TransientError, match=r"no answer within 0\.5 s"),
    ):
        stat(url, wait_s=0.5)


def test_a_certificate_that_nobody_trusts_may_be_replaced_and_a_bundle_is_heeded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), 1, now - timedelta(days=1), now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    bundle = tmp_path / "server.pem"
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    bundle.write_bytes(private + certificate.public_bytes(Encoding.PEM))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(bundle)

    def answer(connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True) as secure:
            secure.recv(1 << 16)
            secure.sendall(WHOLE)

    with server(answer, reads=False) as url:
        url = url.replace("http://127.0.0.1", "https://localhost")
        remote_object._certificates.cache_clear()
        with pytest.raises(remote_object.TransientError) as error:
            stat(url)
        assert error.value.reason == "no_connection" and "ertificate" in str(error.value)
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(bundle))
        remote_object._certificates.cache_clear()
        assert stat(url) == (40, "x")
    remote_object._certificates.cache_clear()


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_bytes_for_an_answer_give_a_reason(data: st.DataObject) -> None:
    """Lines of headers with any values, and whatever follows."""
    name = st.sampled_from(
        ["Content-Length", "Content-Range", "Location", "Transfer-Encoding", "ETag", "Retry-After", "X"]
    )
    value = st.one_of(
        st.binary(max_size=20), st.sampled_from([b"40", b"bytes 0-0/40", b"bytes 0-39/40", b"chunked", b"-1", b"//"])
    )
    status = data.draw(st.sampled_from([b"200", b"206", b"302", b"307", b"404", b"416", b"503", b"999", b"x", b"100"]))
    headers = data.draw(st.lists(st.tuples(name, value), max_size=4))
    lines = b"".join(key.encode() + b": " + text + b"\r\n" for key, text in headers)
    body = data.draw(st.one_of(st.binary(max_size=60), st.just(b"a" * 40)))
    with server(whole(b"HTTP/1.1 " + status + b" x\r\n" + lines + b"\r\n" + body)) as url, suppress(SourceError):
        read(url)


@pytest.mark.parametrize(
    "url", ["ssh://host/0.tar", "nothing://host/0.tar", "hf://x", "http://[", "http://", "http:///x"]
)
def test_an_address_that_cannot_be_read_is_a_reason(url: str) -> None:
    with pytest.raises(SourceError):
        read(url)


@pytest.mark.slow
def test_a_table_with_any_address_ends_with_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "t.csv"
    table.write_text("filepath,caption\n" + "ssh://host/a.jpg,a\nnothing://x/b.jpg,b\n" * 20)
    words = ["train", *TINY, f"data.train={table}", f"run={tmp_path}/run", "log.wandb=disabled"]
    assert main(words) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: data.train: no usable sample")
