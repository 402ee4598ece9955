"""Remote shards are read like local ones, over any network: faults are retried and counted, changes are noticed."""

import re
import socket
import tarfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from fsspec.config import conf

from clipscale.checkpoint.copy_store import open_store
from clipscale.common.errors import LoaderError
from clipscale.data.sample import RawSample
from clipscale.data.shards import index, requests, store
from clipscale.data.shards.features import notes_beside
from clipscale.data.shards.listing import expand
from clipscale.data.shards.reader import ReadFailure, read_shard
from clipscale.data.shards.requests import first_bytes
from clipscale.data.shards.store import Store
from tests.conftest import Capture
from tests.data.files import link, picture, sample, write_shards, write_tar
from tests.data.shards.web import Web, serving
from tests.data.streams import contents, ids, open_stream
from tests.support.user_errors import refused

pytestmark = pytest.mark.usefixtures("small_blocks")


def read(url: str) -> tuple[list[RawSample], ReadFailure, Counter[str]]:
    problem = ReadFailure()
    shards = Store()
    return list(read_shard(url, problem, store=shards)), problem, shards.faults


def assert_reads(url: str, path: Path) -> Counter[str]:
    """Assert that the address gives the file's content. Returns the counted faults."""
    (remote, problem, counts), (local, *_) = read(url), read(str(path))
    assert [(raw.key, raw.members) for raw in remote] == [(raw.key, raw.members) for raw in local], problem
    assert problem.reason is None
    return counts


def test_it_reads_what_is_in_the_file(tmp_path: Path, web: Web) -> None:
    path = write_shards(tmp_path, [40])[0].rename(tmp_path / "0 1.tar")
    assert not assert_reads(f"{web.url}/0 1.tar", path)
    starts = [int(asked.removeprefix("bytes=").split("-")[0]) for _, asked in web.requests]
    assert starts == sorted(set(starts)), "no block is asked for twice"


def test_its_links_are_read_where_they_lead(tmp_path: Path, web: Web) -> None:
    content = [member for i in range(20) for member in sample(f"{i:02d}", i)]
    path = write_tar(tmp_path / "0.tar", [*content, link("z.png", "03.png"), ("z.txt", b"z"), *sample("zz")])
    assert not assert_reads(f"{web.url}/0.tar", path)
    assert read(f"{web.url}/0.tar")[0][-2].members == {"png": picture(3), "txt": b"z"}


def test_the_next_block_is_on_its_way_while_one_is_read(tmp_path: Path, web: Web) -> None:
    path = write_shards(tmp_path, [40])[0]
    stream = Store().open(f"{web.url}/{path.name}")[0]
    stream.read(4096 + 1)
    until = time.monotonic() + 60
    while len(web.requests) < 3:
        assert time.monotonic() < until, "the third block is not requested"
        time.sleep(0.01)
    assert stream.read() == path.read_bytes()[4097:]
    stream.seek(100)
    assert stream.read(10) == path.read_bytes()[100:110]
    stream.close()


@pytest.mark.parametrize("same_size", [True, False])
def test_a_shard_that_changes_is_given_up(tmp_path: Path, web: Web, same_size: bool) -> None:
    path = write_shards(tmp_path, [40])[0]
    problem = ReadFailure()
    reader = read_shard(f"{web.url}/{path.name}", problem)
    next(reader)
    path.write_bytes(path.read_bytes() + b"" if same_size else bytes(512))
    assert len(list(reader)) < 39 and problem.reason == "changed_shard"


