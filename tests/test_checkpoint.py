"""Checkpoints appear whole or not at all, are read without executing code, and name what does not fit."""

import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

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


def test_auto_takes_the_newest_readable_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert checkpoint.to_resume(tmp_path, "auto") is None
    checkpoint.save(tmp_path, 1, some_state(1.0), keep=0)
    checkpoint.save(tmp_path, 2, some_state(2.0), keep=0)
    newest = checkpoint.path_of(tmp_path, 2)
    newest.write_bytes(newest.read_bytes()[:-100])
    with caplog.at_level(logging.WARNING):
        state = checkpoint.to_resume(tmp_path, "auto")
    assert state is not None
    assert state["step"] == 1
    assert "step_00000002.pt is damaged" in caplog.text
    checkpoint.path_of(tmp_path, 1).write_bytes(b"")
    with pytest.raises(UserError, match="none of the 2 checkpoints"):
        checkpoint.to_resume(tmp_path, "auto")


def test_resume_reads_a_path_or_a_run_folder(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path / "a", 7, some_state(), keep=0)
    assert checkpoint.to_resume(tmp_path / "b", str(path))["step"] == 7  # type: ignore[index]
    assert checkpoint.to_resume(tmp_path / "b", str(tmp_path / "a"))["step"] == 7  # type: ignore[index]
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
