"""The state of a step that a checkpoint holds: weights, optimizer, average, loss scale."""

from dataclasses import asdict

from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from clipscale.checkpoint.saved import Saved
from clipscale.common.errors import UserError
from clipscale.common.optimizer_policy import OptimizerPolicy
from clipscale.common.record import Record
from clipscale.common.rng import RandomState
from clipscale.data.loader.stream import TrainStream, merge_positions
from clipscale.distributed.fsdp import replicate_state, sharded_as
from clipscale.distributed.world import World
from clipscale.models.weights import fit_positions
from clipscale.step.train_step import TrainStep


def saved_state(step: TrainStep) -> Record:
    """The fields of `Saved` that a step provides. The tensors are views, sharded as the weights are: the next step
    changes them."""
    return {
        "model": get_model_state_dict(step.model),
        "optimizer": get_optimizer_state_dict(step.model, step.optimizer),
        "chunks": asdict(step.chunks),
        "scaler": step.precision.scaler.state_dict() if step.precision.scaler else None,
        "ema": step.average.state_dict() if step.average else None,
    }


def state_of_ranks(stream: TrainStream, world: World) -> Record:
    """The fields of `Saved` that all ranks make together: their random states, and the position in the data. A
    collective. Raises UserError, on every rank, where a position is not known."""
    position = world.on_all(stream.position)
    now = RandomState.now(world.device)
    return {
        "random": world.all_gather_object({"cpu": now.cpu, "cuda": now.cuda}),
        "position": merge_positions(world.all_gather_object(position)),
    }


def load_state(step: TrainStep, saved: Saved, policy: OptimizerPolicy) -> None:
    """Load weights, optimizer, average and loss scale from a checkpoint. Raises UserError if it trains other
    parameters.

    The optimizer's settings (learning rate, decay) stay as they are.
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
    if policy is not OptimizerPolicy.RESUME:
        for weights in (saved.model, (saved.ema or {}).get("weights", {})):
            for name in fit_positions(weights, model):
                weights[name] = sharded_as(model.get_parameter(name), weights[name])
                saved.optimizer["state"].pop(name, None)
    # Before the weights: torch allocates the optimizer's state by a step with zero gradients and a rate of 0.
    # Not strict: a parameter that the loss does not use, such as the bias of a softmax, has no state.
    options = StateDictOptions(strict=False)
    if policy is not OptimizerPolicy.RESTART:
        set_optimizer_state_dict(model, optimizer, saved.optimizer, options=options)
        replicate_state(optimizer)
    set_model_state_dict(model, saved.model)
    if scaler and saved.scaler:
        scaler.load_state_dict(saved.scaler)
    if step.average:
        step.average.load(saved.ema)