def test_what_a_slow_server_has_sent_is_kept(tmp_path: Path, web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks have 4 kB, and a time limit leaves about 2 kB of each."""
    path = write_shards(tmp_path, [7])[0]
    monkeypatch.setattr(requests, "WAIT_S", 0.2)
    web.faults = lambda number, _: "slow"
    assert_reads(f"{web.url}/{path.name}", path)
    assert len(web.requests) < path.stat().st_size / requests.MIN_PROGRESS_BYTES, "it goes on behind what came"


@pytest.mark.parametrize(
    ("fault", "wait_s", "last"),
    [
        ("503", 30.0, "http_503"),
        ("cut", 30.0, "ServerDisconnectedError"),
        ("stall", 0.1, r"no answer of 4096 bytes within [\d.]+ s$"),
        ("drip", 0.5, r"\d+ of 4096 bytes came in [\d.]+ s$"),
    ],
)
def test_a_server_that_stays_away_ends_in_one_line(
    tmp_path: Path, web: Web, fault: str, wait_s: float, last: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_shards(tmp_path, [40])[0]
    monkeypatch.setattr(requests, "WAIT_S", wait_s)
    monkeypatch.setattr(store, "RETRIES", 2)
    web.faults = lambda number, _: fault
    samples, problem, counts = read(f"{web.url}/{path.name}")
    assert not samples and problem.reason == "unreachable_shard" and counts.total() == 3, (problem, counts)
    assert re.search(f"3 requests failed, the last: {last}", problem.detail) and "\n" not in problem.detail


def test_a_busy_server_says_how_long_to_wait(tmp_path: Path, web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is obeyed up to a bound, which is longer than the first random wait here."""
    path = write_shards(tmp_path, [4])[0]
    times: list[float] = []
    monkeypatch.setattr(store, "MAX_WAIT_S", 0.6)

    def busy_at_first(number: int, path: str) -> str | None:
        times.append(time.monotonic())
        return None if number else "429"

    web.faults = busy_at_first
    assert len(read(f"{web.url}/{path.name}")[0]) == 4 and 0.6 <= times[1] - times[0] < 10


def test_a_server_that_sends_no_sample_has_a_time(tmp_path: Path, web: Web) -> None:
    """It sends folders without end, a little at a time, so that each answer is progress."""
    (tmp_path / "0.tar").write_bytes(5000 * tarfile.TarInfo("folder/").tobuf())
    web.faults = lambda number, _: "slow"
    begun = time.monotonic()
    problem = ReadFailure()
    assert not [*read_shard(f"{web.url}/0.tar", problem, store=Store(limit_s=0.5))]
    assert problem.reason == "unreachable_shard" and "no sample within data.timeout_s=0.5" in problem.detail
    assert time.monotonic() - begun < 30


def test_a_storage_that_stays_away_ends_the_run_soon(tmp_path: Path, web: Web) -> None:
    """The run does not retry every shard of the set for hours."""
    write_shards(tmp_path, [30] * 5)
    urls = f"{web.url}/{{00000..00004}}.tar"
    with open_stream(urls, batch=10, shard_streams=1, shuffle=2, order="resampled") as stream:
        ids(stream, 1)
        asked: list[str] = []

        def away(number: int, path: str) -> str:
            asked.append(path)
            return "503"

        web.faults = away
        with refused(r"3 shards in a row cannot be reached.*resume=auto"):
            ids(stream, 50)
        assert len(asked) < 5 * (1 + store.RETRIES), "after these, and one that is read ahead"


def test_a_missing_shard_is_said_as_a_local_one_is(tmp_path: Path, web: Web, caplog: pytest.LogCaptureFixture) -> None:
    write_shards(tmp_path, [20])
    with open_stream(f"{web.url}/{{00000..00001}}.tar", batch=10, order="resampled") as stream:
        ids(stream, 3)
        assert not stream.broken and not stream.faults
    assert f"1 of 2 shards do not exist (first: {web.url}/00001.tar" in caplog.text


@pytest.mark.parametrize("source", ["{web}/none-{{0..9}}.tar", "http://no-such-host.invalid/{{0..9}}.tar"])
def test_a_set_or_server_that_is_not_there_is_said_at_once(web: Web, source: str) -> None:
    with refused(r"data.train: .*/(none-)?0\.tar"):
        open_stream(source.format(web=web.url), batch=10)
    assert len(web.requests) in (0, 10), "each is asked for once"


class Hostile(Web):
    """Ignores ranges and sends without end, or claims a size that no object has."""

    def answer(self, path: str, asked: str, sent: Mapping[str, str]) -> tuple[int, dict, bytes]:
        body = bytes(1 << 25)
        if path == "/endless.tar":
            return 206, {"Content-Range": f"bytes 0-0/{10**17}", "Content-Length": str(10**17)}, body
        return 200, {"Content-Length": str(10**17)}, body


@pytest.mark.parametrize("name", ["endless.tar", "whole.tar"])
def test_what_was_not_asked_for_is_not_read(tmp_path: Path, name: str) -> None:
    with serving(Hostile(tmp_path)) as web:
        samples, problem, _ = read(f"{web.url}/{name}")
    assert not samples and problem.reason in ("unreachable_shard", "unreadable_shard"), problem


class Hub(Web):
    """Redirects to another host, `/store/`. That one gets no secret: no header or query that is for the first one."""

    secret = "authorization"

    def answer(self, path: str, asked: str, sent: Mapping[str, str]) -> tuple[int, dict, bytes]:
        assert (self.secret in f"{sent}{path}") == (not path.startswith("/store/"))
        path = urlsplit(path).path
        if path.startswith("/store/"):
            return super().answer(path.removeprefix("/store"), asked, sent)
        location = f"{self.url.replace('127.0.0.1', 'localhost')}/store/{path.rsplit('/', 1)[-1]}?signed=yes"
        return 302, {"Location": location, "Content-Length": "0"}, b""


@pytest.mark.parametrize(
    "settings",
    [{"client_kwargs": {"headers": {"X-Key": "k"}}}, {"headers": {"X-Key": "k"}}, {"params": {"x-key": "k"}}],
)
def test_a_server_elsewhere_gets_no_secret_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict
) -> None:
    (path,) = write_shards(tmp_path, [30])
    monkeypatch.setitem(conf, "http", settings)
    monkeypatch.setattr(Hub, "secret", "x-key")
    with serving(Hub(tmp_path)) as web:
        assert_reads(f"{web.url}/{path.name}", path)
        for place, secrets in (path.name, True), (f"store/{path.name}", False):
            assert first_bytes(f"{web.url}/{place}", 10**6, secrets=secrets) == path.read_bytes()


