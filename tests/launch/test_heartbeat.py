"""When ranks lose each other, the heartbeats name the one that failed first: the rank, its machine, its phase and step."""

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from clipscale.common.errors import LostRankError, StoppedError, UserError, lost_rank
from clipscale.distributed import world as distributed
from clipscale.distributed.world import World
from clipscale.launch import heartbeat, local, processes
from clipscale.launch.heartbeat import Beat, Heartbeat, first_cause, own_beat, path_of, read
from clipscale.launch.processes import ALIVE, DEAD, STOPPED
from clipscale.launch.run_lock import RunLock

CPU = torch.device("cpu")
CLOSED = RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]:1")
LATE = RuntimeError("[unbound_buffer.cc:91] Timed out waiting 5000ms for recv operation to complete")


def beat(rank: int, place: int = 7, **changes: Any) -> Beat:
    fields = {"place": place, "phase": "loss", "step": 3, "number": 9, **changes}
    return replace(Beat(rank, f"node{rank // 2}", 100 + rank, 1.0, ""), **fields)


def gave_up(rank: int) -> Beat:
    return beat(rank, failure="RuntimeError: Connection closed by peer", lost=True)


FAILED = beat(1, failure="OutOfMemoryError: 80 GiB", phase="replay")
EARLY = beat(3, 5, failure="ValueError: early", step=2)
SAVING, WAITING = beat(1, 6, phase="save"), beat(1, 6, phase="encode (waiting for data)")
BEHIND, STUCK = beat(1, 6, phase="encode", since_s=31.4), beat(1, since_s=31.4)
AWAY = "does not answer, last seen in loss of step 3; its machine or the network may be down; 1 more of this machine as well"


@pytest.mark.parametrize(
    ("beats", "states", "silent", "rank", "line"),
    [
        ([gave_up(0), FAILED, gave_up(2)], {0: ALIVE, 1: DEAD}, (), 1, "failed in replay of step 3: OutOfMemoryError: 80 GiB"),
        ([beat(0, failure="ValueError: late"), EARLY, beat(4, 1)], {}, {4}, 3, "failed in loss of step 2: ValueError: early"),
        (
            [gave_up(0), WAITING], {0: ALIVE, 1: DEAD}, (), 1,
            "has died, last seen in encode (waiting for data) of step 3; the machine may be out of memory",
        ),
        ([beat(0), SAVING], {1: STOPPED}, {1}, 1, "is stopped in save of step 3, by SIGSTOP or a debugger"),
        ([gave_up(0), beat(1), beat(2), beat(3)], {0: ALIVE, 1: ALIVE}, {2, 3}, 2, AWAY),
        (
            [gave_up(0), BEHIND, gave_up(2)], {0: ALIVE, 1: ALIVE}, (), 1,
            "hangs in encode of step 3, for 31 s; others wait for it in loss of step 3",
        ),
        ([gave_up(0), STUCK], {}, (), 1, "hangs in loss of step 3, for 31 s; others wait for it in loss of step 3"),
    ],
    ids=["error", "earlier error", "killed", "stopped", "machine down", "behind", "does not give up"],
)  # fmt: skip
def test_the_first_cause_is_named(
    beats: list[Beat], states: dict[int, str], silent: set[int], rank: int, line: str
) -> None:
    found = first_cause(beats, states, set(silent))
    assert found and found[1] == f"rank {rank} on node{rank // 2} (process {100 + rank}) {line}"


@pytest.mark.parametrize("beats", [[], [beat(0), beat(1)], [gave_up(0), gave_up(1)]])
def test_ranks_that_all_live_at_one_place_are_no_cause(beats: list[Beat]) -> None:
    assert first_cause(beats, {}, set()) is None


