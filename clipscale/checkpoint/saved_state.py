"""What a checkpoint must hold. It is checked once, when it is read, so that no later line meets a missing key or another type."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Annotated, Any, NotRequired, TypeVar

import torch
from pydantic import ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError, with_config
from torch import Tensor
from typing_extensions import TypedDict

from clipscale.common.errors import UserError, one_line
from clipscale.common.terminal import printable
from clipscale.config.parse import typed
from clipscale.config.sections import ModelConfig

T = TypeVar("T")
CHECKED = ConfigDict(arbitrary_types_allowed=True, strict=True)
"""Of a whole state, with all that is in it."""
Count = Annotated[int, Field(ge=0, lt=2**53)]
Text = Annotated[str, StringConstraints(max_length=10_000)]
Place = Annotated[list[Count] | tuple[Count, ...], Field(min_length=2, max_length=8)]


class Position(TypedDict):
    """Where the data stands: `at` maps each shard stream to epoch and samples read."""

    order: Text
    windows: NotRequired[Text]
    streams: NotRequired[Annotated[int, Field(ge=1, lt=2**24)]]
    lanes: NotRequired[Annotated[int, Field(ge=1, lt=2**24)]]
    """The same in checkpoints of former versions."""
    at: Annotated[dict[Text, Place], Field(min_length=1)]


class Random(TypedDict):
    """The state of a rank's generators."""

    cpu: Tensor
    cuda: Tensor | None


class Group(TypedDict):
    """A parameter group of an optimizer, by name, or in format 1 by position; with settings that differ between optimizers."""

    params: list[Text] | list[Count]


class Optimizer(TypedDict):
    state: dict[Text | Count, dict[Text, Tensor | float | int | bool | None]]
    param_groups: list[Group]


class Average(TypedDict):
    updates: Count
    weights: NotRequired[dict[Text, Tensor]]


class Tower(TypedDict):
    """How far a tower has come within a step."""

    features: Tensor
    random: list[tuple[Tensor, Tensor | None]]
    replayed: Count


class Cache(TypedDict):
    random: tuple[Tensor, Tensor | None]
    towers: list[Tower]


@with_config(CHECKED)
class Progress(TypedDict):
    """The progress within a step, of one rank. `gradients` has tensors, and under `complete` names of towers."""

    about: dict[Text, Any]
    cache: Cache
    gradients: dict[Text, Tensor | list[Text]]


@with_config(CHECKED)
class Model(TypedDict):
    """What evaluation takes of a checkpoint. The tensors may be stored apart."""

    step: Count
    model: NotRequired[dict[Text, Tensor]]
    model_config: dict[Text, Any]
    ema: NotRequired[Average | None]


@with_config(CHECKED)
class State(Model):
    """What training also takes, to go on."""

    samples: Count
    batch: Annotated[int, Field(ge=1, lt=2**53)]
    loss: float
    optimizer: Optimizer
    optimizer_name: Text
    scaler: dict[Text, Any] | None
    random: list[Random]
    position: Position
    chunks: NotRequired[dict[Text, int | str | None]]
    sort_captions: NotRequired[bool]


_MODEL, _STATE, _PROGRESS = TypeAdapter(Model), TypeAdapter(State), TypeAdapter(Progress)


def check_entries(state: Any, entries: TypeAdapter[T]) -> T:
    """The state, if it has these entries. Raises ValueError, with the first wrong entry, where it has not."""
    try:
        return entries.validate_python(state)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise ValueError(f"{printable('.'.join(map(str, first['loc'])))}: {printable(first['msg'])}") from error


def check_model(state: Mapping[str, Any], entries: TypeAdapter[Any] = _MODEL) -> None:
    """Raise ValueError for a state that evaluation could not use."""
    check_entries(dict(state), entries)
    model_config(state)


def check(state: Mapping[str, Any]) -> None:
    """The same for a state that training could not go on from."""
    check_model(state, _STATE)
    for one in state["random"]:
        check_generators(one["cpu"], one["cuda"])
    position = state["position"]
    if set(position["at"]) != {str(stream) for stream in range(position.get("streams", position.get("lanes", 0)))}:
        raise ValueError("position: not one place for each shard stream")


def check_generators(cpu: Tensor, cuda: Tensor | None) -> None:
    """Raise ValueError for what is no state of torch's random number generators. That of a GPU is checked where there is one."""
    try:
        torch.Generator().set_state(cpu)
        if cuda is not None and torch.cuda.is_available():
            torch.Generator("cuda").set_state(cuda)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"random: no state of torch's generators ({str(error).splitlines()[0][:200]})") from error


def model_config(state: Mapping[str, Any]) -> ModelConfig:
    """The settings of the saved model, also of another version's. Raises ValueError for a value of another type."""
    known = {one.name for one in fields(ModelConfig)}
    try:
        return typed(ModelConfig, {name: value for name, value in state["model_config"].items() if name in known})
    except UserError as error:
        raise ValueError(f"model_config: {error}") from error


@contextmanager
def fitting(what: str, remedy: str) -> Iterator[None]:
    """Around the use of what was read: an error of any kind becomes a UserError, `WHAT does not fit (why); REMEDY`."""
    try:
        yield
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # torch has its own for every way in which values do not fit
        raise UserError(f"{what} does not fit ({one_line(error)}); {remedy}") from error


def check_optimizer(own: torch.optim.Optimizer, saved: Mapping[str, Any], *, elementwise: bool) -> None:
    """Raise ValueError for settings or a state that the optimizer cannot take; its parameters are those of `saved`.

    `elementwise`: a parameter's state has the parameter's shape.
    """
    for group, theirs in zip(own.param_groups, saved["param_groups"], strict=True):
        for key, value in group.items():
            if key != "params" and key in theirs and not _alike(value, theirs[key]):
                raise ValueError(f"the optimizer's {key} is {printable(theirs[key])[:40]}, not such as {value}")
        found = [(p, saved["state"].get(name) or {}) for p, name in zip(group["params"], theirs["params"], strict=True)]
        keys = {tuple(sorted(state)) for _, state in found if state}
        if elementwise and len(keys) > 1:
            raise ValueError("the optimizer's state has not the same entries for all parameters")
        for parameter, state in found if elementwise else ():
            for key, value in state.items():
                if isinstance(value, Tensor) and value.shape != (() if key == "step" else parameter.shape):
                    raise ValueError(f"the optimizer's {printable(key)} has the shape {tuple(value.shape)}")


def _alike(own: Any, saved: Any) -> bool:
    """Whether a setting of an optimizer can take the place of another."""
    if isinstance(own, list | tuple):
        return isinstance(saved, list | tuple) and len(saved) == len(own) and all(map(_alike, own, saved))
    if isinstance(own, bool) or own is None:
        return saved is None or isinstance(saved, bool | int | float)
    if isinstance(own, int | float):
        return isinstance(saved, int | float) and not isinstance(saved, bool) and math.isfinite(saved)
    return isinstance(saved, type(own))
