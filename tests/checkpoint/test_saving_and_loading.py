"""Checkpoints appear whole or not at all, damage is found, and what does not fit a run is named."""

import errno
import json
import logging
import math
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter

from clipscale import __version__, checkpoint
from clipscale.checkpoint.format import size_and_crc32
from clipscale.checkpoint.loading import verify
from clipscale.cli.train_checks import check_resume
from clipscale.common.batch import ChunkSizes
from clipscale.common.errors import UserError
from clipscale.common.goal import Goal
from clipscale.common.rng import RandomState
from clipscale.data.loader.position import DataPosition, StreamPosition
from clipscale.distributed.world import World
from clipscale.run_folder.chosen_checkpoint import BestFinder, find_checkpoint
from clipscale.run_folder.paths import checkpoint_path, checkpoints_of
from clipscale.run_folder.set_aside import set_aside_for_resume
from tests.conftest import Capture
from tests.support.checkpoints import ONE_RANK, save, saver_of, steps, write_result
from tests.support.user_errors import refused

FILES = ["__0_0.distcp", ".metadata", "meta.json"]


def some_state(value: float = 1.0) -> dict:
    return {
        "model": {"w": torch.full((3,), value)},
        "random": [RandomState.now(torch.device("cpu"))],
        "loss": 0.5,
    }


def test_a_save_returns_while_the_disk_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    returned, write = Event(), FileSystemWriter.write_data
    monkeypatch.setattr(FileSystemWriter, "write_data", lambda *given: returned.wait(120) and write(*given))
    saver = saver_of(tmp_path)
    saver.save(checkpoint.CheckpointState(1, **some_state()))
    assert steps(tmp_path) == []
    returned.set()
    saver.wait_for_save()
    assert steps(tmp_path) == [1]


def test_what_is_loaded_is_what_was_saved(tmp_path: Path) -> None:
    state = some_state() | {"optimizer": {"state": {"w": {"step": torch.tensor(3)}}, "param_groups": [{"lr": 1e-300}]}}
    path = save(tmp_path, 4, state | {"model": {"a.b": torch.ones(2).bfloat16()}, "ema": None}, keep=1)
    loaded = checkpoint.load(path)
    assert torch.equal(loaded.model["a.b"], torch.ones(2).bfloat16())
    assert torch.equal(loaded.random[0].cpu, torch.get_rng_state())
    assert loaded.optimizer["state"]["w"]["step"] == 3
    assert loaded.optimizer["param_groups"] == [{"lr": 1e-300}]
    assert (loaded.step, loaded.loss, loaded.ema, loaded.version) == (4, 0.5, None, __version__)
    of_others = checkpoint.CheckpointState.from_state_dict({"step": 4, "a field of a later version": 1})
    assert (of_others.step, of_others.version) == (4, "")
    assert not checkpoint.load(path, entries=("model",)).optimizer["state"]["w"], "no other tensors are read"


# The entries of meta.json, in the order of earlier versions.
ENTRIES = """step samples batch loss model model_config optimizer optimizer_name scaler ema chunks random position
version"""
STATES = {"model", "optimizer", "scaler", "ema"}


def test_every_field_is_written_and_a_description_is_all_but_the_states(tmp_path: Path) -> None:
    names = ENTRIES.split()
    assert [*checkpoint.CheckpointState().state_dict()] == names
    assert vars(checkpoint.CheckpointState()).keys() == {*names}
    description = checkpoint.read_description(save(tmp_path, 4, some_state(), keep=1))
    assert vars(description).keys() == {*names} - STATES
    assert (description.step, description.loss) == (4, 0.5)


def test_chunks_and_positions_have_the_form_that_earlier_versions_read(tmp_path: Path) -> None:
    position = DataPosition("digest", 2, {0: StreamPosition(1, 5), 1: StreamPosition(0, 7, ((2, 3), (0, 4)))})
    path = save(tmp_path, 1, {"chunks": ChunkSizes(8, 16, "cpu"), "position": position}, keep=1)
    values = json.loads((path / "meta.json").read_text())["meta"]["values"]
    assert values["chunks"] == {"image": 8, "text": 16, "device": "cpu"}
    assert values["position"] == {"order": "digest", "streams": 2, "at": {"0": [1, 5], "1": [0, 7, [2, 3], [0, 4]]}}
    loaded = checkpoint.load(path)
    assert (loaded.chunks, loaded.position) == (ChunkSizes(8, 16, "cpu"), position)
    older = checkpoint.CheckpointState.from_state_dict({"step": 4, "chunks": {}, "position": {}})
    assert (older.chunks, older.position, older.random) == (None, None, [])


def test_the_newest_and_every_mth_are_kept(tmp_path: Path) -> None:
    for step in range(1, 10):
        assert save(tmp_path, step, some_state(), keep=2, keep_every=4).name == f"step_0000000{step}"
    assert steps(tmp_path) == [4, 7, 8, 9]
    save(tmp_path, 10, some_state(), keep=0)
    assert len(checkpoints_of(tmp_path)) == 5


