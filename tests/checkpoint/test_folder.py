"""Checkpoints appear whole or not at all, are read without executing code, and name what does not fit."""

import json
import logging
import os
import pickle
import subprocess
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from clipscale import checkpoint
from clipscale.checkpoint.saving import size_of
from clipscale.common.errors import UserError
from clipscale.config.sections import ModelConfig
from clipscale.config.train import TrainConfig
from clipscale.distributed.world import World

ALONE = World(0, 1, torch.device("cpu"))


def some_state(value: float = 1.0) -> dict:
    return {
        "model": {"w": torch.full((3,), value)},
        "random": [{"cpu": torch.get_rng_state(), "cuda": None}],
        "loss": 0.5,
    }


def test_the_newest_and_every_mth_are_kept(tmp_path: Path) -> None:
    for step in range(1, 10):
        assert checkpoint.save(tmp_path, step, some_state(), keep=2, keep_every=4).name == f"step_0000000{step}"
    assert [checkpoint.step_of(path) for path in checkpoint.found(tmp_path)] == [4, 7, 8, 9]
    checkpoint.save(tmp_path, 10, some_state(), keep=0)
    assert len(checkpoint.found(tmp_path)) == 5


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder]).returncode:
        pytest.skip("only root may mount a small file system here")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("known", [True, False])
def test_a_full_disk_leaves_the_earlier_ones(small_disk: Path, monkeypatch: pytest.MonkeyPatch, known: bool) -> None:
    """Not known before: another process takes the space during the save."""
    checkpoint.save(small_disk, 1, some_state(), keep=1)
    if not known:
        monkeypatch.setattr("clipscale.checkpoint.saving.size_of", lambda *state: 0)
    reason = "it takes 4.1 MiB, and 2.0 MiB are free" if known else "No space left on device"
    with pytest.raises(checkpoint.UnwritableError, match=rf"step_00000002.*{reason}.*step_00000001; free some"):
        checkpoint.save(small_disk, 2, {"model": {"w": torch.zeros(2**20)}}, keep=1)
    assert [path.name for path in (small_disk / "checkpoints").iterdir()] == ["step_00000001"]


def test_the_size_of_a_checkpoint_is_known_before(tmp_path: Path) -> None:
    tensors = {"view": torch.zeros(2**18)[:10]} | {str(i): torch.zeros(1000 + i) for i in range(100)}
    folder = checkpoint.save(tmp_path, 1, some_state() | {"model": tensors}, keep=0)
    written = sum(file.stat().st_size for file in folder.iterdir())
    assert written <= size_of(tensors, some_state()) < 1.2 * written + 2**16


def test_what_a_dead_run_was_writing_is_removed(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 1, some_state(), keep=0)
    (tmp_path / "metrics.tmp").write_bytes(b"half")
    half = path.with_name("step_00000002.tmp")
    half.mkdir()
    (half / "rank_00000.safetensors").write_bytes(b"half")
    checkpoint.remove_temporary(tmp_path)
    assert sorted(file.name for file in tmp_path.rglob("*.*")) == sorted(file.name for file in path.iterdir())


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

    def stopped(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("clipscale.checkpoint.manifest.SummedFile.write", stopped)
    with pytest.raises(UserError, match=r"step_00000002.*Input/output error.*step_00000001"):
        checkpoint.save(tmp_path, 2, some_state(), keep=1)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_00000001"]


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def zeroed(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-12] + bytes(12))


def flipped(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[:-6] + bytes([data[-6] ^ 1]) + data[-5:])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def missing(file: Path) -> None:
    file.unlink()


@pytest.mark.parametrize("damage", [cut, zeroed, flipped, empty, missing])
@pytest.mark.parametrize("name", ["rank_00000.safetensors", "state.pt", "manifest.json"])
def test_a_damaged_newest_is_set_aside_for_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None], name: str
) -> None:
    assert checkpoint.to_resume(tmp_path, "auto", ALONE) is None
    checkpoint.save(tmp_path, 1, some_state(1.0), keep=0)
    newest = checkpoint.save(tmp_path, 2, some_state(2.0), keep=0)
    damage(newest / name)
    with pytest.raises(UserError, match=r"step_00000002 is damaged"):
        checkpoint.load(newest)
    with caplog.at_level(logging.WARNING):
        other = checkpoint.to_resume(tmp_path / "mine", str(tmp_path), ALONE)
        assert other == checkpoint.path_of(tmp_path, 1), "another run's folder"
        assert len(checkpoint.found(tmp_path)) == 2
        caplog.clear()
        assert checkpoint.to_resume(tmp_path, "auto", ALONE) == checkpoint.path_of(tmp_path, 1)
    (notice,) = caplog.messages
    assert "step_00000002 is damaged" in notice
    assert notice.endswith("it is now step_00000002.damaged; the run goes on from step_00000001")
    assert [path.name for path in checkpoint.found(tmp_path)] == ["step_00000001"]


