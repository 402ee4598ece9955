"""Several ranks write one checkpoint and read it on another number of ranks, each no more than its share."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from clipscale import checkpoint
from clipscale.checkpoint.loading import verify
from clipscale.common.errors import UserError
from clipscale.config.sections import CheckpointConfig
from clipscale.distributed.world import World
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")
WHOLE = {name: torch.arange(7.0 * 5000).view(7, 5000) + i for i, name in enumerate("abcdefgh")}
"""Seven rows: no number of ranks shares them evenly."""


def sharded(world: int) -> dict[str, Tensor]:
    """The first four tensors in shards, the others on every rank."""
    mesh = World(0, world, CPU).mesh()
    return {n: distribute_tensor(t, mesh, [Shard(0)]) if n in "abcd" else t.clone() for n, t in WHOLE.items()}


def state(world: int) -> dict[str, Any]:
    tensors = sharded(world) if world > 1 else WHOLE
    inner = {name: {"moment": tensor + 1, "step": torch.tensor(3.0)} for name, tensor in tensors.items()}
    return {"model": tensors, "optimizer": {"state": inner}, "random": [{"cpu": torch.arange(4)}] * world, "loss": 0.5}


def write(rank: int, world: int, run: Path, step: int) -> str:
    saver = checkpoint.Saver(run, World(rank, world, CPU), CheckpointConfig())
    saver.save(step, state(world))
    try:
        saver.wait()
    except UserError as error:
        return str(error)
    return ""


def read(rank: int, world: int, run: Path) -> tuple[int, int]:
    """Check all values; returns the bytes that this rank has read to verify, and of tensors."""
    here = World(rank, world, CPU)
    path = checkpoint.to_resume(run, "auto", here)
    assert path is not None
    verified = verify(path, rank, world)
    like = sharded(world) if world > 1 else {}
    saved = checkpoint.Saved(path)
    found = saved.state(like, here)
    for name, wanted in WHOLE.items():
        for value, expected in (
            (found["model"][name], wanted),
            (found["optimizer"]["state"][name]["moment"], wanted + 1),
        ):
            assert isinstance(value, DTensor) == (name in like and isinstance(like[name], DTensor))
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            assert torch.equal(whole, expected), name
        assert found["optimizer"]["state"][name]["step"] == 3
    return verified, saved.bytes_read


def test_each_rank_writes_and_reads_its_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_ranks(write, 2, tmp_path, 1) == ["", ""]
    path = checkpoint.path_of(tmp_path, 1)
    held = [(path / f"rank_0000{rank}.safetensors").stat().st_size for rank in range(2)]
    total = 2 * sum(t.nbytes for t in WHOLE.values())
    assert sum(held) == pytest.approx(total, rel=0.01), "each tensor once"
    assert all(0.4 * total < size < 0.6 * total for size in held), held
    assert read(0, 1, tmp_path)[1] == pytest.approx(total, rel=0.01)
    _, tensors = zip(*run_ranks(read, 4, tmp_path), strict=True)
    # 7 rows on 4 ranks: 2, 2, 2 and 1. Of 8 whole tensors each rank reads 2.
    assert [count / total for count in tensors] == pytest.approx([1 / 7 + 1 / 8] * 3 + [1 / 14 + 1 / 8], rel=0.01)
    loaded = checkpoint.load(path, parts=("model",))
    assert all(torch.equal(loaded["model"][name], value) for name, value in WHOLE.items())
    assert not any(isinstance(v, Tensor) for one in loaded["optimizer"]["state"].values() for v in one.values())


def broken_disk(rank: int, world: int, run: Path) -> str:
    """Rank 1's disk fails."""
    if rank == 1:
        from clipscale.checkpoint import manifest

        def fails(*_: object) -> int:
            raise OSError(5, "Input/output error")

        manifest.SummedFile.write = fails  # type: ignore[method-assign]
    message = write(rank, world, run, 2)
    dist.barrier()
    return message


@pytest.mark.slow
def test_a_failure_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, state(1), keep=2)
    for message in run_ranks(broken_disk, 2, tmp_path):
        assert (
            "step_00000002 could not be written (Input/output error); the newest complete one is step_00000001"
            in message
        )
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000001"]


def test_a_share_of_the_blocks_is_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clipscale.checkpoint.manifest.BLOCK", 1000)
    monkeypatch.setattr("clipscale.checkpoint.loading.BLOCK", 1000)
    path = checkpoint.save(tmp_path, 1, state(1), keep=0)
    total = sum((path / name).stat().st_size for name in ("rank_00000.safetensors", "state.pt"))
    shares = [verify(path, rank, 3) for rank in range(3)]
    assert sum(shares) == total
    assert max(shares) - min(shares) <= 2000, shares
    with (path / "rank_00000.safetensors").open("r+b") as file:
        file.seek(150_000)
        file.write(b"!")
    found = []
    for rank in range(3):
        try:
            verify(path, rank, 3)
        except UserError as error:
            found.append(str(error))
    (problem,) = found
    assert "checksum of rank_00000.safetensors differs at byte 150000" in problem
