"""The next block and the next shard are prefetched in time and within a bound, and nothing is left of dropped ones."""

import asyncio
import gc
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from clipscale.data.shards import remote, remote_object, scan
from clipscale.data.shards.access import DIRECT, EVENT, Access, ReadContext, SourceError
from clipscale.data.shards.store import Store
from tests.data.files import write_shards
from tests.data.shards.web import Web
from tests.data.streams import contents, open_stream, processes_of

pytestmark = pytest.mark.timeout(60)


def soon(true: Callable[[], object]) -> bool:
    """Whether it becomes true without further reading."""
    until = time.monotonic() + 20
    while not true() and time.monotonic() < until:
        time.sleep(0.002)
    return bool(true())


def enough() -> None:
    """The tick of a reader that stops waiting."""
    raise InterruptedError


def test_the_next_block_is_prefetched_while_one_is_used(tmp_path: Path, web: Web) -> None:
    data = random.Random(0).randbytes(200_000)
    (tmp_path / "data").write_bytes(data)
    file = Store().open(f"{web.url}/data").stream
    assert file.read(1000) == data[:1000]
    ranges = ["bytes=0-0", "bytes=0-4095", "bytes=4096-20479"]
    assert soon(lambda: [asked for _, asked in web.requests] == ranges), web.requests
    assert file.read() == data[1000:]
    assert file.seek(100_000) and file.read(50) == data[100_000:100_050]
    assert soon(lambda: web.requests[-1][1] == "bytes=104096-120479"), "from the first size on again"
    file.close()
    assert soon(lambda: remote._budget.reserved == 0)


def test_a_request_that_has_begun_is_dropped_without_waiting() -> None:
    """The garbage collector may do so in the thread that would end the request."""
    request = object.__new__(remote.BlockRequest)
    request.future, request._reserved = Future(), 0
    assert request.future.set_running_or_notify_cancel()
    request.drop(lambda reason: pytest.fail(reason))