@pytest.mark.parametrize("error", [CLOSED, LATE, torch.distributed.DistNetworkError("refused")])
def test_the_loss_of_a_rank_is_known_by_its_words(error: Exception) -> None:
    try:
        raise ValueError("in a handler") from error
    except ValueError as outer:
        assert lost_rank(error) and lost_rank(outer)


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError(104, "Connection reset by peer"),
        RuntimeError("a data worker failed:\nTraceback\nConnection closed by peer"),
        torch.OutOfMemoryError("80 GiB"),
        UserError("data.train: timed out"),
    ],
)
def test_storage_and_memory_are_no_lost_ranks(error: Exception) -> None:
    assert not lost_rank(error)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def other(run: Path, process: subprocess.Popen[bytes], **changes: Any) -> None:
    """The record of rank 1, which is that process."""
    run.joinpath(heartbeat.FOLDER).mkdir(parents=True, exist_ok=True)
    it = replace(own_beat(1), pid=process.pid, started=processes.started(process.pid), **{"number": 1, **changes})
    path_of(run, 1).write_text(json.dumps(asdict(it)))


def explained(run: Path, error: BaseException, timeout_s: float = 0.3) -> str:
    """What a rank says that ends with this error in the loss of step 5."""
    with pytest.raises(LostRankError) as found, Heartbeat(run, World(0, 2, CPU), timeout_s) as heart:
        heart.enter("encode", 5)
        heart.enter("loss", 5)
        raise error
    assert found.value.first, "the lowest rank that is left says it"
    assert found.value.__cause__ is error
    return str(found.value)


def test_a_killed_and_a_stopped_process_are_seen_at_once(tmp_path: Path, child: subprocess.Popen[bytes]) -> None:
    other(tmp_path, child, phase="encode", step=5, place=1)
    who = rf"rank 1 on {re.escape(socket.gethostname())} \(process {child.pid}\)"
    child.send_signal(signal.SIGSTOP)
    while processes.state(child.pid, processes.started(child.pid)) != STOPPED:
        time.sleep(0.01)
    begun = time.monotonic()
    assert re.match(rf"{who} is stopped in encode of step 5", explained(tmp_path, LATE, 60.0))
    child.kill()
    child.wait()
    assert re.match(rf"{who} has died, last seen in encode of step 5", explained(tmp_path, CLOSED, 60.0))
    assert time.monotonic() - begun < 5, "it does not wait for beats that cannot come"