def test_a_run_taken_back_keeps_what_it_saves(tmp_path: Path) -> None:
    """The run's new checkpoints have lower numbers than the old ones."""
    for step, keep in ((9, 0), (10, 0), (5, 2), (6, 2), (7, 2)):
        save(tmp_path, step, some_state(), keep=keep)
    assert steps(tmp_path) == [6, 7, 9, 10]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system for two checkpoints of the small run, and not for three."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder]).returncode:
        pytest.skip("only root may mount a small file system here")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("is_last", [False, True])
def test_training_goes_on_without_a_save_that_fails(disk: Path, capsys: Capture, is_last: bool) -> None:
    """A run that ends by its next save does not say that it goes on."""
    saver = saver_of(disk)
    for step, numbers in ((1, 10), (2, 2**20), (3, 10)):
        saver.save(checkpoint.CheckpointState(step, model={"w": torch.zeros(numbers)}), wait=step == 3 and is_last)
    saver.close()
    assert steps(disk) == [1, 3]
    printed = capsys.readouterr().out
    assert "step_00000002 could not be written (No space left on device)" in printed
    assert ("training continues without it" in printed) != is_last, printed


def test_a_save_that_fails_says_which_checkpoints_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for number in range(2):
        with monkeypatch.context() as patch:
            patch.setattr("clipscale.checkpoint.saving.ChecksumWriter.write_data", full)
            with refused("No space left") as failed:
                saver_of(tmp_path).save(checkpoint.CheckpointState(9, **some_state()), wait=True)
        assert ("earlier ones stay" in str(failed.value)) == (number > 0), failed.value
        save(tmp_path, 1, some_state(), keep=0)


def test_a_rank_lost_while_it_writes_does_not_hide_the_error_that_ends_the_run(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = Future()
    lost.set_exception(RuntimeError("Connection closed by peer [127.0.0.1]:1"))
    monkeypatch.setattr(torch.distributed.checkpoint, "async_save", lambda *_, **__: lost)
    saver = saver_of(tmp_path)
    saver.save(checkpoint.CheckpointState(1, **some_state()))
    saver.close()
    assert "not complete (Connection closed by peer" in capsys.readouterr().out


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def flipped(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[:-6] + bytes([data[-6] ^ 1]) + data[-5:])


def empty(file: Path) -> None:
    file.write_bytes(b"")


@pytest.mark.parametrize("damage", [cut, flipped, empty, Path.unlink])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_newest_is_set_aside_for_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None], name: str
) -> None:
    assert checkpoint.newest_undamaged(tmp_path, "auto", ONE_RANK) is None
    first = save(tmp_path, 1, some_state(1.0), keep=0)
    newest = save(tmp_path, 2, some_state(2.0), keep=0)
    damage(newest / name)
    with refused(r"step_00000002 is damaged"):
        checkpoint.load(newest)
    assert checkpoint.newest_undamaged(tmp_path / "mine", str(tmp_path), ONE_RANK) == first, "another run's folder"
    assert len(checkpoints_of(tmp_path)) == 2
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert checkpoint.newest_undamaged(tmp_path, "auto", ONE_RANK) == first
    (notice,) = caplog.messages
    assert notice.endswith("it is now step_00000002.damaged; the run continues from step_00000001")
    assert checkpoints_of(tmp_path) == [first]


@pytest.mark.parametrize("at", [0.2, 0.5, 0.8])
def test_damage_anywhere_in_a_file_of_several_blocks_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: float
) -> None:
    monkeypatch.setattr("clipscale.checkpoint.format.READ_BYTES", 4096)
    path = save(tmp_path, 1, {"model": {"w": torch.zeros(5000)}}, keep=0)
    verify(path)
    data = bytearray((path / FILES[0]).read_bytes())
    data[int(at * len(data))] ^= 1
    (path / FILES[0]).write_bytes(data)
    with refused(rf"checksum of {FILES[0]} differs"):
        verify(path)


def test_what_was_set_aside_before_stays(tmp_path: Path) -> None:
    """A run goes back twice to one step, and one step is damaged twice."""
    for value in (1.0, 2.0):
        save(tmp_path, 1, some_state(), keep=0)
        save(tmp_path, 2, some_state(value), keep=0)
        set_aside_for_resume(tmp_path, 1, starts_from_other_folder=False)
        empty(save(tmp_path, 2, some_state(value), keep=0) / ".metadata")
        assert checkpoint.newest_undamaged(tmp_path, "auto", ONE_RANK) == checkpoint_path(tmp_path, 1)
    names = [path.name for path in checkpoint_path(tmp_path, 1).parent.glob("*02*")]
    assert sorted(names) == [f"step_00000002.{name}" for name in ("aside", "aside-2", "damaged", "damaged-2")]
    first = checkpoint_path(tmp_path, 1).with_name("step_00000002.aside")
    assert checkpoint.load(first).model["w"][0] == 1.0


