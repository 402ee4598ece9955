"""Save, find and load the state of a run: RUN/checkpoints/step_00001000.pt, written whole or not at all."""

import logging
import os
import re
from dataclasses import asdict
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from clipscale.config.sections import ModelConfig
from clipscale.errors import UserError
from clipscale.models.towers import ClipModel, build_model

log = logging.getLogger(__name__)

FORMAT = 1
LOAD_ERRORS = (RuntimeError, EOFError, OSError, UnpicklingError, KeyError)


def path_of(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step_{step:08d}.pt"


def found(run: Path) -> list[Path]:
    """The run's checkpoints, oldest first."""
    return sorted(p for p in (run / "checkpoints").glob("step_*.pt") if re.fullmatch(r"step_\d+\.pt", p.name))


def save(run: Path, step: int, state: dict[str, Any], *, keep: int) -> Path:
    """Write `state` (tensors and plain values only) as the run's checkpoint at `step`, then drop all but the newest `keep` up to it.

    The file appears under its name only when it is complete and on disk; a failed write leaves the earlier ones untouched.

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


def set_aside(run: Path, step: int) -> None:
    """Rename checkpoints beyond `step`: of a run that is taken back to it, they are no longer the newest, but they are not lost."""
    for path in found(run):
        if path.name > path_of(run, step).name:
            aside = path.with_suffix(".pt.aside")
            path.replace(aside)
            log.warning("%s is beyond step %d, from which the run goes on; it is now %s", path.name, step, aside.name)


def load(path: Path) -> dict[str, Any]:
    """A checkpoint's state on the CPU, read without executing pickled code.

    Raises UserError for a missing or damaged file, or one of another format.
    """
    if not path.is_file():
        raise UserError(f"checkpoint {path} does not exist")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except LOAD_ERRORS as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"checkpoint {path} is damaged or not a checkpoint ({reason})") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise UserError(f"checkpoint {path} is not in this version's format")
    return state


def to_resume(run: Path, resume: str) -> dict[str, Any] | None:
    """The state that `resume` asks for: `auto` (the run's newest readable checkpoint, or none), `none`, or a path.

    A path is a checkpoint, or a run folder, whose newest checkpoint is meant. Raises UserError for a path without one, and for
    `auto` when every checkpoint of the run is damaged.
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


def check_same_model(state: dict[str, Any], config: ModelConfig) -> None:
    """Refuse to resume a model of another shape. Raises UserError naming what differs."""
    saved = state["model_config"]
    wanted = asdict(config)
    differing = [k for k in ("name", "architecture") if saved.get(k) != wanted[k]]
    if differing:
        key = differing[0]
        raise UserError(
            f"resume: the checkpoint holds model.{key}={saved.get(key)!r}, this run asks for {wanted[key]!r}; "
            "give the same model, or another run=NAME"
        )


def load_model(run: Path, checkpoint: str = "latest") -> tuple[ClipModel, ModelConfig, int]:
    """The trained model of a run, in evaluation mode on the CPU, its settings, and the step it was saved at.

    `checkpoint` is `latest`, a step number, or a path. Raises UserError where there is none.
    """
    if checkpoint == "latest":
        candidates = found(run)
        if not candidates:
            raise UserError(f"run={run}: no checkpoint in {run / 'checkpoints'}")
        path = candidates[-1]
    elif checkpoint.isdigit():
        path = path_of(run, int(checkpoint))
    else:
        path = Path(checkpoint).expanduser()
    state = load(path)
    config = ModelConfig(**{**state["model_config"], "pretrained": None, "pretrained_image": None, "compile": False})
    model = build_model(config)
    model.load_state_dict(state["model"])
    return model.eval(), config, int(state["step"])
