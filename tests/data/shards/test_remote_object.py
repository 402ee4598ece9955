"""gs:// and hf:// against small stand-ins for their services: listing, reading, faults and changes."""

import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import fsspec
import pytest

from clipscale.data.shards import remote, remote_object, scan
from clipscale.data.shards.access import EVENT, Access, SourceError
from clipscale.data.shards.listing import expand
from clipscale.data.shards.reader import ReadProblem, read_shard
from clipscale.data.shards.store import Store
from tests.data.files import write_shards
from tests.data.shards.web import Web, finish, serving
from tests.data.streams import contents, open_stream

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("small_blocks")]

Answer = tuple[int, dict[str, str], bytes]
SECRET = "a-token"


class Service(Web):
    """A service that lists, describes and serves the files of a folder for requests with the token SECRET."""

    def permitted(self, sent: Mapping[str, str] | None) -> bool:
        return (sent or {}).get("Authorization") == f"Bearer {SECRET}"

    def files(self) -> list[Path]:
        assert self.folder is not None
        return sorted(path for path in self.folder.iterdir() if path.is_file())


def as_json(content: Any) -> Answer:
    body = json.dumps(content).encode()
    return 200, {"Content-Length": str(len(body)), "Content-Type": "application/json"}, body


NOTHING: Answer = 404, {"Content-Length": "0"}, b""


class Google(Service):
    """The JSON API's calls that list a bucket, describe an object and download it."""

    def answer(self, path: str, asked: str, method: str = "GET", sent: Mapping[str, str] | None = None) -> Answer:
        if not self.permitted(sent):
            return 401, {"Content-Length": "0"}, b""
        parts = urlsplit(path)
        query = parse_qs(parts.query)
        if parts.path == "/storage/v1/b/bucket/o":
            prefix = query.get("prefix", [""])[0]
            items = [item for item in map(self.describe, self.files()) if item["name"].startswith(prefix)]
            return as_json({"items": items})
        name = unquote(parts.path.rsplit("/", 1)[-1])
        file = next((file for file in self.files() if f"set/{file.name}" == name), None)
        if file is None:
            return NOTHING
        if not parts.path.startswith("/download/"):
            return as_json(self.describe(file))
        status, headers, body = super().answer(file.name, asked)
        headers |= {"ETag": "of the metadata", "X-Goog-Generation": self.describe(file)["generation"]}
        return status, headers, body

    def describe(self, file: Path) -> dict[str, Any]:
        about = file.stat()
        generation, size = str(about.st_mtime_ns), str(about.st_size)
        named = {"kind": "storage#object", "name": f"set/{file.name}", "bucket": "bucket"}
        return named | {"size": size, "generation": generation}


class Hub(Service):
    """The calls that describe a data set of the hub, list its files, and redirect to the store."""

    store = ""

    def answer(self, path: str, asked: str, method: str = "GET", sent: Mapping[str, str] | None = None) -> Answer:
        parts = urlsplit(path)
        if parts.path.startswith("/store/"):
            assert "Authorization" not in (sent or {}), "the token is sent to the store"
            return super().answer(parts.path.removeprefix("/store"), asked)
        if not self.permitted(sent):
            return 401, {"Content-Length": "0"}, b""
        if parts.path in ("/api/datasets/me/pairs", "/api/datasets/me/pairs/revision/main"):
            return as_json({"id": "me/pairs", "sha": "0" * 40})
        if parts.path.startswith("/api/datasets/me/pairs/tree/main"):
            entry = {"type": "file", "oid": "0" * 40}
            return as_json([entry | {"path": f.name, "size": f.stat().st_size} for f in self.files()])
        if not parts.path.startswith("/datasets/me/pairs/resolve/main/"):
            return NOTHING
        file = next((file for file in self.files() if file.name == parts.path.rsplit("/", 1)[-1]), None)
        if file is None:
            return NOTHING
        linked = {"X-Linked-ETag": f'"{file.stat().st_mtime_ns}"', "Content-Length": "0"}
        return 302, linked | {"Location": f"{self.store}/store/{file.name}?signed=yes"}, b""