def test_fetching_overlaps_with_use(tmp_path: Path, web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty blocks, each with 20 ms to fetch and 20 ms to use it."""
    monkeypatch.setattr(remote, "LARGEST_BLOCK", 4096)
    (tmp_path / "data").write_bytes(bytes(20 * 4096))
    web.faults = lambda number, _: time.sleep(0.02)  # type: ignore[func-returns-value]
    took = {}
    for bound in (0, 1 << 20):
        monkeypatch.setattr(remote, "PREFETCH_BYTES", bound)
        begun = time.monotonic()
        with closing(Store().open(f"{web.url}/data").stream) as file:
            while file.read(1024):
                time.sleep(0.005)
        took[bound] = time.monotonic() - begun
    assert took[0] > 0.8 and took[1 << 20] < 0.75 * took[0], took


def test_prefetched_bytes_are_bounded(tmp_path: Path, web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "PREFETCH_BYTES", 3 * 16384)
    data = random.Random(0).randbytes(100_000)
    (tmp_path / "data").write_bytes(data)
    files = [Store().open(f"{web.url}/data").stream for _ in range(12)]
    most, got = 0, [b""] * len(files)
    for _ in range(100):
        for number, file in enumerate(files):
            got[number] += file.read(1000)
            most = max(most, remote._budget.reserved)
    assert got == [data] * len(files)
    assert 16384 < most <= 3 * 16384, most
    assert remote._budget.reserved == 0


def test_a_reader_that_stops_waiting_releases_the_budget(
    tmp_path: Path, web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").write_bytes(bytes(50_000))
    monkeypatch.setattr(remote_object, "TICK_S", 0.01)
    answering = threading.Event()
    web.faults = lambda number, _: answering.wait(10) if number > 1 else None  # type: ignore[assignment, return-value]
    store = Store()
    file = store.open(f"{web.url}/data").stream
    file.read(4000)
    assert remote._budget.reserved > 0

    store.tick = enough
    with pytest.raises(InterruptedError):
        file.read(1000)
    answering.set()
    assert soon(lambda: remote._budget.reserved == 0)


class Letters:
    """An object of letters that counts the requests that have ended; it may keep one waiting."""

    concurrent = True
    ended, waits = 0, False

    async def stat(self) -> tuple[int, str]:
        return 40_000, ""

    async def read(self, start: int, stop: int, state: tuple[int, str], pieces: list[bytes]) -> None:
        try:
            pieces.append(b"x" * (stop - start))
            await asyncio.sleep(10 * self.waits)
        finally:
            self.ended += 1


def test_a_file_that_the_collector_closes_waits_for_no_lock(web: Web) -> None:
    """This thread may hold the lock. A request that is given up ends at once."""
    origin = Letters()
    file = remote.RemoteFile(origin, Store())
    file.read(4096)
    assert file._prefetch and soon(file._prefetch.future.done)
    file.itself = file
    del file
    with remote._budget._lock:
        gc.collect()
    assert remote._budget.reserved == 0 and origin.ended == 2

    origin.waits = True
    with pytest.raises(InterruptedError) as kept:
        remote.RemoteFile(origin, ReadContext(tick=enough)).read(1)
    assert soon(lambda: origin.ended == 3), kept


def test_a_file_near_the_end_of_its_block_gets_more_of_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "PREFETCH_BYTES", 100)
    budget = remote.PrefetchBudget()
    assert [budget.reserve(40, need) for need in (0.5, 0.7, 0.9, 1.0)] == [True, False, True, False]
    budget.release(40)
    assert budget.reserve(40, 1.0)


def test_the_next_shard_is_opened_before_it_is_needed(tmp_path: Path, web: Web) -> None:
    paths = write_shards(tmp_path, [60, 20])
    urls = [f"{web.url}/{path.name}" for path in paths]
    web.faults = lambda number, path: "503" if path == "/00001.tar" and number % 2 else None
    store = Store()
    store.expect(urls[1])
    first = store.open(urls[0]).stream
    half = first.length // 2
    assert first.read(half) == paths[0].read_bytes()[:half]
    time.sleep(0.05)
    assert {path for path, _ in web.requests} == {"/00000.tar"}, "too early"
    assert first.read() == paths[0].read_bytes()[half:]
    assert soon(lambda: ("/00001.tar", "bytes=0-4095") in web.requests), web.requests
    second = store.open(urls[1]).stream
    assert second.read() == paths[1].read_bytes() and second.context is store
    assert store.counts == {EVENT + "http_503": web.done["503"]} and web.done["503"] > 1
    assert [path for path, asked in web.requests if asked == "bytes=0-0"].count("/00001.tar") <= 2
    first.close()
    second.close()


def read_first(folder: Path, web: Web, access: Access = DIRECT) -> tuple[Store, list[Path], list[str]]:
    """A store that has read the first of two shards and prefetches the second; the shards, and their addresses."""
    paths = write_shards(folder, [60, 60])
    urls = [f"{web.url}/{path.name}" for path in paths]
    store = Store(access)
    store.expect(urls[1])
    with closing(store.open(urls[0]).stream) as file:
        file.read()
    return store, paths, urls


def test_a_shard_that_changes_after_its_prefetch_is_given_up(tmp_path: Path, web: Web) -> None:
    store, paths, urls = read_first(tmp_path, web)
    assert soon(
        lambda: ("/00001.tar", "bytes=0-4095") in web.requests and "prefetch-" not in str(threading.enumerate())
    )
    before = paths[1].read_bytes()
    paths[1].write_bytes(bytes(len(before)))
    with closing(store.open(urls[1]).stream) as file:
        assert file.read(4096) == before[:4096], "the prefetched block"
        with pytest.raises(SourceError) as error:
            file.read()
    assert error.value.reason == "changed_shard"


def test_another_shard_than_the_expected_one_can_be_opened(tmp_path: Path, web: Web) -> None:
    """As the pictures that a table names are, between shards."""
    paths = write_shards(tmp_path, [60, 20, 30])
    urls = [f"{web.url}/{path.name}" for path in paths]
    store = Store()
    store.expect(urls[1])
    for number in (0, 2, 1):
        with closing(store.open(urls[number]).stream) as file:
            assert file.read() == paths[number].read_bytes(), number


def test_a_missing_shard_is_reported_when_it_is_opened(tmp_path: Path, web: Web) -> None:
    (path,) = write_shards(tmp_path, [3])
    store = Store()
    store.expect(f"{web.url}/none.tar")
    with closing(store.open(f"{web.url}/00000.tar").stream) as file:
        assert file.read() == path.read_bytes()
    with pytest.raises(SourceError) as error:
        store.open(f"{web.url}/none.tar")
    assert error.value.reason == "missing_shard"


def test_the_next_copy_is_made_while_a_shard_is_read(tmp_path: Path, web: Web) -> None:
    paths = write_shards(tmp_path, [20, 30, 20])
    urls = [f"{web.url}/{path.name}" for path in paths]
    store = Store(Access(str(tmp_path / "copies")))
    store.expect(urls[1])
    first = store.open(urls[0]).stream
    copies = tmp_path / "copies" / "shards"
    assert soon(lambda: [path for path in copies.glob("*-00001.tar") if not path.name.startswith(".")])
    assert first.read() == paths[0].read_bytes()
    count = len(web.requests)
    store.expect(urls[2])
    assert store.open(urls[1]).stream.read() == paths[1].read_bytes()
    assert not [path for path, _ in web.requests[count:] if path == "/00001.tar"], "asked for again"
    store.expect(None)
    assert soon(lambda: "prefetch-" not in str(threading.enumerate())) and not list(copies.glob(".*.part"))


def test_a_shard_whose_reader_stops_waiting_is_closed(tmp_path: Path, web: Web) -> None:
    answering = threading.Event()

    def hold(number: int, path: str) -> None:
        if path == "/00001.tar":
            answering.wait(10)

    web.faults = hold
    store, _, urls = read_first(tmp_path, web)

    store.tick = enough
    with pytest.raises(InterruptedError) as kept:
        store.open(urls[1])
    answering.set()
    assert soon(lambda: "prefetch-" not in str(threading.enumerate()))
    assert remote._budget.reserved == 0, kept


def test_faults_of_a_dropped_shard_are_counted(tmp_path: Path, web: Web) -> None:
    web.faults = lambda number, path: "503" if web.requests[number] == ("/00001.tar", "bytes=0-4095") else None
    store, _, _ = read_first(tmp_path, web)
    assert store._prefetch
    block = store._prefetch._opened.result()[0]._prefetch
    assert soon(block.future.done) and web.done["503"] == 1
    store.expect(None)
    assert store.counts == {EVENT + "http_503": 1} and remote._budget.reserved == 0


def test_a_dropped_shard_is_not_requested_further(tmp_path: Path, web: Web) -> None:
    web.faults = lambda number, path: "503" if path == "/00001.tar" else None
    store, _, _ = read_first(tmp_path, web, Access(retries=1_000_000))
    assert soon(lambda: web.done["503"] > 3), "requested again and again"
    store.expect(None)
    assert soon(lambda: "prefetch-" not in str(threading.enumerate())) and len(web.requests) < 1000


def test_a_cancelled_copy_releases_the_budget(tmp_path: Path, web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clipscale.data.shards.cache.LARGEST_BLOCK", 4096)
    (path,) = write_shards(tmp_path, [200])

    def enough() -> None:
        if remote._budget.reserved:
            raise InterruptedError

    with pytest.raises(InterruptedError) as kept:
        Store(Access(str(tmp_path / "copies")), tick=enough).open(f"{web.url}/{path.name}")
    assert soon(lambda: "prefetch-" not in str(threading.enumerate()))
    assert remote._budget.reserved == 0, kept


def test_nothing_is_left_of_a_closed_stream(tmp_path: Path, web: Web) -> None:
    write_shards(tmp_path, [80, 90, 70])
    caches: list[dict[str, Any]] = [{}, {"cache": str(tmp_path / "copies")}]
    for options in caches:
        stream = open_stream(f"{web.url}/{{00000..00002}}.tar", batch=8, order="resampled", **options)
        contents(stream, 3)
        stream.close()
        assert soon(lambda: "prefetch-" not in str(threading.enumerate())), threading.enumerate()
        assert remote._budget.reserved == 0


def test_loader_processes_prefetch(tmp_path: Path, web: Web) -> None:
    """They also end at once although their threads wait for a silent server."""
    write_shards(tmp_path, [80, 90, 70])
    scan.update_indexes(
        [f"{web.url}/0000{n}.tar" for n in range(3)],
    )
    local = open_stream(tmp_path, batch=16)
    web.faults = lambda number, path: "503" if number % 7 == 0 else None
    with open_stream(f"{web.url}/{{00000..00002}}.tar", batch=16, workers=2) as stream:
        assert contents(stream, 16) == contents(local, 16), "more than an epoch"
        assert stream.seen["http_503"] > 0 and not stream.broken
    answering, held = threading.Event(), []

    def hold(number: int, path: str) -> None:
        if len(web.requests) > before + 8:
            held.append(path)
            answering.wait(20)

    before, web.faults = len(web.requests), hold  # type: ignore[assignment]
    stream = open_stream(f"{web.url}/{{00000..00002}}.tar", batch=160, workers=2)
    assert soon(lambda: held)
    processes = list(processes_of(stream))
    begun = time.monotonic()
    stream.close()
    took = time.monotonic() - begun
    answering.set()
    assert took < 4 and not any(process.is_alive() for process in processes), took