class Signed(Web):
    """Takes any signature."""

    def answer(self, path: str, asked: str, sent: Mapping[str, str]) -> tuple[int, dict, bytes]:
        return super().answer(urlsplit(path).path, asked, sent)


def test_with_another_signature_an_address_has_the_same_index_and_features(tmp_path: Path) -> None:
    (path,) = write_shards(tmp_path, [3])
    (tmp_path / "features.json").write_text('{"teacher": {}}')
    with serving(Signed(tmp_path)) as web:
        url = f"{web.url}/{path.name}"
        dict(index.update_indexes([f"{url}?signature=a/b"]))
        assert index.read_entries([f"{url}?signature=c//d"]).entries[f"{url}?signature=c//d"].samples == 3
        assert notes_beside(f"{url}?signature=c//d") == {"teacher": {}}


def test_a_servers_name_beyond_ascii_is_looked_up_as_the_dns_has_it(
    tmp_path: Path, web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = write_shards(tmp_path, [3])
    look_up = socket.getaddrinfo
    hosts = {"xn--bcher-kva.example": "127.0.0.1"}
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *rest, **more: look_up(hosts[host], *rest, **more))
    monkeypatch.setenv("NO_PROXY", "*")
    for name in ("b\u00fccher.example", "b%C3%BCcher.example"):
        assert_reads(f"http://{name}:{web.url.rpartition(':')[2]}/{path.name}", path)


def test_the_hub_gets_the_token_and_its_store_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import HfFileSystem, constants

    (path,) = write_shards(tmp_path, [30])
    monkeypatch.setenv("HF_TOKEN", "a-token")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with serving(Hub(tmp_path)) as web:
        monkeypatch.setattr(HfFileSystem, "url", lambda self, path: f"{web.url}/resolve/main/00000.tar")
        assert_reads("hf://datasets/me/pairs/00000.tar", path)


def test_storage_without_credentials_is_one_line_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    s3fs = pytest.importorskip("s3fs")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    begun = time.monotonic()
    try:
        with refused(r"data\.train: s3://no-credentials has no credentials .*AWS_ACCESS_KEY_ID.*ANON"):
            read("s3://no-credentials/0.tar")
    finally:
        s3fs.S3FileSystem.clear_instance_cache()  # it remembers that there are none
    assert time.monotonic() - begun < 60


