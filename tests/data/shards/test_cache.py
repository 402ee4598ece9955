"""Copies of remote shards are complete, within their bound and shared by processes. S3 shards are read like others."""

import fcntl
import multiprocessing
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from clipscale.data.shards import remote, scan
from clipscale.data.shards.access import EVENT, Access, SourceError
from clipscale.data.shards.listing import expand
from clipscale.data.shards.reader import ReadProblem, read_shard
from clipscale.data.shards.store import Store
from tests.data.files import picture, write_shards
from tests.data.shards.web import Web, fetch_often, finish, serving
from tests.data.streams import contents, open_stream

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("small_blocks")]


@pytest.fixture
def web(tmp_path: Path) -> Iterator[Web]:
    (tmp_path / "remote").mkdir()
    with serving(Web(tmp_path / "remote")) as served:
        yield served


def fetch(url: str, cache: Path, bound: int | None = None) -> tuple[bytes, Counter[str]]:
    counts: Counter[str] = Counter()
    stream = Store(Access(str(cache), bound), counts).open(url).stream
    try:
        return stream.read(), counts
    finally:
        stream.close()


def copies(cache: Path) -> list[Path]:
    return sorted(path for path in (cache / "shards").iterdir() if path.name != ".lock")


def test_a_copy_is_made_once(tmp_path: Path, web: Web) -> None:
    path = write_shards(tmp_path / "remote", [20])[0]
    url = f"{web.url}/00000.tar"
    assert fetch(url, tmp_path / "c")[0] == path.read_bytes()
    count = len(web.requests)
    assert fetch(url, tmp_path / "c")[0] == path.read_bytes()
    assert [asked for _, asked in web.requests[count:]] == ["bytes=0-0"], "only its version is asked for"
    assert [copy.read_bytes() for copy in copies(tmp_path / "c")] == [path.read_bytes()]


def test_the_least_recently_used_goes_first(tmp_path: Path, web: Web) -> None:
    paths = write_shards(tmp_path / "remote", [20, 20, 20])
    size = paths[0].stat().st_size
    urls = [f"{web.url}/{path.name}" for path in paths]
    bound = 2 * size + size // 2
    for url in (urls[0], urls[1], urls[0], urls[2]):
        fetch(url, tmp_path / "c", bound)
        time.sleep(0.01)
    left = {copy.name.rsplit("-", 1)[-1] for copy in copies(tmp_path / "c")}
    assert left == {"00000.tar", "00002.tar"}
    assert sum(copy.stat().st_size for copy in copies(tmp_path / "c")) <= bound


def test_a_shard_larger_than_the_bound_is_read_where_it_is(tmp_path: Path, web: Web) -> None:
    path = write_shards(tmp_path / "remote", [20])[0]
    data, counts = fetch(f"{web.url}/00000.tar", tmp_path / "c", 1000)
    assert data == path.read_bytes() and counts == {EVENT + "no_room_for_copy": 1}
    assert copies(tmp_path / "c") == []


def test_a_copy_stands_in_while_the_server_is_away(tmp_path: Path, web: Web) -> None:
    path = write_shards(tmp_path / "remote", [20])[0]
    url = f"{web.url}/00000.tar"
    fetch(url, tmp_path / "c")
    web.faults = lambda number, _: "503"
    counts: Counter[str] = Counter()
    stream = Store(Access(str(tmp_path / "c"), retries=1), counts).open(url).stream
    assert stream.read() == path.read_bytes() and counts[EVENT + "copy_of_unreachable"] == 1
    stream.close()


def test_of_several_versions_the_last_used_stands_in(tmp_path: Path, web: Web) -> None:
    path = write_shards(tmp_path / "remote", [5])[0]
    url = f"{web.url}/00000.tar"
    for samples in range(6, 11):  # copies' names do not show their age: of fewer, the right one may be first by chance
        path.write_bytes(write_shards(tmp_path / f"new{samples}", [samples])[0].read_bytes())
        fetch(url, tmp_path / "c")
        faults, web.faults = web.faults, lambda number, _: "503"
        stream = Store(Access(str(tmp_path / "c"), retries=1)).open(url).stream
        assert stream.read() == path.read_bytes(), f"the copy of {samples} samples is the newest"
        stream.close()
        web.faults = faults


def test_a_copy_that_cannot_be_finished_leaves_nothing(tmp_path: Path, web: Web) -> None:
    write_shards(tmp_path / "remote", [40])
    web.faults = lambda number, _: "503" if number > 3 else None
    with pytest.raises(SourceError):
        Store(Access(str(tmp_path / "c"), retries=1)).open(f"{web.url}/00000.tar")
    assert copies(tmp_path / "c") == []


def test_a_copy_is_compared_with_the_indexs_checksum(tmp_path: Path, web: Web) -> None:
    write_shards(tmp_path / "remote", [20])
    url = f"{web.url}/00000.tar"
    scan.update_indexes([url])
    answer = web.answer

    def rotten(*asked: Any) -> tuple[int, dict[str, str], bytes]:
        status, headers, body = answer(*asked)
        return status, headers, body[:-1] + bytes([body[-1] ^ 1]) if len(body) > 1 else body

    web.answer = rotten  # type: ignore[method-assign]
    with pytest.raises(SourceError) as error:
        Store(Access(str(tmp_path / "c"))).open(url)
    assert error.value.reason == "wrong_checksum" and copies(tmp_path / "c") == []


