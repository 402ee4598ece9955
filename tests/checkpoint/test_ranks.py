"""Several ranks write one checkpoint and read it on another number of ranks."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from clipscale import checkpoint
from clipscale.checkpoint.loading import verify
from clipscale.checkpoint.saving import assign_writers
from clipscale.common.errors import UserError
from clipscale.distributed.world import World
from clipscale.run_folder.paths import checkpoint_path
from tests.support.checkpoints import save, saver_of
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")
# Seven rows: no number of ranks shares them evenly.
WHOLE = {name: torch.arange(7.0 * 5000).view(7, 5000) + i for i, name in enumerate("abcdefgh")}


def sharded(world_size: int) -> dict[str, Tensor]:
    """The first four tensors in shards, the others on every rank."""
    mesh = World(0, world_size, CPU).mesh()
    return {n: distribute_tensor(t, mesh, [Shard(0)]) if n in "abcd" else t.clone() for n, t in WHOLE.items()}


def state(world_size: int) -> dict:
    tensors = sharded(world_size) if world_size > 1 else WHOLE
    inner = {name: {"moment": tensor + 1, "step": torch.tensor(3.0)} for name, tensor in tensors.items()}
    return {"model": tensors, "optimizer": {"state": inner}, "loss": 0.5}


def test_ranks_write_about_equally_many_bytes() -> None:
    """They also agree on who writes what, in whatever order they have the tensors."""
    sizes = {"a": 1, "b": 1, "c": 2, "d": 5, "e": 9}
    owners = assign_writers(sizes, 2)
    assert {sum(sizes[name] for name in owners if owners[name] == rank) for rank in (0, 1)} == {9}
    assert assign_writers(dict(reversed(sizes.items())), 2) == owners


def write(rank: int, world_size: int, run: Path, step: int) -> str:
    saver = saver_of(run, world=World(rank, world_size, CPU))
    saver.save(checkpoint.CheckpointState(step, **state(world_size)))
    try:
        saver.wait_for_save()
    except UserError as error:
        return str(error)
    return ""


def read(rank: int, world_size: int, run: Path) -> None:
    path = checkpoint.newest_undamaged(run, "auto", World(rank, world_size, CPU))
    assert path is not None
    like = sharded(world_size) if world_size > 1 else {}
    loaded = checkpoint.load(path, is_verified=True, like=like)
    for name, required in WHOLE.items():
        moments = loaded.optimizer["state"][name]
        for value, expected in ((loaded.model[name], required), (moments["moment"], required + 1)):
            assert isinstance(value, DTensor) == isinstance(like.get(name), DTensor)
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            assert torch.equal(whole, expected), name
        assert moments["step"] == 3


def test_each_rank_writes_its_share_and_any_number_of_ranks_reads_it(tmp_path: Path) -> None:
    assert run_ranks(write, 2, tmp_path, 1) == ["", ""]
    path = checkpoint_path(tmp_path, 1)
    sizes = [(path / f"__{rank}_0.distcp").stat().st_size for rank in range(2)]
    total = 2 * sum(t.nbytes for t in WHOLE.values())
    assert sum(sizes) == pytest.approx(total, rel=0.03), "each tensor once"
    assert all(0.4 * total < size < 0.6 * total for size in sizes), sizes
    read(0, 1, tmp_path)
    run_ranks(read, 4, tmp_path)


def broken_disk(rank: int, world_size: int, run: Path) -> str:
    """Rank 1's disk fails."""
    if rank == 1:
        from clipscale.checkpoint import saving

        def fails(*_: object) -> tuple[int, int]:
            raise OSError(5, "Input/output error")

        saving.size_and_crc32 = fails
    message = write(rank, world_size, run, 2)
    dist.barrier()
    return message


@pytest.mark.slow
def test_a_failure_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    save(tmp_path, 1, state(1), keep=2)
    for message in run_ranks(broken_disk, 2, tmp_path):
        assert "step_00000002 could not be written (Input/output error); earlier ones stay" in message
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000001"]


def apart(rank: int, world_size: int, root: Path) -> str:
    """Each rank has a folder of its own, as on a host of its own."""
    os.environ["LOCAL_RANK"] = "0"
    from clipscale.checkpoint import saving

    saving.FILES_APPEAR_WITHIN_S = 0.1
    return write(rank, world_size, root / f"node{rank}", 1)


def test_a_checkpoint_whose_files_are_not_all_on_rank_0s_disk_gets_no_name(tmp_path: Path) -> None:
    for message in run_ranks(apart, 2, tmp_path):
        assert "step_00000001 could not be written" in message and "__1_0.distcp" in message
    assert not [*tmp_path.glob("*/checkpoints/*")], "each rank removes what it has written"


def test_ranks_share_the_verification(tmp_path: Path) -> None:
    path = save(tmp_path, 1, state(1), keep=0)
    with (path / "__0_0.distcp").open("r+b") as file:
        file.seek(150_000)
        file.write(b"!")
    problems = []
    for rank in range(2):
        try:
            verify(path, rank, 2)
        except UserError as error:
            problems.append(str(error))
    (problem,) = problems
    assert "checksum of __0_0.distcp differs" in problem
