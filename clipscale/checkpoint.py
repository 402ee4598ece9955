"""The folder of a run and its checkpoints, RUN/checkpoints/step_00001000.pt. A checkpoint is written whole or not at all."""

import logging
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from clipscale.config.train import TrainConfig
from clipscale.errors import UserError

log = logging.getLogger(__name__)

FORMAT = 2
"""Format 1, which is still read, has the optimizer's state by position instead of by parameter name."""
LOAD_ERRORS = (RuntimeError, EOFError, OSError, UnpicklingError, KeyError)


def make_folder(run: Path) -> None:
    """Make the run's folder. Raises UserError where it cannot be written."""
    try:
        (run / "checkpoints").mkdir(parents=True, exist_ok=True)
        probe = run / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"run={run} cannot be written ({error.strerror}); choose another run=PATH") from error


def remove_empty_run(run: Path, *files: str) -> None:
    """Remove the folder of a run that was refused at its start, if it holds no checkpoint and nothing beside `files`."""
    held = {path.name for path in run.iterdir()} if run.is_dir() else set()
    if "checkpoints" in held and held <= {"checkpoints", *files} and not any((run / "checkpoints").iterdir()):
        for file in files:
            (run / file).unlink(missing_ok=True)
        (run / "checkpoints").rmdir()
        run.rmdir()


def path_of(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step_{step:08d}.pt"


def found(run: Path) -> list[Path]:
    """The run's checkpoints, oldest first."""
    return sorted(p for p in (run / "checkpoints").glob("step_*.pt") if re.fullmatch(r"step_\d+\.pt", p.name))


def save(run: Path, step: int, state: dict[str, Any], *, keep: int) -> Path:
    """Write `state` (tensors and plain values only) as the run's checkpoint at `step`; then delete all but the newest `keep` up to it.

    The file gets its name when it is complete and on disk. A failed write changes no earlier checkpoint.

    Raises UserError where it cannot be written.
    """
    path = path_of(run, step)
    temporary = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            torch.save({"format": FORMAT, "step": step, **state}, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except (OSError, RuntimeError) as error:
        temporary.unlink(missing_ok=True)
        kept = found(run)
        rest = f"the newest complete one is {kept[-1].name}" if kept else "there is no earlier one"
        raise UserError(f"checkpoint {path} could not be written ({error}); {rest}; make room and resume") from error
    if keep:
        for old in [other for other in found(run) if other.name <= path.name][:-keep]:
            old.unlink()
    return path


def save_diverged(run: Path, step: int, state: dict[str, Any]) -> None:
    """Write what is needed to look into a divergence to RUN/diverged/."""
    folder = run / "diverged"
    folder.mkdir(exist_ok=True)
    torch.save(state, folder / f"step_{step:08d}.pt")


def set_aside(run: Path, step: int) -> None:
    """Rename checkpoints beyond `step`, from which a run goes on: they are not the newest any more, but they are not lost."""
    for path in found(run):
        if path.name > path_of(run, step).name:
            aside = path.with_suffix(".pt.aside")
            path.replace(aside)
            log.warning("%s is beyond step %d, from which the run goes on; it is now %s", path.name, step, aside.name)


def load(path: Path) -> dict[str, Any]:
    """A checkpoint's state on the CPU. Executes no pickled code.

    Raises UserError for a missing or damaged file, and for an unknown format.
    """
    if not path.is_file():
        raise UserError(f"checkpoint {path} does not exist")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except LOAD_ERRORS as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"checkpoint {path} is damaged or not a checkpoint ({reason})") from error
    if not isinstance(state, dict) or state.get("format") not in (1, FORMAT):
        raise UserError(f"checkpoint {path} is not in this version's format")
    return state


def to_resume(run: Path, resume: str) -> dict[str, Any] | None:
    """The state that a run goes on from. `resume` is `auto` (the run's newest readable checkpoint, or None), `none`, or a path.

    A path is a checkpoint, or a run folder with at least one; its newest counts. Raises UserError for a path without a checkpoint, and
    for `auto` if every checkpoint of the run is damaged.
    """
    if resume == "none":
        return None
    if resume != "auto":
        path = Path(resume).expanduser()
        if path.is_dir():
            candidates = found(path)
            if not candidates:
                raise UserError(f"resume={resume}: no checkpoint in {path / 'checkpoints'}")
            path = candidates[-1]
        elif not path.exists():
            raise UserError(f"resume={resume}: there is no such file or run folder")
        return load(path)
    candidates = found(run)
    for path in reversed(candidates):
        try:
            return load(path)
        except UserError as error:
            log.warning("%s; trying the one before", error)
    if candidates:
        raise UserError(
            f"resume=auto: none of the {len(candidates)} checkpoints in {run} can be read; start afresh with another run=NAME"
        )
    return None


def check_same_step(steps: Sequence[int | None], run: Path) -> None:
    """Raise UserError if the ranks found checkpoints of different steps; None: no checkpoint."""
    if len(set(steps)) > 1:
        found = ", ".join(f"rank {rank}: {'none' if n is None else f'step {n}'}" for rank, n in enumerate(steps))
        raise UserError(
            f"run={run}: the processes found different checkpoints ({found}); the folder must be one that all nodes share, and hold the "
            "same for each of them"
        )


def check_fits(
    saved: dict[str, Any] | None, run: Path, config: TrainConfig, samples_before: Callable[[int], int]
) -> None:
    """Raise UserError where a run with these settings cannot go on from the checkpoint `saved`; None: where it cannot begin.

    `samples_before(step)` is the number of samples that these settings train on before a step.
    """
    if saved is None:
        if found(run):
            raise UserError(f"run={run} already holds checkpoints; go on with resume=auto, or choose another run=NAME")
        return
    if saved["batch"] != config.batch:
        raise UserError(
            f"batch={config.batch}: the checkpoint was trained with batch={saved['batch']}; go on with that, or choose another run=NAME"
        )
    for key in ("name", "architecture"):
        theirs, ours = saved["model_config"].get(key), getattr(config.model, key)
        if theirs != ours:
            raise UserError(
                f"resume: the checkpoint holds model.{key}={theirs!r}, this run asks for {ours!r}; give the same model, or another run=NAME"
            )
    if saved["optimizer_name"] != config.optim.name:
        raise UserError(
            f"resume: the checkpoint's optimizer is {saved['optimizer_name']}, not optim.name={config.optim.name}"
        )
    if saved["samples"] != samples_before(saved["step"]):
        raise UserError(
            f"resume: the checkpoint has seen {saved['samples']} samples in {saved['step']} steps, which these ramp.start, ramp.samples "
            "and ramp.rule do not make; give the ramp that it was trained with"
        )


def locate(run: Path, which: str) -> Path:
    """The file of a run's checkpoint: `latest`, a step number, or a path. Raises UserError for a run without checkpoints."""
    if which == "latest":
        candidates = found(run)
        if not candidates:
            raise UserError(f"run={run}: no checkpoint in {run / 'checkpoints'}")
        return candidates[-1]
    return path_of(run, int(which)) if which.isdigit() else Path(which).expanduser()
