"""Measures saving and loading: the pause of a save in the background and of one that training waits for, and what each rank reads.

    python -m tests.checkpoint.measure [megabytes=256 folder=/fast/disk]

The state has the shape of a model with AdamW: weights and two moments. Ranks are processes of this machine with one thread each.
"""

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Shard, distribute_tensor

from clipscale import checkpoint
from clipscale.config.sections import CheckpointConfig
from clipscale.distributed.world import World
from tests.support.ranks import run_ranks

WIDTH = 1024


def state(world: World, megabytes: int, *, sharded: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A state of that size, and its parameters."""
    count = max(1, megabytes * 2**20 // (3 * 4 * WIDTH * WIDTH))
    whole = {f"layer{i}.weight": torch.randn(WIDTH, WIDTH) for i in range(count)}
    mesh = world.mesh() if sharded else None
    weights = {n: distribute_tensor(t, mesh, [Shard(0)], src_data_rank=None) if mesh else t for n, t in whole.items()}
    moments = {name: {key: torch.zeros_like(t) for key in ("exp_avg", "exp_avg_sq")} for name, t in weights.items()}
    return {"model": weights, "optimizer": {"state": moments}, "loss": 1.0}, weights


def measure(rank: int, size: int, run: Path, megabytes: int, sharded: bool) -> dict[str, float]:
    """Seconds and bytes of this rank."""
    torch.set_num_threads(1)
    world = World(rank, size, torch.device("cpu"))
    values, weights = state(world, megabytes, sharded=sharded)
    found: dict[str, float] = {}
    for name, background in (("blocking", False), ("background", True)):
        saver = checkpoint.Saver(run, world, CheckpointConfig(background=background, keep=1))
        for step in (1, 2):  # the first allocates the copy in host memory
            started = time.monotonic()
            saver.save(step + 2 * background, values)
            found[f"{name} pause, save {step}"] = time.monotonic() - started
            saver.wait()
        found[f"{name} whole"] = saver.save_s
        saver.close()
    started = time.monotonic()
    path = checkpoint.to_resume(run, "auto", world)
    found["verify"] = time.monotonic() - started
    assert path is not None
    found["verified bytes"] = checkpoint.verify(path, rank, size)
    started = time.monotonic()
    saved = checkpoint.Saved(path)
    saved.state(weights, world)
    found["load"], found["read bytes"] = time.monotonic() - started, saved.bytes_read
    return found


def main(megabytes: int, folder: str | None) -> None:
    """Print a table with the slowest rank's seconds, and the largest share of bytes."""
    rows = []
    for size, sharded in ((1, False), (2, False), (2, True), (4, False), (4, True)):
        with tempfile.TemporaryDirectory(dir=folder) as run:
            ranks = run_ranks(measure, size, Path(run), megabytes, sharded, timeout_s=600)
        worst = {name: max(rank[name] for rank in ranks) for name in ranks[0]}
        rows.append([f"{size} {'FSDP2' if sharded else 'DDP'}", *(f"{value:.3g}" for value in worst.values())])
    print("| " + " | ".join(["ranks", *worst]) + " |")
    for row in rows:
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    given = dict(argument.split("=", 1) for argument in sys.argv[1:])
    main(int(given.get("megabytes", 256)), given.get("folder"))
