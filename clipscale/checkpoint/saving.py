"""Writes checkpoints: every rank its share, in the background, while training goes on."""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, Metadata, SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future as TorchFuture

from clipscale.checkpoint.format import (
    ignore_warning_of_one_process,
    meta_text,
    size_and_crc32,
    split_tensors,
    values_text,
)
from clipscale.checkpoint.retention import Retention
from clipscale.checkpoint.state import CheckpointState
from clipscale.checkpoint.upload import CheckpointUploader
from clipscale.common.errors import UserError, one_line
from clipscale.common.files import sync, wait_until_visible
from clipscale.common.ranks import local_rank
from clipscale.common.terminal import log_warning
from clipscale.distributed.agreement import run_on_rank0
from clipscale.distributed.world import World
from clipscale.run_folder.disk import TEMPORARY, discard, remove_checkpoint
from clipscale.run_folder.paths import META, checkpoint_path, checkpoints_of

# Rank 0 waits at most this many seconds for a file that another rank has written.
FILES_APPEAR_WITHIN_S = 10.0


class UnwritableError(UserError):
    """The disk does not take a checkpoint: it is full, read-only, or fails. Earlier ones are intact."""


class Saver:
    """Writes a run's checkpoints, one at a time. All ranks call its methods at the same places.

    1. `save` waits for the checkpoint before, copies this rank's share into host memory, and returns.
    2. `ChecksumWriter.write_data`, in a thread: writes this rank's file into a temporary folder, with its checksum.
    3. `ChecksumWriter.finish`, in rank 0's thread when all ranks have written: writes meta.json.
    4. `commit`, at its end: renames the folder, asks for a copy, and deletes outdated checkpoints.
    5. `wait_for_save`, or the next `save`: raises or reports what failed.

    The copy into host memory is the pause that training sees. A checkpoint appears whole or not at all, and a failed
    write changes no earlier one.
    """

    def __init__(
        self,
        run_dir: Path,
        world: World,
        retention: Retention,
        uploader: CheckpointUploader | None = None,
        last_begun_step: int | None = None,
    ) -> None:
        """`uploader`: copies each checkpoint; None: nothing is copied.

        `last_begun_step`: the step of the newest checkpoint; 0 for a new run, whose initial state is not saved; None if
        the state comes from another folder, so that it is saved.
        """
        self.run_dir = run_dir
        self.world = world
        self.retention = retention
        self.uploader = uploader
        # The step of the newest checkpoint whose write has begun. If the write fails, that step is not saved again.
        self.last_begun_step = last_begun_step
        # The step of the checkpoint that is being written, and its result.
        self._pending: tuple[int, Future[Metadata]] | None = None
        self._stager = self._new_stager()

    def _new_stager(self) -> DefaultStager:
        is_gpu = self.world.device.type == "cuda"
        return DefaultStager(
            StagingOptions(
                use_pinned_memory=is_gpu,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=is_gpu,
            )
        )

    def save(self, state: CheckpointState, *, wait: bool = False) -> None:
        """Begin to write a checkpoint, after the one before it is complete.

        `wait`: return when this one is complete, because the run then ends.

        Replicated tensors are divided among the ranks, DTensors are written shard by shard, and plain values are those
        of rank 0.

        A disk that does not take a checkpoint is reported, and training goes on: the disk may take the next one. With
        `wait` it raises UnwritableError.
        """
        self._wait_or_warn(training_continues=not wait)
        if torch.__version__ < "2.13":  # before 2.13 a stager works only once
            self._stager = self._new_stager()
        step = state.step
        values, tensors = split_tensors(state.state_dict())
        sizes = {name: tensor.nbytes for name, tensor in tensors.items() if not isinstance(tensor, DTensor)}
        owners = assign_writers(sizes, self.world.size)
        rank = self.world.rank
        is_distributed = self.world.size > 1
        ignore_warning_of_one_process()  # the filter also applies in the thread that writes
        result = dcp.async_save(
            {name: tensor for name, tensor in tensors.items() if owners.get(name, rank) == rank},
            storage_writer=ChecksumWriter(self._temporary(step), values_text(values), partial(self.commit, step)),
            process_group=self.world.checkpoint_group if is_distributed else None,
            async_stager=self._stager,
            no_dist=not is_distributed,
        )
        assert isinstance(result, Future)
        self._pending = step, result
        self.last_begun_step = step
        if wait:
            self.wait_for_save()

    def wait_for_save(self) -> None:
        """Wait until the checkpoint that is being written is complete.

        Raises UnwritableError if a disk did not take it, and CheckpointException for any other failure.
        """
        if self._pending is None:
            return
        step, result = self._pending
        self._pending = None
        try:
            result.result()
        except CheckpointException as error:
            if self.world.is_rank0 or local_rank() == 0:  # each host may have a folder of its own
                discard(self._temporary(step))
            reasons = [cause.strerror or cause for cause, _ in error.failures.values() if isinstance(cause, OSError)]
            if not reasons:
                raise
            kept = "earlier ones stay" if checkpoints_of(self.run_dir) else "there is no earlier one"
            raise UnwritableError(
                f"checkpoint {checkpoint_path(self.run_dir, step)} could not be written ({reasons[0]}); {kept}; make "
                "room, or give the command again when the run's folder lies on another disk"
            ) from error

    def wait_for_copy(self, limit_s: float) -> None:
        """Wait until the checkpoint is complete, and then at most `limit_s` seconds for its copy."""
        self.wait_for_save()
        if self.uploader:
            run_on_rank0(self.world, partial(self.uploader.finish, limit_s))

    def is_best_so_far(self, step: int) -> bool:
        """Whether the evaluation of `step` beats those of all checkpoints. A collective.

        Rank 0 prints that, or a warning if the step has no such result.

        The start, step 0, has no checkpoint and is not compared.
        """
        best = self.retention.best
        return best is not None and run_on_rank0(
            self.world, lambda: best.report_improvement(step, self._step_being_written())
        )

    def _step_being_written(self) -> int | None:
        """The step of the checkpoint that is being written; None if there is none, or if its write has failed here."""
        if self._pending is None:
            return None
        step, result = self._pending
        has_failed = result.done() and result.exception() is not None
        return None if has_failed else step

    def close(self) -> None:
        """Wait for what is being written. Reports a failure and does not raise it: another error may be pending."""
        try:
            self.wait_for_save()
        except (UnwritableError, CheckpointException, RuntimeError) as error:  # RuntimeError: a rank was lost
            if self.world.is_rank0:
                log_warning(f"the checkpoint that was being written is not complete ({one_line(error)})")
        self._stager.close()

    def _wait_or_warn(self, *, training_continues: bool) -> None:
        """Wait for what is being written. Reports a disk that did not take it.

        `training_continues`: whether the run then trains on.
        """
        try:
            self.wait_for_save()
        except UnwritableError as error:
            if self.world.is_rank0:
                log_warning(f"{error}; training continues without it" if training_continues else str(error))

    def _temporary(self, step: int) -> Path:
        return checkpoint_path(self.run_dir, step).with_suffix(TEMPORARY)

    def commit(self, step: int) -> None:
        """Give the checkpoint its name, and delete outdated ones. Rank 0 calls it when everything is on the disk."""
        path = checkpoint_path(self.run_dir, step)
        if path.exists():
            remove_checkpoint(path)
        self._temporary(step).replace(path)
        sync(path.parent)
        if self.uploader is None:
            self._remove_outdated(path.name)
        else:
            self.uploader.request()
            with self.uploader.upload_choice_locked() as uploading:
                self._remove_outdated(path.name, uploading)

    def _remove_outdated(self, up_to: str, uploading: Sequence[Path] = ()) -> None:
        """Delete the outdated checkpoints up to the one of this name, except for those that are being uploaded."""
        for old in self.retention.outdated(checkpoints_of(self.run_dir), up_to):
            if old not in uploading:
                remove_checkpoint(old)