def test_a_rank_of_another_machine_is_silent_after_some_beats(
    tmp_path: Path, child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the reader's own clock: the other's is a day off, and the reader's jumps."""
    other(tmp_path, child, host="node7", phase="loss", step=5, place=2, time="2001-01-01 00:00:00")
    clock = iter(range(10**9, 0, -86_400))
    monkeypatch.setattr("time.time", lambda: float(next(clock)))
    line = explained(tmp_path, LATE)
    assert line.startswith(f"rank 1 on node7 (process {child.pid}) does not answer, last seen in loss of step 5")


def test_a_network_that_is_cut_between_living_ranks_is_named(tmp_path: Path, child: subprocess.Popen[bytes]) -> None:
    other(tmp_path, child, host="node7", phase="loss", step=5, place=2, failure="RuntimeError: Timed out", lost=True)
    line = explained(tmp_path, LATE)
    hosts = ", ".join(sorted(["node7", socket.gethostname()]))
    assert line.startswith(
        f"all ranks live and wait for each other in loss of step 5: the network between {hosts} may be"
    )


def test_a_hang_is_announced_before_the_time_out(
    tmp_path: Path, child: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    other(tmp_path, child, phase="encode", step=5, place=1, since_s=0.5)
    child.send_signal(signal.SIGSTOP)
    with Heartbeat(tmp_path, World(0, 2, CPU), 0.6) as heart:
        heart.enter("encode", 5)
        heart.enter("loss", 5)
        time.sleep(0.9)
    printed = capsys.readouterr().err.splitlines()
    assert len(printed) == 1, printed
    assert "is stopped in encode of step 5" in printed[0]
    assert printed[0].endswith("; after launch.timeout_s=0.6 the run ends")


@pytest.mark.parametrize(
    ("error", "size", "kept"),
    [
        (None, 2, False),
        (StoppedError("saved"), 2, False),
        (KeyboardInterrupt(), 2, False),
        (UserError("data.train"), 1, False),
        (UserError("data.train"), 2, True),
        (ValueError("bad\nrow"), 1, True),
        (ConnectionResetError(104, "Connection reset by peer"), 2, True),
    ],
)
def test_a_record_stays_where_others_may_ask_why(
    tmp_path: Path, error: BaseException | None, size: int, kept: bool
) -> None:
    try:
        with Heartbeat(tmp_path, World(0, size, CPU), 60.0) as heart:
            assert [one.pid for one in read(tmp_path)] == [os.getpid()]
            heart.enter("encode", 5)
            if error:
                raise error
    except BaseException as raised:
        assert raised is error
    found = read(tmp_path)
    assert bool(found) == kept == (tmp_path / heartbeat.FOLDER).exists()
    assert not kept or found[0].failure.startswith(f"{type(error).__name__}: ")
    assert not kept or heartbeat.where(tmp_path, 0) == f" on {socket.gethostname()} in encode of step 5"


def test_a_full_or_damaged_folder_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / heartbeat.FOLDER).mkdir()
    path_of(tmp_path, 1).write_text('{"rank": 1, "unknown": 2}')
    path_of(tmp_path, 2).write_text('{"rank": ')

    def stale(path: Path) -> Any:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr("clipscale.common.files.open_lock", stale)
    with Heartbeat(tmp_path, World(0, 1, CPU), 60.0) as heart:
        heart.enter("encode", 5)
        assert read(tmp_path) == []


def test_a_new_start_knows_nothing_of_the_ranks_before(tmp_path: Path) -> None:
    """They may have been more, on other machines."""
    (tmp_path / heartbeat.FOLDER).mkdir()
    path_of(tmp_path, 3).write_text(json.dumps(asdict(beat(3, failure="ValueError: of yesterday"))))
    assert len(read(tmp_path)) == 1
    lock = RunLock(tmp_path)
    lock.enter()
    lock.release()
    assert read(tmp_path) == []


def test_the_launcher_says_where_a_killed_worker_was(tmp_path: Path, child: subprocess.Popen[bytes]) -> None:
    other(tmp_path, child, phase="replay", step=4, host="node7")
    failure = SimpleNamespace(message="", timestamp=5, exitcode=-9, signal_name=lambda: "SIGKILL")
    error: Any = SimpleNamespace(failures={1: failure})
    expected = "worker 1 failed: killed by SIGKILL on node7 in replay of step 4; the machine may be out of memory"
    assert str(local.first_failure(error, tmp_path)) == expected


def test_a_lost_rank_is_one_line_without_the_workers_own_failure(tmp_path: Path) -> None:
    message = {"message": "LostRankError: rank 1 on node7 has died", "extraInfo": {"py_callstack": "stack"}}
    error: Any = SimpleNamespace(failures={0: SimpleNamespace(message=message, timestamp=5, exitcode=1)})
    found = local.first_failure(error, tmp_path)
    assert (str(found), getattr(found, "details", None)) == ("rank 1 on node7 has died", "")


def test_a_rank_that_never_starts_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"RANK": "1", "WORLD_SIZE": "3", distributed.STORE: str(tmp_path / "store")}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    distributed.store.cache_clear()
    distributed.store().set("group/here/2", "node7")
    hosts = ", ".join(sorted([socket.gethostname(), "node7"]))
    line = f"rank 0 of 3 did not start within launch.timeout_s=0.2; the others are on {hosts}"
    try:
        with pytest.raises(LostRankError, match=re.escape(line)) as found:
            distributed.start("cpu", timeout_s=0.2)
    finally:
        distributed.store.cache_clear()
    assert found.value.first, "of those that came, the lowest says so"


def test_a_save_waits_for_a_slow_disk_but_not_for_a_rank_that_is_gone(
    tmp_path: Path, child: subprocess.Popen[bytes]
) -> None:
    with Heartbeat(tmp_path, World(0, 2, CPU), 0.3) as heart:
        heart.enter("save", 5)
        for number in range(10):
            other(tmp_path, child, phase="save", step=5, place=1, number=number)
            time.sleep(0.05)
            heart.check()
    child.send_signal(signal.SIGSTOP)
    with (
        pytest.raises(LostRankError, match="is stopped in save of step 5"),
        Heartbeat(tmp_path, World(0, 2, CPU), 0.3) as heart,
    ):
        heart.enter("save", 5)
        while True:
            time.sleep(0.05)
            heart.check()