def test_a_run_without_a_whole_checkpoint_does_not_begin_again(tmp_path: Path) -> None:
    for step in (1, 2):
        empty(save(tmp_path, step, some_state(), keep=0) / "meta.json")
    for _ in range(2):  # a requeued job asks again
        with refused(r"step_00000002 is damaged .*; no other can be read"):
            checkpoint.newest_undamaged(tmp_path, "auto", ONE_RANK)


def test_resume_reads_a_path_a_run_folder_or_a_runs_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    named = save(Path("runs/b32"), 7, some_state(), keep=0)
    assert checkpoint.newest_undamaged(tmp_path / "b", "b32", ONE_RANK) == named
    check_resume("b32")  # is not refused
    with refused("^resume=b64: there is no such file or run folder"):
        check_resume("b64")
    path = save(tmp_path / "a", 7, some_state(), keep=0)
    assert checkpoint.newest_undamaged(tmp_path / "b", str(path), ONE_RANK) == path
    assert checkpoint.newest_undamaged(tmp_path / "b", str(tmp_path / "a"), ONE_RANK) == path
    assert checkpoint.newest_undamaged(tmp_path / "a", "none", ONE_RANK) is None
    with refused("no checkpoint in"):
        checkpoint.newest_undamaged(tmp_path / "a", str(tmp_path), ONE_RANK)


def test_ranks_that_see_different_checkpoints_do_not_start(tmp_path: Path) -> None:
    class Peer(World):
        def all_gather_object(self, value: Any) -> list[Any]:
            return [value, [tmp_path / "checkpoints/step_00000007"] if value == [] else value]

    with refused("the processes see different checkpoints; put the folder on storage"):
        checkpoint.newest_undamaged(tmp_path, "auto", Peer(0, 1, torch.device("cpu")))


@pytest.mark.parametrize(
    ("goal", "best"),
    [
        ("birds/top1", 3),
        ("cats/top1", 3),
        ("birds/loss", 2),
        ("birds/caption_loss", 2),
        ("birds/perplexity", 2),
        ("birds/broken", 2),
        ("dogs/top1", None),
    ],
)
def test_the_best_checkpoint_stays_beside_the_newest(tmp_path: Path, goal: str, best: int | None) -> None:
    """If several are equally good, the first one stays. A step with a result that is not a number is never the best."""
    values = {1: 0.3, 2: 0.2, 3: 0.7, 4: math.nan, 5: 0.7, 6: 0.6}
    for step, value in values.items():
        write_result(tmp_path, step, value, goal.rpartition("/")[2])
    retention = checkpoint.Retention(1, best=BestFinder(tmp_path, Goal.parse("checkpoint.best", goal)))
    saver = saver_of(tmp_path, retention)
    for step in range(1, 8):
        saver.save(checkpoint.CheckpointState(step, **some_state()), wait=True)
    assert steps(tmp_path) == ([best] if best else []) + [7]


def test_a_checkpoint_that_could_not_be_written_is_not_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step is compared with a checkpoint that is being written, until that write has failed."""
    may_fail = Event()

    def full_disk(*_: object) -> None:
        may_fail.wait(120)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(FileSystemWriter, "write_data", full_disk)
    for step, value in ((1, 0.7), (2, 0.5)):
        write_result(tmp_path, step, value)
    retention = checkpoint.Retention(best=BestFinder(tmp_path, Goal.parse("checkpoint.best", "birds/top1")))
    saver = saver_of(tmp_path, retention)
    saver.save(checkpoint.CheckpointState(1, **some_state()))
    assert not saver.is_best_so_far(2)
    may_fail.set()
    deadline = time.monotonic() + 60
    while not (is_best := saver.is_best_so_far(2)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert is_best, "step 1 has no checkpoint, so step 2 is the best"
    saver.close()


def test_the_best_checkpoint_is_found_by_what_the_run_was_told(tmp_path: Path) -> None:
    for step, value in ((1, 0.3), (2, 0.7), (3, 0.5)):
        save(tmp_path, step, some_state(), keep=0)
        write_result(tmp_path, step, value)
    with pytest.raises(UserError, match=r"step=best: .* was not trained with checkpoint\.best"):
        find_checkpoint(tmp_path, "best")
    (tmp_path / "config.yaml").write_text("checkpoint: {best: birds/top1}")
    assert find_checkpoint(tmp_path, "best").name == "step_00000002"
    (tmp_path / "config.yaml").write_text("checkpoint: {best: birds/top5}")
    with pytest.raises(UserError, match=r"step=best: no checkpoint .* has a birds/top5"):
        find_checkpoint(tmp_path, "best")


def test_a_checkpoint_of_an_earlier_version_has_this_checksum(tmp_path: Path) -> None:
    """The number in meta.json is the CRC-32 of zlib and gzip."""
    (tmp_path / "file").write_bytes(b"123456789")
    assert size_and_crc32(tmp_path / "file") == (9, 0xCBF43926)
