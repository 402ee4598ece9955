"""The folder of a run and its checkpoints, RUN/checkpoints/step_00001000.pt.

A checkpoint is written whole or not at all, and its checksums are verified before it is used.
"""

import errno
import logging
import os
import re
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from clipscale.config.train import TrainConfig
from clipscale.errors import UserError
from clipscale.hardware import cores
from clipscale.units import format_bytes, whole_number

log = logging.getLogger(__name__)

FORMAT = 2
"""Format 1, which is still read, has the optimizer's state by position instead of by parameter name."""
LOAD_ERRORS = (RuntimeError, EOFError, OSError, UnpicklingError, KeyError, ValueError, AttributeError, IndexError)
VERIFY_ERRORS = (zipfile.BadZipFile, RuntimeError, OSError, ValueError, struct.error)
BLOCK = 2**24
"""Bytes read at once for a checksum: a long read for a disk, and little memory in every thread."""


def make_folder(run: Path) -> None:
    """Make the run's folder. Raises UserError where it cannot be written."""
    try:
        (run / "checkpoints").mkdir(parents=True, exist_ok=True)
        probe = run / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"run={run} cannot be written ({error.strerror}); choose another run=PATH") from error


def remove_temporary(run: Path) -> None:
    """Remove files that a run which died has not finished writing. The caller holds the run's lock."""
    for path in (*run.glob("*.tmp"), *run.glob("checkpoints/*.tmp")):
        path.unlink(missing_ok=True)


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


def step_of(path: Path) -> int:
    """The step of a checkpoint, by its name."""
    return int(path.stem.removeprefix("step_"))


def found(run: Path) -> list[Path]:
    """The run's checkpoints, oldest first."""
    return sorted(p for p in (run / "checkpoints").glob("step_*.pt") if re.fullmatch(r"step_\d+\.pt", p.name))


class DiskFullError(UserError):
    """There is not enough space for a checkpoint. The run's earlier ones are intact."""


