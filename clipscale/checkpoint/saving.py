"""Writes checkpoints: every rank its share, in the background, while training goes on."""

import errno
import logging
import shutil
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner, Metadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from clipscale.checkpoint import folder
from clipscale.checkpoint.loading import shares, split
from clipscale.checkpoint.shards import ShardWriter
from clipscale.checkpoint.store import Store
from clipscale.common.errors import UserError, causes_of, lost_rank
from clipscale.common.files import inner_folder, replacing, sync_folder
from clipscale.common.units import format_bytes
from clipscale.config.sections import CheckpointConfig
from clipscale.distributed.world import World

log = logging.getLogger(__name__)

ERRORS = (OSError, RuntimeError, CheckpointException)


class UnwritableError(UserError):
    """The disk does not take a checkpoint: it is full, read-only, stale, or fails. The run's earlier ones are intact."""

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(message)
        self.remedy = remedy


class Saver:
    """Writes a run's checkpoints, one at a time. All ranks call its methods at the same places.

    Ranks share the tensors that all of them hold. `save` copies this rank's share and its shards into host memory, which is the pause
    that training sees, and returns. A thread then writes its file.
    When all ranks have written, rank 0 writes the manifest, gives the folder its name and deletes outdated checkpoints. So a
    checkpoint appears whole or not at all, and a failed write changes no earlier one.
    """

    def __init__(self, run: Path, world: World, config: CheckpointConfig, store: Store | None = None) -> None:
        """`store`: on rank 0, where copies go."""
        self.run, self.world, self.config, self.store = run, world, config, store
        self.pause_s = self.save_s = 0.0
        """Of the last save: the time that training waited, and the whole time until it was complete."""
        self.last_step: int | None = None
        """Of the newest checkpoint begun."""
        self.check: Callable[[], None] = lambda: None
        """Called every second of a wait. What it raises ends the wait."""
        self._pending: tuple[int, Future[Metadata]] | None = None
        """The step of the checkpoint that is being written, and its result."""
        pinned = world.device.type == "cuda"
        self._stager = DefaultStager(StagingOptions(pinned, False, False, pinned))

    def save(self, step: int, state: dict[str, Any], *, last: bool = False) -> None:
        """Begin to write `state` as the checkpoint at `step`, when the one before is complete. With `last`, wait for it.

        `state`: a tree of dictionaries with plain values and tensors. Tensors below a dictionary are the same on every rank, or DTensors;
        everything else is taken from rank 0.

        A disk that does not take it is reported, and training goes on: the next one may find it in order. With `last` it raises
        UnwritableError. Raises UserError where this one or the one before cannot be written for another reason.
        """
        try:
            self.wait()
        except UnwritableError as error:
            self._warn(error)
        try:
            self._begin(step, state)
            if last or not self.config.background:
                self.wait()
        except UnwritableError as error:
            if last:
                raise UnwritableError(f"{error}; {error.remedy}, and resume", error.remedy) from error
            self._warn(error)

    def _begin(self, step: int, state: dict[str, Any]) -> None:
        started = time.monotonic()
        plain, tensors = split(state)
        self._check_space(step, size_of(tensors, plain))
        owners = shares({n: t.nbytes for n, t in tensors.items() if not isinstance(t, DTensor)}, self.world.size)
        own = {name: t for name, t in tensors.items() if owners.get(name, self.world.rank) == self.world.rank}
        temporary = self._temporary(step)
        about = {key: value for key, value in state.items() if isinstance(value, int | float | str)}
        writer = ShardWriter(temporary, step, plain | {"step": step} if self.world.main else None, about)
        writer.complete = lambda: self._complete(step)
        several = self.world.size > 1
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # also in the thread that writes
        result = dcp.async_save(
            own,
            storage_writer=writer,
            planner=DefaultSavePlanner(),
            process_group=self.world.background if several else None,
            async_stager=self._stager,
            no_dist=not several,
        )
        assert isinstance(result, Future)
        self._pending, self.last_step = (step, result), step
        result.add_done_callback(lambda _: vars(self).update(save_s=time.monotonic() - started))
        self.pause_s = time.monotonic() - started

    def wait(self) -> None:
        """Wait until the checkpoint that is being written is complete. Raises UnwritableError or UserError where it could not be.

        Raises RuntimeError where another rank is lost.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        step, result = pending
        while not wait([result], timeout=1.0).done:
            self.check()
        try:
            result.result()
        except ERRORS as error:
            if lost_rank(error):
                raise RuntimeError(f"{cause_of(error)}") from error
            raise self._failure(step, error) from error

    @property
    def writing(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._pending is not None and not self._pending[1].done()

    def forget(self) -> None:
        """Wait no longer for what is being written: another rank is lost, and the thread may wait for it for long."""
        self._pending = None

    def close(self) -> None:
        """Wait for what is being written, and sent to the store. A failure is reported."""
        try:
            self.wait()
        except UserError as error:
            log.warning("%s", error)
        self._stager.close()
        if self.store:
            self.store.close()

    def _warn(self, error: UnwritableError) -> None:
        if self.world.main:
            log.warning("%s; training goes on without it, %s", error, error.remedy)

    def _temporary(self, step: int) -> Path:
        path = folder.path_of(self.run, step)
        return path.with_name(path.name + folder.TEMPORARY)

    def _complete(self, step: int) -> None:
        """On rank 0, in the background, when everything is on the disk."""
        path = folder.path_of(self.run, step)
        if path.exists():
            folder.remove(path)
        self._temporary(step).replace(path)
        sync_folder(path.parent)
        keep, checkpoints = (self.config.keep, self.config.keep_every), folder.found(self.run)
        outdated = folder.outdated([folder.step_of(one) for one in checkpoints], step, *keep)
        for old in checkpoints:
            if folder.step_of(old) in outdated and not (self.store and self.store.sending == old):
                folder.remove(old)
        if self.store:
            self.store.send(path, *keep)

    def _check_space(self, step: int, needed: int) -> None:
        def look() -> tuple[int, int, str]:
            path = folder.path_of(self.run, step)
            try:
                inner_folder(self.run, "checkpoints")
                return shutil.disk_usage(path.parent).free, 0, ""
            except OSError as error:
                return 0, error.errno or errno.EIO, error.strerror or str(error)

        free, number, reason = self.world.on_main(look)
        if not number and needed > free:
            number, reason = errno.ENOSPC, f"it takes {format_bytes(needed)}, and {format_bytes(free)} are free"
        if number:
            raise self._failure(step, OSError(number, reason))

    def _failure(self, step: int, error: BaseException) -> UserError:
        try:
            if self.world.main:
                folder.discard(self._temporary(step))
            kept = [path for path in folder.found(self.run) if folder.step_of(path) != step]
            rest = f"the newest complete one is {kept[-1].name}" if kept else "there is no earlier one"
        except OSError:
            rest = "the earlier ones cannot be seen either"
        cause = cause_of(error)
        why = cause.strerror if isinstance(cause, OSError) and cause.strerror else cause
        message = f"checkpoint {folder.path_of(self.run, step)} could not be written ({why}); {rest}"
        if not isinstance(cause, OSError):
            return UserError(message)
        full = cause.errno in (errno.ENOSPC, errno.EDQUOT)
        return UnwritableError(message, "free some space" if full else "look at its disk")


def save(run: Path, step: int, state: dict[str, Any], *, keep: int, keep_every: int = 0) -> Path:
    """Write a checkpoint in one process and wait for it; see `Saver`. Returns its folder."""
    config = CheckpointConfig(keep=keep, keep_every=keep_every, background=False)
    Saver(run, World(0, 1, torch.device("cpu")), config).save(step, state, last=True)
    return folder.path_of(run, step)


def size_of(tensors: dict[str, Tensor], plain: dict[str, Any]) -> int:
    """Bytes of a checkpoint, a little more than it takes: its tensors, and a hundredth and 64 KiB for the rest."""
    others = [leaf for leaf in tree_leaves(plain) if isinstance(leaf, Tensor)]
    total = sum(x.numel() * x.element_size() for x in (*tensors.values(), *others))
    return int(1.01 * total) + 512 * (len(tensors) + len(others)) + 2**16


def cause_of(error: BaseException) -> BaseException:
    """What has made a save fail, on whichever rank: a full disk if that is among the causes, else the first."""
    causes = causes_of(error)
    first = next((one for one in causes if not isinstance(one, CheckpointException)), error)
    return next((one for one in causes if isinstance(one, OSError)), first)


def save_diverged(run: Path, step: int, state: dict[str, Any]) -> None:
    """Write what is needed to look into a divergence to RUN/diverged/."""
    with replacing(inner_folder(run, "diverged") / f"step_{step:08d}.pt") as file:
        torch.save(state, file)
