"""Resumes a run: finds the checkpoint to continue from, and restores its state into the step that was built.

A resume restores:

- the weights, their moving average, the optimizer's state and the loss scale of fp16 (`step/checkpoint_state.py`),
- the random state of each rank, if the number of ranks is the same,
- the chunk sizes, unless they are set (`choose_chunk_sizes` in `build.py`),
- the position in the data (`open_data.py`),
- the count of steps, by which the schedule goes on, and the last loss (`resolve.py`).

At the start of a stage the position goes on, the chunk sizes are chosen anew, and the stage's policy says what the
optimizer takes.
"""

from pathlib import Path

import torch

from clipscale import checkpoint
from clipscale.common import ranks
from clipscale.common.rng import RandomState
from clipscale.config.stages import OptimizerPolicy
from clipscale.config.train_config import TrainConfig
from clipscale.distributed.world import World
from clipscale.start.resolve import ResolvedRun
from clipscale.step.checkpoint_state import load_state
from clipscale.step.train_step import TrainStep


def find_checkpoint(config: TrainConfig, world: World, *, fetch_copy: bool) -> Path | None:
    """The checkpoint to resume, as `checkpoint.newest_undamaged` finds it; None for a new run. A collective.

    Damaged checkpoints of the run are renamed. After a restart by torchrun or Slurm the run's own newest checkpoint
    comes first, whatever `resume` says.

    `fetch_copy`: fetch the checkpoint of `checkpoint.copy` if it is newer than all in the run's folder.

    Raises UserError.
    """
    folder = Path(config.run)
    copy = config.checkpoint.copy if fetch_copy else ""
    # torchrun's agent does not count a restart that another node has caused, so one rank with a count is enough.
    restarted = any(world.all_gather_object(ranks.is_restarted()))
    newest = checkpoint.newest_undamaged(folder, "auto", world, copy) if restarted else None
    return newest or checkpoint.newest_undamaged(folder, config.resume, world, copy)


def restore_state(resolved: ResolvedRun, train_step: TrainStep, world: World) -> None:
    """Load the checkpoint, if there is one, and restore this rank's random state. A collective.

    In a new run, and on another number of ranks, the random state comes from the run's seed, the rank and the step.
    """
    if resolved.checkpoint_path:
        like = dict(train_step.model.named_parameters())
        state = checkpoint.load(resolved.checkpoint_path, is_verified=True, like=like)
        policy = resolved.stage.optimizer_policy if resolved.is_stage_start else OptimizerPolicy.TAKE_ALL
        load_state(train_step, state, policy)
    torch.manual_seed(resolved.config.seed + 1 + world.rank + resolved.step * world.size)
    if resolved.resumed and len(resolved.resumed.random) == world.size:
        state_of_rank = resolved.resumed.random[world.rank]  # a run on a CPU has saved no state of CUDA
        RandomState(state_of_rank.cpu, state_of_rank.cuda if world.device.type == "cuda" else None).restore()
