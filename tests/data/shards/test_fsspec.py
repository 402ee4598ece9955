"""Remote shards through fsspec: faults are retried, silent file systems left, changed objects given up."""

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest

from clipscale.data.shards import remote_object
from clipscale.data.shards.access import EVENT
from tests.data.files import write_shards
from tests.data.shards.test_remote import members, read

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("small_blocks")]


class Shaky:
    """A file system of fsspec that fails, returns too little, or changes."""

    def __init__(self, data: bytes) -> None:
        self.data, self.calls, self.etag = data, 0, "a"
        self.misbehave: Callable[[int], str | None] = lambda call: None

    async def _info(self, path: str) -> dict[str, Any]:
        return {"size": len(self.data), "ETag": self.etag}

    async def _cat_file(self, path: str, start: int, end: int) -> bytes:
        self.calls += 1
        match self.misbehave(self.calls):
            case "fail":
                raise ConnectionError("reset")
            case "short":
                return self.data[start : (start + end) // 2]
            case "change":
                self.data, self.etag = bytes(len(self.data)), "b"
        return self.data[start:end]


@pytest.mark.parametrize("fault", ["fail", "short"])
def test_fsspec_faults_are_retried(tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_shards(tmp_path, [30])[0]
    shaky = Shaky(path.read_bytes())
    shaky.misbehave = lambda call: fault if call % 3 == 0 else None
    monkeypatch.setattr("fsspec.core.url_to_fs", lambda url, **_: (shaky, url))
    samples, problem, counts = read("s3://bucket/00000.tar")
    assert members(samples) == members(read(str(path))[0]) and problem.reason is None
    assert counts == {EVENT + {"fail": "failed_request", "short": "short_answer"}[fault]: shaky.calls // 3}


def test_an_object_that_changes_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_shards(tmp_path, [30])[0]
    before = members(read(str(path))[0])
    shaky = Shaky(path.read_bytes())
    shaky.misbehave = lambda call: "change" if call == 4 else None
    monkeypatch.setattr("fsspec.core.url_to_fs", lambda url, **_: (shaky, url))
    samples, problem, _ = read("s3://bucket/00000.tar")
    assert problem.reason == "changed_shard" and 0 < len(samples) < 30
    assert members(samples) == before[: len(samples)]


class Mute(fsspec.AbstractFileSystem):
    """A file system without asyncio or time-outs, whose first connection gets stuck after a few answers."""

    protocol = "mute"
    data = b""
    answers: ClassVar[list[int]] = []

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.left = self.answers.pop(0)

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        return {"size": len(self.data)}

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        self.left -= 1
        if self.left < 0:
            threading.Event().wait(20)
        return self.data[start:end]


def test_a_file_system_that_falls_silent_gets_another_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_shards(tmp_path, [30])[0]
    fsspec.register_implementation("mute", Mute, clobber=True)
    monkeypatch.setattr(Mute, "data", path.read_bytes())
    monkeypatch.setattr(Mute, "answers", answers := [4, 1000])
    samples, problem, counts = read("mute://remote/00000.tar", wait_s=0.2)
    assert members(samples) == members(read(str(path))[0]) and problem.reason is None
    assert counts == {EVENT + "no_answer": 1} and answers == []
    Mute.clear_instance_cache()


@pytest.mark.parametrize("trickles", [False, True])
def test_a_silent_s3_server_is_given_up_in_time(trickles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It accepts connections and sends nothing, or a letter now and then."""
    s3fs = pytest.importorskip("s3fs")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    connections: list[socket.socket] = []
    over = threading.Event()

    def serve(server: socket.socket) -> None:
        while not over.wait(0.02):
            with suppress(BlockingIOError):
                connections.append(server.accept()[0])
                connections[-1].sendall(b"HTTP/1.1 200 OK\r\nX: " if trickles else b"")
            for connection in connections if trickles else ():
                with suppress(OSError):  # the client has gone away
                    connection.sendall(b"x")

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        thread = threading.Thread(target=serve, args=(server,))
        thread.start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.getsockname()[1]}")

        async def connect() -> None:
            """Loading botocore's descriptions may take longer than the time-out on a busy machine."""
            await remote_object._file_system("s3://bucket/00000.tar", 0.5)[0].set_session()

        remote_object.submit(connect()).result()
        begun = time.monotonic()
        samples, problem, counts = read("s3://bucket/00000.tar", wait_s=0.5, retries=1)
        if not trickles:  # although an answer of so many bytes may take long
            with pytest.raises(remote_object.TransientError, match=r"[tT]imeout"):
                remote_object.submit(
                    remote_object.remote_object("s3://bucket/00000.tar", 0.5).read(0, 8 << 20, (1 << 30, ""), [])
                ).result()
        took = time.monotonic() - begun
        over.set()
        thread.join()
    for connection in connections:
        connection.close()
    s3fs.S3FileSystem.clear_instance_cache()
    assert not samples and problem.reason == "unreachable_shard", problem
    assert counts.total() == 2 and connections and 1 < took < 6, (counts, len(connections), took)


def test_a_real_fsspec_file_system_is_read(tmp_path: Path) -> None:
    path = write_shards(tmp_path, [12])[0]
    fsspec.filesystem("memory").pipe("/remote/00000.tar", path.read_bytes())
    assert members(read("memory://remote/00000.tar")[0]) == members(read(str(path))[0])
    assert read("memory://remote/none.tar")[1].reason == "missing_shard"