def test_a_run_without_a_whole_checkpoint_does_not_begin_again(tmp_path: Path) -> None:
    for step in (1, 2):
        empty(checkpoint.save(tmp_path, step, some_state(), keep=0) / "manifest.json")
    for _ in range(2):  # a requeued job asks again
        with pytest.raises(UserError, match="none of the 2 checkpoints"):
            checkpoint.to_resume(tmp_path, "auto", ALONE)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_what_is_loaded_is_what_was_saved_whatever_bit_flips(tmp_path: Path, data: st.DataObject) -> None:
    """Every flip is found, but for one in the spaces of the manifest, which changes nothing."""
    path = checkpoint.save(tmp_path, 1, some_state(2.0), keep=0)
    file = path / data.draw(st.sampled_from(["manifest.json", "rank_00000.safetensors", "state.pt"]))
    whole = bytearray(file.read_bytes())
    at = int(data.draw(st.floats(0, 1, exclude_max=True)) * len(whole))  # its length differs: it holds the time
    whole[at] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(whole)
    try:
        state = checkpoint.load(path)
    except UserError:
        return
    assert torch.equal(state["model"]["w"], torch.full((3,), 2.0))
    assert (state["step"], state["loss"]) == (1, 0.5)


@pytest.mark.parametrize(
    "change",
    [
        ("rank_00000.safetensors", "../../secret"),
        ('"at":', '"at":9'),
        ('"F32"', '"F64"'),
        ('"shape":[3]', '"shape":[1000000000]'),
    ],
)
def test_a_manifest_that_no_writer_of_ours_makes_is_refused(tmp_path: Path, change: tuple[str, str]) -> None:
    """Its checksum is right: whoever made it wants to reach other files, or bytes outside of a tensor."""
    path = checkpoint.save(tmp_path, 1, some_state(), keep=0)
    inner = json.dumps(
        json.loads((path / "manifest.json").read_text())["manifest"], separators=(",", ":"), sort_keys=True
    )
    inner = inner.replace(*change)
    text = f'{{"crc32": {zlib.crc32(inner.encode())}, "manifest": {inner}}}'
    (path / "manifest.json").write_text(text)
    with pytest.raises(UserError, match="is damaged or not a checkpoint"):
        checkpoint.load(path)


def test_a_damaged_file_of_an_older_version_is_found(tmp_path: Path) -> None:
    path = checkpoint.path_of(tmp_path, 3).with_suffix(".pt")
    path.parent.mkdir()
    torch.save({"format": 2, "step": 3, "model": {"w": torch.full((64,), 3.0)}}, path)
    assert checkpoint.load(path)["step"] == 3
    data = path.read_bytes()
    at = data.index(torch.full((64,), 3.0).numpy().tobytes())
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    with pytest.raises(UserError, match=r"step_00000003\.pt is damaged .*checksum"):
        checkpoint.load(path)


def test_safetensors_reads_a_ranks_file(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 1, {"model": {"w": torch.arange(6.0).view(2, 3), "n": torch.tensor(7)}}, keep=0)
    found = load_file(path / "rank_00000.safetensors")
    assert torch.equal(found["model/w"], torch.arange(6.0).view(2, 3))
    assert found["model/n"] == 7


def test_resume_reads_a_path_or_a_run_folder(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path / "a", 7, some_state(), keep=0)
    assert checkpoint.to_resume(tmp_path / "b", str(path), ALONE) == path
    assert checkpoint.to_resume(tmp_path / "b", str(tmp_path / "a"), ALONE) == path
    assert checkpoint.to_resume(tmp_path / "a", "none", ALONE) is None
    with pytest.raises(UserError, match="no checkpoint in"):
        checkpoint.to_resume(tmp_path / "a", str(tmp_path), ALONE)
    with pytest.raises(UserError, match="there is no such file or run folder"):
        checkpoint.to_resume(tmp_path / "a", str(tmp_path / "nothing.pt"), ALONE)


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
    folder = checkpoint.save(tmp_path / "run", 1, some_state(), keep=0)
    torch.save({"x": Payload(target)}, folder / "state.pt")
    with pytest.raises(UserError, match="damaged or not a checkpoint"):
        checkpoint.load(folder, verified=True)
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
