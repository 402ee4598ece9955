"""Remote shards: on any network nothing is lost or repeated, faults are counted, versions never mixed."""

import random
import shutil
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from clipscale.common.errors import UserError
from clipscale.data.sample import RawSample
from clipscale.data.shards import index, remote, remote_object, scan
from clipscale.data.shards.access import EVENT, Access
from clipscale.data.shards.reader import ReadProblem, read_shard
from clipscale.data.shards.store import Store
from tests.data.files import write_shards
from tests.data.shards.web import FAULTS, Web, finish, serving, settle
from tests.data.streams import all_ids, contents, flat, ids, open_stream

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("small_blocks")]


def read(url: str, **access: Any) -> tuple[list[RawSample], ReadProblem, Counter[str]]:
    problem, counts = ReadProblem(), Counter[str]()
    store = Store(Access(**access), counts)
    samples = list(read_shard(url, problem, store=store, offsets=index.sample_offsets))
    settle(store)
    return samples, problem, counts


def members(samples: list[RawSample]) -> list[tuple[str, dict[str, bytes]]]:
    return [(sample.key, sample.members) for sample in samples]


def test_a_shard_is_what_it_is_locally(tmp_path: Path, web: Web) -> None:
    path = write_shards(tmp_path, [30])[0]
    samples, problem, counts = read(f"{web.url}/00000.tar")
    assert members(samples) == members(read(str(path))[0])
    assert problem.reason is None and not counts
    asked = [range_ for _, range_ in web.requests]
    assert len(asked) == len(set(asked)) > 3, "a range was requested twice"


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("ahead", [True, False])
def test_transient_faults_are_retried_and_counted(
    tmp_path: Path, web: Web, fault: str, ahead: bool, called_off: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not ahead:
        monkeypatch.setattr(remote, "PREFETCH_BYTES", 0)
    path = write_shards(tmp_path, [30])[0]
    web.faults = lambda number, _: fault if number % 2 else None
    samples, problem, counts = read(f"{web.url}/00000.tar")
    assert members(samples) == members(read(str(path))[0]), fault
    assert problem.reason is None
    names = {"503": "http_503", "drop": "dropped_connection", "cut": "no_connection", "short": "short_answer"}
    assert set(counts) == ({EVENT + names.get(fault, fault)} if fault != "slow" else set())
    if fault != "slow":
        assert web.done[fault] - called_off() <= counts.total() <= web.done[fault], (counts, web.done, called_off())
    assert web.done[fault] > 2


def test_reading_continues_from_the_byte_reached(tmp_path: Path, web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "FIRST_BLOCK", 1 << 20)
    monkeypatch.setattr(remote, "LARGEST_BLOCK", 1 << 20)
    path = write_shards(tmp_path, [100])[0]
    size = path.stat().st_size
    web.faults = lambda number, _: "drop" if number == 1 else None
    assert len(read(f"{web.url}/00000.tar")[0]) == 100
    assert web.requests[1][1] == f"bytes=0-{size - 1}"
    assert web.requests[2][1] == f"bytes={size // 2}-{size - 1}"


def test_a_server_without_ranges_is_read_too(tmp_path: Path, web: Web) -> None:
    path = write_shards(tmp_path, [10])[0]
    web.ranges = False
    web.faults = lambda number, _: "drop" if number == 3 else None
    assert members(read(f"{web.url}/00000.tar")[0]) == members(read(str(path))[0])


def test_a_silent_server_is_retried(tmp_path: Path, web: Web) -> None:
    write_shards(tmp_path, [3])
    answer = web.answer

    def slow_answer(path: str, asked: str, *rest: Any) -> tuple[int, dict[str, str], bytes]:
        if len(web.requests) == 2:
            time.sleep(0.6)
        return answer(path, asked)

    web.answer = slow_answer  # type: ignore[method-assign]
    samples, problem, counts = read(f"{web.url}/00000.tar", wait_s=0.2)
    assert len(samples) == 3 and problem.reason is None
    assert counts == {EVENT + "no_connection": 1}


def test_an_answer_that_trickles_is_cut_off_and_retried(
    tmp_path: Path, web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_shards(tmp_path, [10])[0]
    monkeypatch.setattr(remote_object, "SLOWEST", 1 << 20)
    web.faults = lambda number, _: "trickle" if number == 1 else None
    samples, problem, counts = read(f"{web.url}/00000.tar", wait_s=0.3)
    assert members(samples) == members(read(str(path))[0]) and problem.reason is None
    assert counts == {EVENT + "slow_answer": 1}


@pytest.mark.parametrize("longer", [True, False])
def test_a_shard_that_changes_is_given_up_and_never_mixed(tmp_path: Path, web: Web, longer: bool) -> None:
    path = write_shards(tmp_path, [30])[0]
    before = members(read(str(path))[0])
    other = write_shards(tmp_path / "other", [40 if longer else 30])[0]
    at = 6

    def change(number: int, _: str) -> None:
        if number == at:
            path.write_bytes(other.read_bytes())

    web.faults = change  # type: ignore[assignment]
    samples, problem, _ = read(f"{web.url}/00000.tar")
    assert problem.reason == "changed_shard"
    assert 0 < len(samples) < 30 and members(samples) == before[: len(samples)]


def test_a_shard_that_stays_away_is_given_up(tmp_path: Path, web: Web) -> None:
    write_shards(tmp_path, [30])
    web.faults = lambda number, _: "503" if number > 4 else None
    samples, problem, counts = read(f"{web.url}/00000.tar", retries=3)
    assert problem.reason == "unreachable_shard" and 0 < len(samples) < 30
    assert counts == {EVENT + "http_503": 4}


@pytest.mark.parametrize("refusals", [60, pytest.param(1100, marks=pytest.mark.slow)])
def test_a_server_may_stay_away_for_as_long_as_data_retries_says(
    tmp_path: Path, web: Web, monkeypatch: pytest.MonkeyPatch, refusals: int
) -> None:
    monkeypatch.setattr(remote_object, "LONGEST_WAIT_S", 0.0)
    write_shards(tmp_path, [3])
    web.faults = lambda number, _: "503" if number < refusals else None
    samples, problem, counts = read(f"{web.url}/00000.tar", retries=2000)
    assert len(samples) == 3 and problem.reason is None and counts == {EVENT + "http_503": refusals}


def test_a_missing_shard_is_not_retried(tmp_path: Path, web: Web) -> None:
    assert read(f"{web.url}/none.tar")[1].reason == "missing_shard"
    assert len(web.requests) == 1
    (tmp_path / "empty.tar").write_bytes(b"")
    assert read(f"{web.url}/empty.tar")[1].reason == "unreadable_shard"


def test_only_wanted_samples_are_fetched_with_an_index(tmp_path: Path, web: Web) -> None:
    path = write_shards(tmp_path, [200])[0]
    url = f"{web.url}/00000.tar"
    scan.update_indexes([url])
    web.requests.clear()
    problem = ReadProblem()
    raws = list(read_shard(url, problem, want=lambda i: i >= 195, offsets=index.sample_offsets))
    assert members(raws[195:]) == members(read(str(path))[0][195:])
    assert len(web.requests) <= 4, web.requests


def test_an_index_of_another_version_is_not_used(tmp_path: Path, web: Web, caplog: pytest.LogCaptureFixture) -> None:
    path = write_shards(tmp_path, [20])[0]
    url = f"{web.url}/00000.tar"
    scan.update_indexes([url])
    path.write_bytes(write_shards(tmp_path / "new", [9])[0].read_bytes())
    assert len(read(url)[0]) == 9
    assert f"{url} has changed since it was indexed" in caplog.text


def indexed(urls: list[str]) -> None:
    assert scan.update_indexes(urls).failed == {}


@pytest.mark.parametrize("cached", [pytest.param(False, marks=pytest.mark.slow), True])
def test_an_epoch_over_a_bad_network_loses_nothing(
    tmp_path: Path, web: Web, cached: bool, called_off: Callable[[], int]
) -> None:
    sizes = [30, 17, 41]
    paths = write_shards(tmp_path, sizes)
    urls = [f"{web.url}/{path.name}" for path in paths]
    indexed(urls)
    rng = random.Random(3)
    web.faults = lambda number, path: rng.choice(FAULTS) if rng.random() < 0.3 else None
    local = open_stream(tmp_path, batch=22)
    options = {"cache": str(tmp_path / "copies")} if cached else {}
    stream = open_stream(f"{web.url}/{{00000..00002}}.tar", batch=22, retries=20, **options)
    assert stream.samples_per_epoch == sum(sizes)
    assert contents(stream, 12) == contents(local, 12), "three epochs"
    assert not stream.broken
    if cached:
        count = len(web.requests)
        contents(stream, 4)
        assert all(asked == "bytes=0-0" for _, asked in web.requests[count:]), "read over the network again"
    faults, seen = web.done.total() - web.done["slow"], finish(stream)
    assert 0 < faults - called_off() <= seen <= faults, (stream.seen, web.done, called_off())


def test_a_shard_given_up_costs_its_samples_and_says_why(tmp_path: Path, web: Web) -> None:
    sizes = [30, 30]
    paths = write_shards(tmp_path, sizes)
    indexed([f"{web.url}/{path.name}" for path in paths])
    web.faults = lambda number, path: "503" if path.endswith("1.tar") else None
    stream = open_stream(f"{web.url}/{{00000..00001}}.tar", batch=30, shard_streams=1, retries=1)
    epoch = flat(ids(stream, 1))
    assert Counter(epoch) == all_ids(paths[:1], [30])
    ids(stream, 1)
    assert stream.broken["unreachable_shard"] >= 30 and stream.seen["http_503"] >= 2


def test_a_storage_that_stays_away_ends_the_run_soon(tmp_path: Path, web: Web) -> None:
    """It does not retry every shard of the set for hours."""
    paths = write_shards(tmp_path, [30] * 5)
    indexed([f"{web.url}/{path.name}" for path in paths])
    with open_stream(f"{web.url}/{{00000..00004}}.tar", batch=10, shard_streams=1, shuffle=2, retries=1) as stream:
        ids(stream, 1)
        web.faults = lambda number, path: "503"
        asked = len(web.requests)
        with pytest.raises(UserError, match=r"3 shards in a row cannot be reached.*data.retries=1.*resume=auto"):
            ids(stream, 50)
    assert len(web.requests) - asked <= 12, web.requests[asked:]


@pytest.fixture
def nginx(tmp_path: Path) -> Iterator[Web]:
    """The fault-injecting server in front of a real nginx that serves tmp_path."""
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if program is None:
        pytest.skip("nginx is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    home = tmp_path / "nginx"
    home.mkdir()
    (home / "nginx.conf").write_text(
        f"daemon off; pid {home}/pid; error_log {home}/error.log; worker_processes 1; user root;\n"
        f"events {{ worker_connections 64; }}\n"
        f"http {{ access_log off; client_body_temp_path {home}/a; proxy_temp_path {home}/b; fastcgi_temp_path {home}/c;\n"
        f"uwsgi_temp_path {home}/d; scgi_temp_path {home}/e; server {{ listen 127.0.0.1:{port}; root {tmp_path}; }} }}\n"
    )
    tmp_path.chmod(0o755)
    process = subprocess.Popen([program, "-c", f"{home}/nginx.conf", "-p", str(home)], stderr=subprocess.DEVNULL)
    try:
        for _ in range(100):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        with serving(Web(upstream=port)) as served:
            yield served
    finally:
        process.terminate()
        process.wait()


def test_an_epoch_from_nginx_with_faults_loses_nothing(
    tmp_path: Path, nginx: Web, called_off: Callable[[], int]
) -> None:
    sizes = [60, 45]
    paths = write_shards(tmp_path / "set", sizes)
    indexed([f"{nginx.url}/set/{path.name}" for path in paths])
    rng = random.Random(5)
    nginx.faults = lambda number, path: rng.choice(FAULTS) if rng.random() < 0.3 else None
    stream = open_stream(f"{nginx.url}/set/{{00000..00001}}.tar", batch=21, retries=20)
    assert stream.samples_per_epoch == sum(sizes)
    assert contents(stream, 10) == contents(open_stream(tmp_path / "set", batch=21), 10)
    faults, seen = nginx.done.total() - nginx.done["slow"], finish(stream)
    assert not stream.broken and 5 < faults - called_off() <= seen <= faults, (stream.seen, nginx.done, called_off())
    nginx.faults = lambda number, path: None
    paths[0].write_bytes(paths[1].read_bytes())
    problem = ReadProblem()
    reader = read_shard(f"{nginx.url}/set/00000.tar", problem)
    next(reader)
    paths[0].write_bytes(write_shards(tmp_path / "other", [50])[0].read_bytes())
    assert len(list(reader)) < 45 and problem.reason == "changed_shard"


def test_the_server_of_these_tests_ends_with_one_that_fails(tmp_path: Path) -> None:
    """Left behind, its thread would ask a closed socket without a pause, and slow all later tests."""
    before = threading.active_count()
    with pytest.raises(KeyError), serving(Web(tmp_path)):
        raise KeyError
    assert threading.active_count() == before
