"""Checkpoints appear whole or not at all, are read without executing code, and name what does not fit."""

import logging
import os
import pickle
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clipscale import checkpoint
from clipscale.config.sections import ModelConfig
from clipscale.config.train import TrainConfig
from clipscale.errors import UserError


def some_state(value: float = 1.0) -> dict:
    return {
        "model": {"w": torch.full((3,), value)},
        "random": [{"cpu": torch.get_rng_state(), "cuda": None}],
        "loss": 0.5,
    }


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 12, some_state(), keep=2)
    assert path.name == "step_00000012.pt"
    state = checkpoint.load(path)
    assert state["step"] == 12
    assert torch.equal(state["model"]["w"], torch.ones(3))


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3, 10):
        checkpoint.save(tmp_path, step, some_state(), keep=2)
    assert [p.name for p in checkpoint.found(tmp_path)] == ["step_00000003.pt", "step_00000010.pt"]
    checkpoint.save(tmp_path, 11, some_state(), keep=0)
    assert len(checkpoint.found(tmp_path)) == 3


def test_every_mth_is_kept_for_good(tmp_path: Path) -> None:
    for step in range(1, 10):
        checkpoint.save(tmp_path, step, some_state(), keep=2, keep_every=4)
    assert [checkpoint.step_of(path) for path in checkpoint.found(tmp_path)] == [4, 7, 8, 9]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder]).returncode:
        pytest.skip("only root may mount a small file system here")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("foreseen", [True, False])
def test_a_full_disk_leaves_the_earlier_ones(small_disk: Path, monkeypatch: pytest.MonkeyPatch, foreseen: bool) -> None:
    """Unforeseen: another process takes the space during the save."""
    checkpoint.save(small_disk, 1, some_state(), keep=1)
    if not foreseen:
        monkeypatch.setattr(checkpoint, "size_of", lambda state: 0)
    reason = "it takes 4.1 MiB, and 2.0 MiB are free" if foreseen else "No space left on device"
    with pytest.raises(checkpoint.DiskFullError, match=rf"step_00000002.*{reason}.*step_00000001\.pt"):
        checkpoint.save(small_disk, 2, {"model": {"w": torch.zeros(2**20)}}, keep=1)
    assert [path.name for path in (small_disk / "checkpoints").iterdir()] == ["step_00000001.pt"]


def test_the_size_of_a_checkpoint_is_known_before(tmp_path: Path) -> None:
    state = some_state() | {"many": [torch.zeros(1000 + i) for i in range(100)], "view": torch.zeros(2**18)[:10]}
    written = checkpoint.save(tmp_path, 1, state, keep=0).stat().st_size
    assert written <= checkpoint.size_of(state) < 1.05 * written + 2**16


def test_what_a_dead_run_was_writing_is_removed(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 1, some_state(), keep=0)
    for left in (tmp_path / "metrics.tmp", path.with_name("step_00000002.tmp")):
        left.write_bytes(b"half")
    checkpoint.remove_temporary(tmp_path)
    assert [file.name for file in tmp_path.rglob("*.*")] == [path.name]


def test_a_run_taken_back_keeps_what_it_saves(tmp_path: Path) -> None:
    """Its new checkpoints have lower numbers than the old ones."""
    for step in (9, 10, 11):
        checkpoint.save(tmp_path, step, some_state(), keep=0)
    checkpoint.save(tmp_path, 5, some_state(), keep=2)
    checkpoint.save(tmp_path, 6, some_state(), keep=2)
    checkpoint.save(tmp_path, 7, some_state(), keep=2)
    assert [int(p.stem[5:]) for p in checkpoint.found(tmp_path)] == [6, 7, 9, 10, 11]


def test_a_failed_write_leaves_the_earlier_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(tmp_path, 1, some_state(), keep=1)

    def full(obj: object, file: object) -> None:
        file.write(b"half")  # type: ignore[attr-defined]
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(UserError, match=r"step_00000002.*No space left.*step_00000001\.pt"):
        checkpoint.save(tmp_path, 2, some_state(), keep=1)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_00000001.pt"]


def cut(data: bytes, tensor: torch.Tensor) -> bytes:
    return data[:-100]


def zero_a_tensor(data: bytes, tensor: torch.Tensor) -> bytes:
    whole = tensor.numpy().tobytes()
    assert data.count(whole) == 1
    return data.replace(whole, bytes(len(whole)))


def flip_a_bit(data: bytes, tensor: torch.Tensor) -> bytes:
    at = data.index(tensor.numpy().tobytes())
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def empty(data: bytes, tensor: torch.Tensor) -> bytes:
    return b""