@pytest.mark.parametrize("source", ["gs://bucket/{0..9}.tar", "gs://bucket/*.tar", "gs://bucket/set/"])
def test_google_without_credentials_is_one_line_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    """gcsfs itself would take minutes."""
    pytest.importorskip("gcsfs")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    for name in ("GOOGLE_APPLICATION_CREDENTIALS", "STORAGE_EMULATOR_HOST"):
        monkeypatch.delenv(name, raising=False)
    begun = time.monotonic()
    with refused(r"data\.train: gs://bucket has no credentials .*gcloud auth .*; for public data FSSPEC_GS_TOKEN=anon"):
        open_stream(source, batch=10)
    with refused(r"checkpoint\.copy=gs://bucket/x has no credentials .*gcloud auth"):
        open_store("gs://bucket/x")
    assert time.monotonic() - begun < 60


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server that takes connections and says nothing, and short limits."""
    monkeypatch.setattr(requests, "WAIT_S", 0.5)
    monkeypatch.setattr(store, "ANNOUNCE_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield "http://{}:{}".format(*server.getsockname())


def test_a_silent_server_is_said_and_ends_the_start(silent: str, web: Web, tmp_path: Path, capsys: Capture) -> None:
    with refused(r"data\.train: .*/00\.tar: no answer .*within 0\.\d+ s; the server is silent") as failure:
        open_stream(f"{silent}/{{00..20}}.tar", batch=10)
    assert isinstance(failure.value, LoaderError), "it may pass"
    assert "waiting for an answer about 21 of 21 shards" in capsys.readouterr().err
    write_shards(tmp_path, [20])
    with open_stream(f"{web.url}/00000.tar::{silent}/0.tar", batch=10, order="resampled"):
        assert "waiting for an answer about 1 of 2 shards" in capsys.readouterr().err


def test_a_silent_store_is_not_listed(silent: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    s3fs = pytest.importorskip("s3fs")
    names = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}
    for name, value in {**names, "AWS_ENDPOINT_URL": silent}.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    monkeypatch.setattr(requests, "WAIT_S", 3.0)  # botocore is imported meanwhile
    begun = time.monotonic()
    try:
        with refused(r"data\.train: s3://b/0\.tar: no answer .*; the server is silent"):
            expand("s3://b/*.tar")
    finally:
        s3fs.S3FileSystem.clear_instance_cache()
    assert time.monotonic() - begun < 60
    assert "waiting for a first answer, before s3://b/*.tar is listed" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.slow  # it imports a server
def test_shards_are_listed_indexed_and_read_from_s3(tmp_path: Path, s3: str) -> None:
    import boto3

    paths = write_shards(tmp_path / "set", [30, 17])
    client = boto3.client("s3", endpoint_url=s3)
    for path in paths:
        client.put_object(Bucket="bucket", Key=f"set/{path.name}", Body=path.read_bytes())
        client.put_object(Bucket="bucket", Key=f"set/{path.name}.md5", Body=b"no shard")
    with refused(r"2 of 2 shards do not exist .*s3://no-bucket/0.tar"):
        open_stream("s3://no-bucket/{0,1}.tar", batch=20)
    urls = expand("s3://bucket/set/")
    assert expand("s3://bucket/set/*.tar") == urls == [f"s3://bucket/set/{path.name}" for path in paths]
    dict(index.update_indexes(urls))
    with open_stream("s3://bucket/set/", batch=20) as stream:
        assert stream.epoch_samples == 47
        assert contents(stream, 5) == contents(open_stream(tmp_path / "set", batch=20), 5)
        assert not stream.broken and not stream.faults
    problem = ReadFailure()
    reader = read_shard(urls[0], problem)
    next(reader)
    client.put_object(Bucket="bucket", Key="set/00000.tar", Body=paths[1].read_bytes())
    assert len(list(reader)) < 29 and problem.reason == "changed_shard"
    assert read("s3://bucket/set/none.tar")[1].reason == "missing_shard"
