"""Disks that are full, read-only, stale or damaged: training goes on without a save, and the resumed curve is the undisturbed one.

All are slow; the logic has quick tests beside it (tests/checkpoint/test_folder.py).
"""

import errno
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from clipscale import checkpoint
from clipscale.common.errors import UserError
from clipscale.config.sections import CheckpointConfig
from clipscale.train import Run, train
from tests.checkpoint.test_folder import cut, flipped, zeroed
from tests.launch.test_faults import STEPS, alone, interrupted, some_steps
from tests.support.runs import curve

__all__ = ["alone"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def mounted(*words: str | Path) -> None:
    if os.geteuid() or subprocess.run(["mount", *map(str, words)]).returncode:
        pytest.skip("only root may mount here")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system for two checkpoints of this model, and not for three."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted("-t", "tmpfs", "-o", "size=52m", "tmpfs", folder)
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_run_on_a_full_disk_goes_on_without_the_save_and_says_so(
    demo: Path, alone: list[float], disk: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    run = disk / "run"
    config = some_steps(demo, run, checkpoint=CheckpointConfig(every=1, keep=0))
    with pytest.raises(
        UserError, match=r"step_00000006 could not be written .*newest complete one is step_00000002; free"
    ):
        train(config)
    assert curve(run) == alone, "all steps were trained"
    notices = [line for line in caplog.messages if "training goes on without it, free some space" in line]
    assert [re.findall(r"step_0000000\d", line)[0][-1] for line in notices] == ["3", "4", "5"]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step_00000001", "step_00000002"]
    mounted("-o", "remount,size=200m", disk)
    assert train(config)["step"] == STEPS
    assert "going on after step 2 of 6" in capsys.readouterr().out
    assert curve(run) == alone


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EROFS, errno.EIO])
def test_a_folder_that_fails_for_a_while_costs_a_save_and_no_record(
    demo: Path, alone: list[float], tmp_path: Path, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    """As an NFS server that starts anew: every call on the folder fails in steps 2 and 3, and works again afterwards."""
    run, step = tmp_path / "run", Run.optimizer_step
    bad = False
    originals = {name: getattr(os, name) for name in ("open", "mkdir", "stat", "rename", "replace", "scandir")}
    usage = shutil.disk_usage

    def failing(name: str) -> Callable[..., Any]:
        def call(path: Any, *given: Any, **named: Any) -> Any:
            if bad and str(path).startswith(str(run)):
                raise OSError(number, os.strerror(number), str(path))
            return originals[name](path, *given, **named)

        return call

    def disturbed(self: Run) -> dict[str, Any]:
        nonlocal bad
        record = step(self)
        bad = self.step + 1 in (2, 3)
        return record

    def no_usage(path: Any) -> Any:
        return originals["stat"](path) and usage(path) if not bad else failing("stat")(path)

    patches = [patch.object(os, name, failing(name)) for name in originals]
    with patch.object(Run, "optimizer_step", disturbed), patch("shutil.disk_usage", no_usage):
        for one in patches:
            one.start()
        try:
            result = train(some_steps(demo, run, checkpoint=CheckpointConfig(every=1, keep=0, background=False)))
        finally:
            for one in patches:
                one.stop()
    assert result["step"] == STEPS
    assert curve(run) == alone
    saved = [checkpoint.step_of(path) for path in checkpoint.found(run)]
    assert saved == [1, 4, 5, 6], saved
    notices = [line for line in caplog.messages if "training goes on without it" in line]
    assert len(notices) == 2 and all(os.strerror(number) in line for line in notices), notices


def test_a_read_only_folder_is_one_line_and_nothing_changes(demo: Path, alone: list[float], tmp_path: Path) -> None:
    run = tmp_path / "run"
    interrupted(0, 1, some_steps(demo, run), 4)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    mounted("--bind", run, run)
    try:
        mounted("-o", "remount,ro,bind", run)
        with pytest.raises(UserError, match=rf"^run={run} cannot be written \(Read-only file system\); choose another"):
            train(some_steps(demo, run))
    finally:
        subprocess.run(["umount", "-l", run], check=True)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    train(some_steps(demo, run))
    assert curve(run) == alone


@pytest.mark.parametrize("damage", [cut, flipped, zeroed])
def test_a_run_goes_on_from_before_its_damaged_checkpoint(
    demo: Path, alone: list[float], tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    interrupted(0, 1, some_steps(demo, tmp_path / "run"), 4)
    newest = checkpoint.found(tmp_path / "run")[-1]
    damage(newest / "rank_00000.safetensors")
    train(some_steps(demo, tmp_path / "run"))
    assert curve(tmp_path / "run") == alone
    assert any("step_00000004" in line and "damaged" in line for line in caplog.messages), caplog.messages