def save(run: Path, step: int, state: dict[str, Any], *, keep: int, keep_every: int = 0) -> Path:
    """Write `state` (tensors and plain values only) as the run's checkpoint at `step`; then delete all but the newest `keep` up to it.

    Steps that are a multiple of `keep_every` are never deleted, and do not count among the newest.

    The file gets its name when it is complete and on disk. A failed write changes no earlier checkpoint.

    Raises DiskFullError, before a byte is written where the disk has less space than the checkpoint takes, and UserError where it cannot
    be written.
    """
    path = path_of(run, step)
    temporary = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        needed, free = size_of(state), shutil.disk_usage(path.parent).free
        if needed > free:
            raise OSError(errno.ENOSPC, f"it takes {format_bytes(needed)}, and {format_bytes(free)} are free")
        torch.serialization.set_crc32_options(True)  # torch's default, which `verify` relies on
        with temporary.open("wb") as file:
            torch.save({"format": FORMAT, "step": step, **state}, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except (OSError, RuntimeError) as error:
        temporary.unlink(missing_ok=True)
        kept = found(run)
        rest = f"the newest complete one is {kept[-1].name}" if kept else "there is no earlier one"
        full = _disk_full(error)
        raise (DiskFullError if full else UserError)(
            f"checkpoint {path} could not be written ({full or error}); {rest}"
        ) from error
    for old in outdated(run, step, keep, keep_every):
        old.unlink()
    return path


def outdated(run: Path, step: int, keep: int, keep_every: int) -> list[Path]:
    """The checkpoints up to `step` that are neither among the newest `keep` (0: all) nor of a multiple of `keep_every` (0: none) steps."""
    passing = [path for path in found(run) if not (keep_every and step_of(path) % keep_every == 0)]
    return [path for path in passing if step_of(path) <= step][:-keep] if keep else []


def size_of(state: dict[str, Any]) -> int:
    """Bytes of a checkpoint, a little more than it takes: its tensors, and a hundredth and 64 KiB for the rest."""
    tensors = [leaf for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return int(1.01 * sum(storages.values())) + 2**16


def _disk_full(error: BaseException | None) -> OSError | None:
    """A full disk or a spent quota among an error's causes. torch raises an error of its own when it closes the archive."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return error
        error = error.__cause__ or error.__context__
    return None


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


def verify(path: Path) -> None:
    """Compare every record of a checkpoint with its checksum. A file of another kind than torch's archives has none.

    The archive is a zip file, for which `torch.save` computes a CRC-32 of every tensor. `torch.load` ignores them. Reads in one thread per
    core: a checksum takes longer than a read from the page cache.

    Raises UserError for a damaged file.
    """
    if not _is_archive(path):
        return  # loading it fails, unless it is older than torch's archives
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            records = archive.infolist()
            for record in records:
                archive.open(record).close()  # compares the record's header with the directory
            with ThreadPoolExecutor(cores()) as threads:
                for record, found in zip(records, threads.map(lambda one: checksum(file.fileno(), one), records)):
                    if found != record.CRC:
                        raise ValueError(f"checksum of {record.filename} differs")
    except VERIFY_ERRORS as error:
        raise _damaged(path, error) from error


def _is_archive(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


def checksum(file: int, record: zipfile.ZipInfo) -> int:
    """CRC-32 of a record's bytes in the open file of the archive."""
    if record.compress_type != zipfile.ZIP_STORED or record.file_size != record.compress_size:
        raise ValueError(f"{record.filename} is compressed")
    header = os.pread(file, 30, record.header_offset)
    name, extra = struct.unpack_from("<HH", header, 26)
    position = record.header_offset + 30 + name + extra
    end, value = position + record.file_size, 0
    while position < end:
        block = os.pread(file, min(BLOCK, end - position), position)
        if not block:
            raise ValueError(f"{record.filename} is cut off")
        value = zlib.crc32(block, value)
        position += len(block)
    return value


def _damaged(path: Path, error: Exception) -> UserError:
    reason = (str(error) or type(error).__name__).splitlines()[0]
    return UserError(f"checkpoint {path} is damaged or not a checkpoint ({reason})")


def load(path: Path, *, verified: bool = False, mmap: bool = False) -> dict[str, Any]:
    """A checkpoint's state on the CPU. Executes no pickled code.

    `verified`: its checksums have been verified. `mmap`: tensors are read from the file when they are used.

    Raises UserError for a missing or damaged file, and for an unknown format.
    """
    if not path.is_file():
        raise UserError(f"checkpoint {path} does not exist")
    try:
        if not verified:
            verify(path)
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap and _is_archive(path))
    except LOAD_ERRORS as error:
        raise _damaged(path, error) from error
    if not isinstance(state, dict) or state.get("format") not in (1, FORMAT):
        raise UserError(f"checkpoint {path} is not in this version's format")
    return state


def to_resume(run: Path, resume: str) -> Path | None:
    """The checkpoint that a run goes on from, verified. `resume` is `auto` (the run's newest whole checkpoint, or None), `none`, or a path.

    A path is a checkpoint, or a run folder with at least one; its newest whole one counts. With `auto`, damaged checkpoints that are newer
    are renamed: the run saves the same steps again. Only one rank calls it.

    Raises UserError for a path without a checkpoint, and if every checkpoint is damaged.
    """
    if resume == "none":
        return None
    path = run if resume == "auto" else Path(resume).expanduser()
    if resume != "auto" and not path.exists():
        raise UserError(f"resume={resume}: there is no such file or run folder")
    if not (resume == "auto" or path.is_dir()):
        load(path, mmap=True)
        return path
    candidates = found(path)
    if not candidates and resume != "auto":
        raise UserError(f"resume={resume}: no checkpoint in {path / 'checkpoints'}")
    bad: dict[Path, str] = {}
    for candidate in reversed(candidates):
        try:
            load(candidate, mmap=True)
        except UserError as error:
            bad[candidate] = str(error)
            continue
        for other, reason in bad.items():
            aside = other.with_suffix(".pt.damaged")
            if resume == "auto":
                other.replace(aside)
            now = f"; it is now {aside.name}" if resume == "auto" else ""
            log.warning("%s%s; the run goes on from %s", reason, now, candidate.name)
        return candidate
    if candidates:
        raise UserError(
            f"resume={resume}: none of the {len(candidates)} checkpoints in {path} can be read; start afresh with another run=NAME"
        )
    return None


def newest_step(run: Path) -> int | None:
    """The step of a run's newest checkpoint, by its name."""
    candidates = found(run)
    return step_of(candidates[-1]) if candidates else None


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
    step = whole_number(which)
    return path_of(run, step) if step is not None else Path(which).expanduser()
