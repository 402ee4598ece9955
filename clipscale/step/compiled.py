"""Towers under torch.compile, block by block: a tower's blocks are alike, so they share one compilation."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import nn

from clipscale.common.batch import ChunkSizes
from clipscale.common.errors import one_line
from clipscale.common.modules import nested_blocks
from clipscale.common.rng import RandomState
from clipscale.distributed.world import World
from clipscale.models.towers import ClipModel, Tower
from clipscale.step.cache.batch_norm import batch_norm_preserved
from clipscale.step.cache.cast_weights import CastWeights
from clipscale.step.chunk_sizes import both_passes, random_captions, random_pixels
from clipscale.step.precision import Precision

# `auto` compiles if the training takes longer than this. Compiling takes 10 to 60 seconds, and saves 3 to 9 % of each
# step.
MIN_TRAINING_S = 900.0
# Assumed share of a GPU's peak, to estimate the seconds of training.
ASSUMED_MFU = 0.4


def should_compile(setting: str, flops: float, peak: float | None) -> bool:
    """Whether a run compiles its towers.

    `setting`: `model.compile`. `flops`: the FLOP of the run on one device. `peak`: the device's FLOP/s; None if it is
    unknown, as on a CPU.
    """
    return setting == "true" or (setting == "auto" and peak is not None and flops > MIN_TRAINING_S * ASSUMED_MFU * peak)


def compile_towers(model: ClipModel, *, lengths_vary: bool) -> list[Tower]:
    """Compile the towers in place: block by block, and a tower without blocks as a whole. Returns the compiled ones.

    `lengths_vary`: the captions are sorted, so their chunks have many widths, each with a compilation of its own. The
    text tower, a small part of a step, is then not compiled.
    """
    # Beyond this many variants torch falls back to eager, which draws other random numbers.
    torch._dynamo.config.recompile_limit = 64
    # This option would split graphs at DDP's buckets, but gradients are summed once a step.
    torch._dynamo.config.optimize_ddp = False
    towers: list[Tower] = [model.image] if lengths_vary else [model.image, model.text]
    for tower in towers:
        for module in innermost_blocks(tower.encoder) or [tower.encoder]:
            module.compile(dynamic=False)
    return towers


def innermost_blocks(encoder: nn.Module) -> list[nn.Module]:
    """The `nested_blocks` of an encoder that contain no other one."""
    repeated = nested_blocks(encoder)

    def has_inner(block: nn.Module) -> bool:
        return any(module in repeated for module in block.modules() if module is not block)

    return [block for block in repeated if not has_inner(block)]


def try_compiled(
    model: ClipModel,
    towers: list[Tower],
    chunk_sizes: ChunkSizes,
    local_batch: int,
    precision: Precision,
    world: World,
    texts_per_sample: int = 1,
) -> str | None:
    """Run every kind of pass of the compiled towers on random inputs, so that no step compiles. A collective.

    Returns None if they run on all ranks. Otherwise returns the problem of one rank, and all ranks run without compiled
    code from then on. But FSDP2 gathers weights in these passes: if the compiler fails on some ranks alone, the others
    wait for them until `World.timeout`, and the run ends.

    `local_batch`: samples of this process, with `texts_per_sample` captions and hard negatives each.
    """
    problem: str | None = None
    try:
        with RandomState.now(world.device).preserved():
            for tower in towers:
                is_image = tower is model.image
                chunk = chunk_sizes.image if is_image else chunk_sizes.text
                rows = local_batch if is_image else local_batch * texts_per_sample
                run_every_pass(model, tower, chunk, rows, precision, has_other_ranks=world.size > 1)
    except Exception as error:  # a compiler's failure does not end a run
        problem = one_line(error)
    problem = next(filter(None, world.all_gather_object(problem)), None)
    if problem is not None:
        torch.compiler.set_stance("force_eager")
    model.zero_grad()
    return problem


def run_every_pass(
    model: ClipModel,
    tower: Tower,
    chunk: int,
    rows: int,
    precision: Precision,
    *,
    has_other_ranks: bool,
) -> None:
    """Run every kind of pass of a tower on random inputs. A collective under FSDP2.

    A full chunk and the last one, which may be shorter, run twice each, with cast weights. With other ranks the second
    run has the tower's own weights, as DDP needs them in the last chunk of a step; DDP itself is not around the tower
    here. If FSDP2 has sharded the tower, no pass has cast weights.

    `rows`: the tower's images or texts in a step. There may be fewer than `chunk`, which an earlier start has chosen.
    """
    draw = random_pixels if tower is model.image else random_captions
    cast_weights = CastWeights()
    cast_weights.start_step(tower, precision.autocast, num_chunks=math.ceil(rows / chunk))
    with_cast_weights = partial(cast_weights.in_pass, builds_graph=True, is_last_backward=False)
    contexts: list[Callable[[], AbstractContextManager[None]]] = [
        with_cast_weights,
        nullcontext if has_other_ranks else with_cast_weights,
    ]
    for size in {min(chunk, rows), rows % chunk or chunk}:
        inputs = draw(model, precision.device, size)
        for context in contexts:
            with batch_norm_preserved(tower), precision.autocast(), context():
                both_passes(tower, inputs)


def eager_for_new_shapes(is_compiled: bool) -> AbstractContextManager[object]:
    """Context of an evaluation: shapes without compiled code run eagerly, and are not compiled in a later
    evaluation."""
    return torch.compiler.set_stance("eager_on_recompile") if is_compiled else nullcontext()