def assign_writers(sizes: Mapping[str, int], world_size: int) -> dict[str, int]:
    """The rank that writes each tensor: the largest tensors first, each to the rank with the fewest bytes so far."""
    loads = [0] * world_size
    owners = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += sizes[name]
    return owners


def disk_error_in(error: BaseException) -> OSError | None:
    """The first OSError in an error's chain of contexts; None without one. torch.save hides a disk's error there."""
    cause: BaseException | None = error
    while cause and not isinstance(cause, OSError):
        cause = cause.__context__
    return cause if isinstance(cause, OSError) else None


@dataclass(frozen=True)
class ChecksummedWrite(WriteResult):
    """A rank's message to rank 0 about a tensor that it has written: torch's facts, and about the tensor's file."""

    size_and_crc32: tuple[int, int]


class ChecksumWriter(dcp.FileSystemWriter):
    """torch's writer, which adds meta.json with the checksums of all files."""

    def __init__(self, path: Path, values: str, commit: Callable[[], None]) -> None:
        """`values`: rank 0's text for meta.json. Rank 0 calls `commit` when everything is on the disk."""
        super().__init__(path)
        self._values = values
        self._commit = commit

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        """Write the plan's tensors to this rank's file. The results have its checksum. Raises OSError."""
        try:
            results = super().write_data(plan, planner).value()
        except RuntimeError as error:
            raise disk_error_in(error) or error from error
        sum_of_file = cache(lambda name: size_and_crc32(Path(self.checkpoint_id) / name))
        future: TorchFuture[list[WriteResult]] = TorchFuture()
        future.set_result(
            [
                ChecksummedWrite(
                    result.index,
                    result.size_in_bytes,
                    result.storage_data,
                    sum_of_file(result.storage_data.relative_path),
                )
                for result in results
            ]
        )
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write torch's metadata, check that all files are here, write meta.json, and commit.

        torch calls it on rank 0 when all ranks have written. Raises OSError.
        """
        super().finish(metadata, results)
        path = Path(self.checkpoint_id)
        sums = {
            result.storage_data.relative_path: result.size_and_crc32
            for rank in results
            for result in rank
            if isinstance(result, ChecksummedWrite)
        }
        sums[".metadata"] = size_and_crc32(path / ".metadata")
        for name, (size, _) in sums.items():
            if not wait_until_visible(path / name, size, FILES_APPEAR_WITHIN_S):
                raise OSError(
                    f"rank 0 does not see {name}, which another rank has written; put the run's folder on storage that "
                    "all share"
                )
        with (path / META).open("w") as file:
            file.write(meta_text(self._values, sums))
            file.flush()
            os.fsync(file.fileno())
        self._commit()
