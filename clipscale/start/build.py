"""Builds what a run trains: data (`open_data.py`), model, chunk sizes, step (`build_step.py`), and compiled towers.

Only the functions of `start/` read the whole configuration. What they build gets plain values, or its own section.
"""

from contextlib import ExitStack
from dataclasses import dataclass

import torch

from clipscale.common.batch import ChunkSizes
from clipscale.common.terminal import log_warning, show_task
from clipscale.config.train_config import TrainConfig
from clipscale.data.loader.stream import TrainStream
from clipscale.data.tokenizer import Tokenizer
from clipscale.distributed.agreement import run_on_rank0
from clipscale.distributed.world import World
from clipscale.models.families import may_cut_captions
from clipscale.models.flops import Flops
from clipscale.models.towers import ClipModel, build_model, image_size_and_tokenizer
from clipscale.models.weights.load_weights import without_weights
from clipscale.models.weights.model_settings import with_checkpoints_of_runs
from clipscale.start.build_step import build_step
from clipscale.start.open_data import open_data
from clipscale.start.resolve import ResolvedRun
from clipscale.start.resume import restore_state
from clipscale.step.chunk_sizes import agreed_chunk_sizes
from clipscale.step.compiled import compile_towers, should_compile, try_compiled
from clipscale.step.optim import Schedule
from clipscale.step.pair_encoder import pair_encoder
from clipscale.step.precision import Precision
from clipscale.step.train_step import TrainStep


@dataclass(frozen=True)
class BuiltRun:
    """What a run trains, on what data and by which schedule, ready for its next step."""

    train_step: TrainStep
    # Whether the towers run compiled code.
    is_compiled: bool
    stream: TrainStream
    schedule: Schedule
    flops: Flops


def build(resolved: ResolvedRun, world: World) -> BuiltRun:
    """Open the data, build what is trained, load the checkpoint, and restore this rank's random state. A collective.

    The caller closes the stream. If this raises UserError, it has ended the data workers that it had started.
    """
    config = resolved.config
    image_size, tokenizer = image_size_and_tokenizer(config.model)
    # Data first: its workers read while the model is built.
    data = open_data(resolved, image_size, tokenizer, world)
    with ExitStack() as undo:
        undo.callback(data.stream.close)
        model, precision = build_model_to_train(resolved, tokenizer, world)

        # Measured before `build_step` wraps the towers: the ranks may try different numbers of sizes. Under FSDP2 each
        # try would be a collective, and a rank with one more would hang.
        chunk_sizes = choose_chunk_sizes(resolved, model, precision, data.local_batch, world)
        train_step = build_step(
            config,
            world,
            model,
            precision,
            chunk_sizes,
            data.teachers,
            sorts_captions=may_cut_captions(model.text.encoder, tokenizer),
        )
        restore_state(resolved, train_step, world)

        flops = Flops.of_model(config.model, model, world.device, config.data.text_layout.texts_per_sample)
        operations_left = (data.schedule.end - resolved.step) * data.local_batch * flops.per_sample()
        is_compiled = should_compile(config.model.compile, operations_left, flops.peak) and compile_step(
            train_step, config, data.local_batch
        )
        undo.pop_all()
    return BuiltRun(train_step, is_compiled, data.stream, data.schedule, flops)


# ---- model, and its chunk sizes ----


def build_model_to_train(resolved: ResolvedRun, tokenizer: Tokenizer, world: World) -> tuple[ClipModel, Precision]:
    """The model with its initial weights, on this rank's device, and the precision it trains in. A collective."""
    config = resolved.config
    show_task("building the model")
    torch.manual_seed(config.seed)
    if resolved.checkpoint_path:
        # It holds all weights. Those that the run began with may be gone by now.
        model_config = without_weights(config.model)
    else:
        model_config = run_on_rank0(world, lambda: with_checkpoints_of_runs(config.model))  # so every rank has the same
    model = build_model(model_config, tokenizer=tokenizer).to(world.device)
    precision = Precision.set_up(config.precision, world.device)
    precision.cast_frozen_(model.image, model.text)
    return model, precision


def choose_chunk_sizes(
    resolved: ResolvedRun, model: ClipModel, precision: Precision, local_batch: int, world: World
) -> ChunkSizes:
    """The chunk sizes: of the settings, else of the checkpoint, else measured. A collective. Raises UserError."""
    config = resolved.config
    with precision.autocast():
        return agreed_chunk_sizes(
            config.cache.sizes,
            model,
            local_batch,
            world,
            resolved.resumed.chunks if resolved.resumed and not resolved.is_stage_start else None,
            keeps_graphs=config.cache.keep_bytes != 0,
            texts_per_sample=config.data.text_layout.texts_per_sample,
            pairs=pair_encoder(model) if config.trains_captioner else None,
        )


# ---- compiling ----


def compile_step(train_step: TrainStep, config: TrainConfig, local_batch: int) -> bool:
    """Compile the towers. Returns whether they run compiled code; if not, a warning says why."""
    show_task("compiling the towers")
    model = train_step.model
    world = train_step.world
    towers = compile_towers(model, lengths_vary=train_step.passes.sorts_captions)
    problem = try_compiled(
        model,
        towers,
        train_step.chunk_sizes,
        local_batch,
        train_step.precision,
        world,
        config.data.text_layout.texts_per_sample,
    )
    if problem is not None and world.is_rank0:
        log_warning(f"model.compile={config.model.compile}: the towers run without compiled code ({problem})")
    return problem is None