def test_the_incomplete_copy_of_a_dead_process_is_deleted(tmp_path: Path, web: Web) -> None:
    paths = write_shards(tmp_path / "remote", [20, 20])
    folder = tmp_path / "c" / "shards"
    folder.mkdir(parents=True)
    size = paths[0].stat().st_size
    dead, alive = folder / ".dead.part", folder / ".alive.part"
    for part in (dead, alive):
        part.write_bytes(b"x" * size)
    with alive.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        fetch(f"{web.url}/00000.tar", tmp_path / "c", int(2.5 * size))
        assert not dead.exists() and alive.exists()
        assert fetch(f"{web.url}/00001.tar", tmp_path / "c", int(1.5 * size))[1] == {EVENT + "no_room_for_copy": 1}


def test_processes_share_the_copies(tmp_path: Path, web: Web) -> None:
    paths = write_shards(tmp_path / "remote", [20, 21, 22])
    bound = int(2.2 * paths[-1].stat().st_size)
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=fetch_often, args=(f"{web.url}/{paths[n % 3].name}", str(tmp_path / "c"), bound, 6))
        for n in range(4)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(40)
    assert [process.exitcode for process in processes] == [0] * 4
    left = copies(tmp_path / "c")
    assert not [copy for copy in left if copy.name.endswith(".part")]
    assert sum(copy.stat().st_size for copy in left) <= bound
    for copy in left:
        assert copy.read_bytes() == (tmp_path / "remote" / copy.name.rsplit("-", 1)[-1]).read_bytes()


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """An S3-compatible server with a bucket `bucket`; yields its address."""
    boto3 = pytest.importorskip("boto3")
    server = pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    names = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}
    served = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    served.start()
    host, port = served.get_host_and_port()
    url = f"http://{host}:{port}"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**names, "AWS_ENDPOINT_URL": url, "NO_PROXY": "127.0.0.1"}.items():
            patch.setenv(name, value)
        boto3.client("s3", endpoint_url=url).create_bucket(Bucket="bucket")
        yield url
    served.stop()


def test_shards_are_read_from_s3(tmp_path: Path, s3: str) -> None:
    import boto3

    paths = write_shards(tmp_path / "set", [30, 17])
    client = boto3.client("s3", endpoint_url=s3)
    for path in paths:
        client.put_object(Bucket="bucket", Key=f"set/{path.name}", Body=path.read_bytes())
    urls = expand("s3://bucket/set/*.tar")
    assert urls == [f"s3://bucket/set/{path.name}" for path in paths]
    assert scan.update_indexes(urls).read == 2
    stream = open_stream("s3://bucket/set/", batch=20)
    assert stream.samples_per_epoch == 47
    assert contents(stream, 5) == contents(open_stream(tmp_path / "set", batch=20), 5)
    assert not stream.broken and not stream.seen
    problem = ReadProblem()
    reader = read_shard(urls[0], problem)
    next(reader)
    client.put_object(Bucket="bucket", Key="set/00000.tar", Body=paths[1].read_bytes())
    assert len(list(reader)) < 29 and problem.reason == "changed_shard"
    problem = ReadProblem()
    assert list(read_shard("s3://bucket/set/none.tar", problem)) == [] and problem.reason == "missing_shard"
    client.put_object(Bucket="bucket", Key="table/a.csv", Body=b"filepath,title\nx/0.png,hello\n")
    client.put_object(Bucket="bucket", Key="table/x/0.png", Body=picture(3))
    (rows,) = [list(read_shard(url, ReadProblem())) for url in expand("s3://bucket/table/*.csv")]
    assert [row.members["png"] for row in rows] == [picture(3)] and rows[0].members["txt"] == b"hello"


@pytest.mark.parametrize("ahead", [pytest.param(False, marks=pytest.mark.slow), True])
def test_an_epoch_from_s3_with_faults_loses_nothing(
    tmp_path: Path, s3: str, ahead: bool, called_off: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every refused or broken answer is counted once, since botocore and s3fs do not retry.

    aiohttp repeats a request once, uncounted, if the connection closes before the answer begins.
    """
    import boto3
    import s3fs

    if not ahead:
        monkeypatch.setattr(remote, "PREFETCH_BYTES", 0)
    monkeypatch.setattr(remote, "LARGEST_BLOCK", 32768)
    monkeypatch.setattr(remote, "FIRST_BLOCK", 8192)
    paths = write_shards(tmp_path / "set", [30, 17])
    client = boto3.client("s3", endpoint_url=s3)
    for path in paths:
        client.put_object(Bucket="bucket", Key=f"faulty/{path.name}", Body=path.read_bytes())
    rng = random.Random(1)
    with serving(Web(upstream=int(s3.rsplit(":", 1)[1]))) as web:
        monkeypatch.setenv("AWS_ENDPOINT_URL", web.url)
        s3fs.S3FileSystem.clear_instance_cache()
        urls = expand("s3://bucket/faulty/*.tar")
        scan.update_indexes(urls)
        stream = open_stream("s3://bucket/faulty/", batch=20)
        web.faults = lambda number, path: rng.choice(("drop", "cut", "503")) if rng.random() < 0.2 else None
        assert contents(stream, 3) == contents(open_stream(tmp_path / "set", batch=20), 3), "more than an epoch"
        assert not stream.broken
        faults, seen = web.done["503"] + web.done["drop"], finish(stream)
        counts = stream.seen, web.done, called_off()
        assert 2 < faults - called_off() <= seen <= faults + web.done["cut"] // 2, counts
        assert set(stream.seen) == {"failed_request"}
        print(len(web.requests), web.done, seen)
    s3fs.S3FileSystem.clear_instance_cache()