@pytest.fixture
def google(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    core = pytest.importorskip("gcsfs.core")
    from google.oauth2.credentials import Credentials

    monkeypatch.setitem(fsspec.config.conf, "gs", {"token": Credentials(SECRET), "access": "read_only"})
    # the extended one asks for the bucket's type by gRPC
    fsspec.register_implementation("gs", core.GCSFileSystem, clobber=True)
    (tmp_path / "set").mkdir()
    with serving(Google(tmp_path / "set")) as web:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", web.url)
        core.GCSFileSystem.clear_instance_cache()
        yield web
    core.GCSFileSystem.clear_instance_cache()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    from huggingface_hub import HfFileSystem, constants

    (tmp_path / "set").mkdir()
    with serving(Hub(tmp_path / "set")) as web:
        web.store = web.url.replace("127.0.0.1", "localhost")
        monkeypatch.setenv("HF_TOKEN", SECRET)
        monkeypatch.setattr(constants, "ENDPOINT", web.url)  # HF_ENDPOINT was read when the library was imported
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{web.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        )
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        HfFileSystem.clear_instance_cache()
        yield web
    HfFileSystem.clear_instance_cache()


PLACES = {"google": "gs://bucket/set", "hub": "hf://datasets/me/pairs"}


@pytest.mark.parametrize("service", ["google", "hub"])
def test_shards_are_listed_indexed_and_read(tmp_path: Path, service: str, request: pytest.FixtureRequest) -> None:
    web, place = request.getfixturevalue(service), PLACES[service]
    paths = write_shards(tmp_path / "set", [30, 17])
    urls = expand(f"{place}/*.tar")
    assert urls == [f"{place}/{path.name}" for path in paths]
    assert scan.update_indexes(urls).read == 2
    stream = open_stream(f"{place}/{{00000..00001}}.tar", batch=20)
    assert stream.samples_per_epoch == 47
    rng = random.Random(4)
    web.faults = lambda number, path: rng.choice(("503", "drop", "short")) if rng.random() < 0.2 else None
    assert contents(stream, 5) == contents(open_stream(tmp_path / "set", batch=20), 5)
    assert not stream.broken and finish(stream) <= web.done.total() > 5
    assert set(stream.seen) <= {"http_503", "dropped_connection", "short_answer"}


@pytest.mark.parametrize("service", ["google", "hub"])
def test_every_fault_is_counted(
    tmp_path: Path, service: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    web, place = request.getfixturevalue(service), PLACES[service]
    monkeypatch.setattr(remote, "PREFETCH_BYTES", 0)
    (path,) = write_shards(tmp_path / "set", [120])
    rng = random.Random(4)
    web.faults = lambda number, path: rng.choice(("503", "drop", "short", "cut")) if rng.random() < 0.4 else None
    store = Store(Access(retries=30))
    stream = store.open(f"{place}/00000.tar").stream
    assert stream.read() == path.read_bytes()
    names = {"503": "http_503", "drop": "dropped_connection", "cut": "no_connection", "short": "short_answer"}
    assert store.counts == {EVENT + names[fault]: count for fault, count in web.done.items()} and len(web.done) == 4


@pytest.mark.parametrize("service", ["google", "hub"])
def test_a_change_is_found(tmp_path: Path, service: str, request: pytest.FixtureRequest) -> None:
    """Also if the size stays the same."""
    request.getfixturevalue(service)
    place = PLACES[service]
    (path,) = write_shards(tmp_path / "set", [30])
    problem = ReadProblem()
    reader = read_shard(f"{place}/00000.tar", problem)
    next(reader)
    path.write_bytes(path.read_bytes())
    assert len(list(reader)) < 29 and problem.reason == "changed_shard"
    problem = ReadProblem()
    assert list(read_shard(f"{place}/none.tar", problem)) == [] and problem.reason == "missing_shard"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("hf://datasets/a/b/c/0 1.tar", "/datasets/a/b/resolve/main/c/0%201.tar"),
        ("hf://a/b@v1/0.tar", "/a/b/resolve/v1/0.tar"),
        ("hf://spaces/a/b@refs/pr/7/c/0.tar", "/spaces/a/b/resolve/refs%2Fpr%2F7/c/0.tar"),
        ("hf://datasets/a/b@refs%2Fconvert%2Fparquet/0.tar", "/datasets/a/b/resolve/refs%2Fconvert%2Fparquet/0.tar"),
        ("hf://buckets/a/b/c/0.tar", "/buckets/a/b/resolve/c/0.tar"),
    ],
)
def test_where_the_hub_has_a_file(url: str, expected: str) -> None:
    from huggingface_hub import constants

    found = remote_object.remote_object(url, 1.0)
    assert isinstance(found, remote_object.HttpObject) and found._url == constants.ENDPOINT + expected


def test_an_address_of_another_form_is_missing() -> None:
    with pytest.raises(SourceError, match="OWNER/NAME"):
        remote_object.remote_object("hf://gpt2/0.tar", 1.0)
