"""The state of a step that a checkpoint holds: weights, optimizer, moving average (EMA), loss scale."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    OptimizerStateType,
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from clipscale.checkpoint.state import CheckpointDescription, CheckpointState, OptimizerState
from clipscale.common.errors import UserError
from clipscale.common.rng import RandomState
from clipscale.common.terminal import log_warning
from clipscale.config.stages import OptimizerPolicy
from clipscale.data.loader.position import DataPosition, merge_positions
from clipscale.distributed.agreement import run_on_all_ranks
from clipscale.distributed.fsdp import replicate_state, sharded_as
from clipscale.models.weights.load_weights import fit_positions
from clipscale.step.train_step import TrainStep


def gather_checkpoint_state(
    description: CheckpointDescription, train_step: TrainStep, local_position: Callable[[], DataPosition]
) -> CheckpointState:
    """A collective: `description` with the states of the step and of all ranks, as a checkpoint holds them.

    The tensors are views, sharded as the weights are: the next step changes them.

    `local_position()`: this rank's position in the data. If it raises UserError on a rank, all ranks raise that.
    """
    world = train_step.world
    position = run_on_all_ranks(world, local_position)
    random = world.all_gather_object(RandomState.now(world.device))
    complete_description = replace(
        description,
        chunks=train_step.chunk_sizes,
        random=random,
        position=merge_positions(world.all_gather_object(position)),
    )
    return CheckpointState(
        **vars(complete_description),
        model=cast("dict[str, Tensor]", get_model_state_dict(train_step.model)),
        optimizer=optimizer_state(train_step),
        scaler=train_step.precision.scaler.state_dict() if train_step.precision.scaler else None,
        ema=train_step.ema.state_dict() if train_step.ema else None,
    )


def optimizer_state(train_step: TrainStep) -> OptimizerState:
    """The optimizer's state, sharded as the weights are.

    timm's LAMB counts the steps in each group, in a tensor. It is converted to a number.
    """
    state = cast(OptimizerState, get_optimizer_state_dict(train_step.model, train_step.optimizer))
    state["param_groups"] = [
        {key: value.item() if isinstance(value, Tensor) else value for key, value in group.items()}
        for group in state["param_groups"]
    ]
    return state


def load_state(train_step: TrainStep, state: CheckpointState, policy: OptimizerPolicy) -> None:
    """Load weights, optimizer, moving average and loss scale from a checkpoint's `state`.

    The run's optimizer keeps its own settings, such as learning rate and decay. Raises UserError if the checkpoint
    trains other parameters.
    """
    model = train_step.model
    optimizer = train_step.optimizer
    scaler = train_step.precision.scaler
    state = replace(state, optimizer=with_groups_of_run(state.optimizer, model, optimizer))
    if policy is not OptimizerPolicy.TAKE_ALL:
        state = with_fitted_positions(state, model)
    # The optimizer comes before the weights: torch allocates its state by a step with zero gradients and a rate of 0.
    # `strict=False`, because a parameter that the loss does not use, such as the bias of a softmax, has no state.
    options = StateDictOptions(strict=False)
    if policy is not OptimizerPolicy.TAKE_NONE:
        set_optimizer_state_dict(model, optimizer, cast(OptimizerStateType, state.optimizer), options=options)
        replicate_state(optimizer)
    if train_step.world.is_rank0:
        warn_of_rounded_weights(model, state.model)
    set_model_state_dict(model, {**state.model})
    if scaler and state.scaler:
        scaler.load_state_dict(state.scaler)
    if train_step.ema:
        train_step.ema.load(state.ema)


def with_groups_of_run(saved: OptimizerState, model: nn.Module, optimizer: torch.optim.Optimizer) -> OptimizerState:
    """A checkpoint's optimizer state in the parameter groups of the run's optimizer, with the run's settings.

    The checkpoint may have other groups, because a group has one lr_factor. torch needs the run's settings to place the
    state, for example of fused optimizers. Raises UserError if the checkpoint trains other parameters.
    """
    name_by_id = {id(p): name for name, p in model.named_parameters()}
    names_of_groups = [[name_by_id[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    saved_group_of = {name: group for group in saved["param_groups"] for name in group["params"]}
    unmatched = sorted(saved_group_of.keys() ^ {name for names in names_of_groups for name in names})
    if unmatched:
        trains = "the checkpoint" if unmatched[0] in saved_group_of else "this run"
        raise UserError(
            f"resume: the checkpoint's optimizer does not fit this model's parameters: only {trains} trains "
            f"{unmatched[0]}; train the same ones, or begin another run=NAME with model.weights="
        )
    groups = [
        {**saved_group_of[names[0]], **settings, "params": names}
        for names, settings in zip(names_of_groups, optimizer.param_groups)
    ]
    return {**saved, "param_groups": groups}


def with_fitted_positions(state: CheckpointState, model: nn.Module) -> CheckpointState:
    """The state with position embeddings for the model's patches and tokens.

    Those that change lose their optimizer state.
    """
    weights = {**state.model}
    average = {**state.ema["weights"]} if state.ema else {}
    fitted: set[str] = set()
    for tensors in (weights, average):
        for name in fit_positions(tensors, model):
            tensors[name] = sharded_as(model.get_parameter(name), tensors[name])
            fitted.add(name)
    states = {name: tensors for name, tensors in state.optimizer["state"].items() if name not in fitted}
    return replace(
        state,
        model=weights,
        ema={**state.ema, "weights": average} if state.ema else None,
        optimizer={**state.optimizer, "state": states},
    )


def warn_of_rounded_weights(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Print a line if the checkpoint has weights of frozen towers in half precision, and this run would use float32."""
    dtypes = {
        saved[name].dtype for name, p in model.named_parameters() if name in saved and saved[name].itemsize < p.itemsize
    }
    if dtypes:
        log_warning(
            f"precision: the checkpoint holds weights of its frozen towers in {dtypes.pop()}, as its run computed "
            "with them; they stay rounded in this precision, too"
        )
