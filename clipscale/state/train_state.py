"""What a run trains, on one rank: how it is built, saved and loaded."""

from dataclasses import asdict

from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from clipscale.checkpoint import Saved
from clipscale.common.errors import UserError
from clipscale.common.record import Record
from clipscale.common.units import parse_memory
from clipscale.config.train import TrainConfig
from clipscale.distributed.fsdp import replicate_state, sharded_as
from clipscale.distributed.world import World
from clipscale.models.flops import unbuilt_encoders
from clipscale.models.towers import ClipModel
from clipscale.models.weights import fit_positions
from clipscale.step.batch_loss import BatchLoss
from clipscale.step.chunk_sizes import ChunkSizes, agreed_chunk_sizes
from clipscale.step.ema import WeightAverage
from clipscale.step.grad_cache import GradCache
from clipscale.step.optim import MOMENTS, build_optimizer
from clipscale.step.train_step import TrainStep


def saved_values(step: TrainStep) -> Record:
    """The fields of `Saved` that a step provides. The tensors are views, sharded as the weights are: the next step
    changes them."""
    return {
        "model": get_model_state_dict(step.model),
        "model_config": asdict(step.config.model),
        "optimizer": get_optimizer_state_dict(step.model, step.optimizer),
        "optimizer_name": step.config.optim.name,
        "chunks": asdict(step.chunks),
        "scaler": step.precision.scaler.state_dict() if step.precision.scaler else None,
        "ema": step.average.state_dict() if step.average else None,
    }


def load(step: TrainStep, saved: Saved, stage: str = "") -> None:
    """Load weights, optimizer, average and loss scale from a checkpoint. Raises UserError if it trains other
    parameters.

    The optimizer's settings (learning rate, decay) stay as they are. `stage`: empty within a stage; at the start of
    one, `continue` drops the optimizer's state of resized position embeddings, `restart` drops all of it.
    """
    model = step.model
    optimizer = step.optimizer
    scaler = step.precision.scaler
    name_of = {id(p): name for name, p in model.named_parameters()}
    names = [[name_of[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    if [group["params"] for group in saved.optimizer["param_groups"]] != names:
        raise UserError(
            "resume: the checkpoint's optimizer does not fit this model's parameters; freeze the same towers, or "
            "choose another run=NAME"
        )
    # These settings, which may have changed. What is in the place of a fused optimizer's state depends on them.
    for group, settings in zip(saved.optimizer["param_groups"], optimizer.param_groups):
        group.update({key: value for key, value in settings.items() if key != "params"})
    if stage:
        for weights in (saved.model, (saved.ema or {}).get("weights", {})):
            for name in fit_positions(weights, model):
                weights[name] = sharded_as(model.get_parameter(name), weights[name])
                saved.optimizer["state"].pop(name, None)
    # Before the weights: torch allocates the optimizer's state by a step with zero gradients and a rate of 0.
    # Not strict: a parameter that the loss does not use, such as the bias of a softmax, has no state.
    options = StateDictOptions(strict=False)
    if stage != "restart":
        set_optimizer_state_dict(model, optimizer, saved.optimizer, options=options)
        replicate_state(optimizer)
    set_model_state_dict(model, saved.model)
    if scaler and saved.scaler:
        scaler.load_state_dict(saved.scaler)
    if step.average:
        step.average.load(saved.ema)


def least_saved_bytes(config: TrainConfig) -> int:
    """A lower bound of a checkpoint's bytes. Counts only towers that train as a whole, and the state of
    optimizers in MOMENTS."""
    encoders, model = unbuilt_encoders(config.model), config.model
    towers = (encoders.visual, model.image), (encoders.text, model.text)
    trained = sum(p.nbytes for tower, part in towers if part.groups is None for p in tower.parameters())
    return trained * (1 + bool(config.ema) + MOMENTS.get(config.optim.name, 0))


def build_step(
    config: TrainConfig,
    world: World,
    model: ClipModel,
    loss: BatchLoss,
    *,
    sort_captions: bool,
    chunks: ChunkSizes | None = None,
    earlier: ChunkSizes | None = None,
) -> TrainStep:
    """The step of a model with its initial weights. A collective. Raises UserError.

    `sort_captions`: see TrainStep. `chunks`: None: found by `agreed_chunk_sizes`, to which `earlier` belongs.
    """
    precision = loss.precision
    towers = (model.image, model.text)
    for tower in towers:
        precision.cast_frozen_(tower)
    parallel = config.launch.parallel
    # Whole towers are measured: sharded ones gather their weights, so all ranks would have to try the same sizes.
    with precision.autocast():
        found = chunks or agreed_chunk_sizes(config.cache, model, config.batch // world.size, world, earlier)
    encoders = [world.wrap(tower, parallel, precision.dtype) for tower in towers]
    # After `wrap`: FSDP2 replaces parameters by sharded ones.
    scales = model.rate_factors(config.model)
    return TrainStep(
        config=config,
        world=world,
        model=model,
        cache=GradCache(
            encoders,
            loss,
            chunks=[found.image, found.text],
            keep_bytes=parse_memory("cache.keep", config.cache.keep),
            autocast=precision.autocast,
            scaler=precision.scaler,
        ),
        precision=precision,
        optimizer=build_optimizer(model, config.optim, sharded=parallel != "ddp", scales=scales),
        average=WeightAverage(config.ema, model) if config.ema else None,
        sort_captions=sort_captions,
        chunks=found,
    )