@pytest.mark.parametrize("damage", [cut, zero_a_tensor, flip_a_bit, empty])
def test_a_damaged_newest_is_set_aside_for_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[bytes, torch.Tensor], bytes]
) -> None:
    assert checkpoint.to_resume(tmp_path, "auto") is None
    checkpoint.save(tmp_path, 1, some_state(1.0), keep=0)
    newest = checkpoint.save(tmp_path, 2, some_state(2.0), keep=0)
    newest.write_bytes(damage(newest.read_bytes(), some_state(2.0)["model"]["w"]))
    with pytest.raises(UserError, match=r"step_00000002\.pt is damaged"):
        checkpoint.load(newest)
    with caplog.at_level(logging.WARNING):
        assert checkpoint.to_resume(tmp_path, str(tmp_path)) == checkpoint.path_of(tmp_path, 1), "another run's folder"
        assert len(checkpoint.found(tmp_path)) == 2
        caplog.clear()
        assert checkpoint.to_resume(tmp_path, "auto") == checkpoint.path_of(tmp_path, 1)
    (notice,) = caplog.messages
    assert "step_00000002.pt is damaged" in notice
    assert notice.endswith("it is now step_00000002.pt.damaged; the run goes on from step_00000001.pt")
    assert [path.name for path in checkpoint.found(tmp_path)] == ["step_00000001.pt"]


def test_a_run_without_a_whole_checkpoint_does_not_begin_again(tmp_path: Path) -> None:
    for step in (1, 2):
        checkpoint.save(tmp_path, step, some_state(), keep=0).write_bytes(b"")
    for _ in range(2):  # a requeued job asks again
        with pytest.raises(UserError, match="none of the 2 checkpoints"):
            checkpoint.to_resume(tmp_path, "auto")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_what_is_loaded_is_what_was_saved_whatever_bit_flips(tmp_path: Path, data: st.DataObject) -> None:
    """A flip in the padding between records changes nothing; any other one is found."""
    path = checkpoint.save(tmp_path, 1, some_state(2.0), keep=0)
    whole = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(whole)
    try:
        state = checkpoint.load(path)
    except UserError:
        return
    assert torch.equal(state["model"]["w"], torch.full((3,), 2.0))
    assert (state["step"], state["loss"]) == (1, 0.5)
    assert torch.equal(state["random"][0]["cpu"], torch.get_rng_state())


def test_a_file_without_checksums_still_loads(tmp_path: Path) -> None:
    """Older than torch's archives."""
    path = checkpoint.path_of(tmp_path, 3)
    path.parent.mkdir()
    torch.save({"format": 1, "step": 3}, path, _use_new_zipfile_serialization=False)
    assert checkpoint.to_resume(tmp_path, "auto") == path
    assert checkpoint.load(path)["step"] == 3


def test_resume_reads_a_path_or_a_run_folder(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path / "a", 7, some_state(), keep=0)
    assert checkpoint.to_resume(tmp_path / "b", str(path)) == path
    assert checkpoint.to_resume(tmp_path / "b", str(tmp_path / "a")) == path
    assert checkpoint.to_resume(tmp_path / "a", "none") is None
    with pytest.raises(UserError, match="no checkpoint in"):
        checkpoint.to_resume(tmp_path / "a", str(tmp_path))
    with pytest.raises(UserError, match="there is no such file or run folder"):
        checkpoint.to_resume(tmp_path / "a", str(tmp_path / "nothing.pt"))


class Payload:
    def __reduce__(self) -> tuple:
        return (Path.touch, (Path(self.target),))

    def __init__(self, target: Path) -> None:
        self.target = str(target)


def test_pickled_code_is_not_executed(tmp_path: Path) -> None:
    target = tmp_path / "executed"
    for name, write in (("a.pt", lambda f, o: torch.save(o, f)), ("b.pt", lambda f, o: f.write_bytes(pickle.dumps(o)))):
        file = tmp_path / name
        write(file, {"format": 1, "step": 0, "x": Payload(target)})
        with pytest.raises(UserError, match="damaged or not a checkpoint"):
            checkpoint.load(file)
    assert not target.exists()


def test_what_does_not_fit_the_run_is_refused(tmp_path: Path) -> None:
    state = {"model_config": {"name": "ViT-B-32", "architecture": {}}, "batch": 256, "optimizer_name": "adamw"}
    state |= {"step": 3, "samples": 768}

    def check(samples_before: Callable[[int], int] = lambda step: 256 * step, **settings: Any) -> None:
        checkpoint.check_fits(state, tmp_path, TrainConfig(**settings), samples_before)

    check(model=ModelConfig(name="ViT-B-32", patch_dropout=0.5))
    with pytest.raises(UserError, match=r"model.name='ViT-B-32', this run asks for 'ViT-L-14'"):
        check(model=ModelConfig(name="ViT-L-14"))
    with pytest.raises(UserError, match=r"has seen 768 samples in 3 steps, which these ramp\.start"):
        check(samples_before=lambda step: 100 * step)
