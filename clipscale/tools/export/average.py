"""Averages of weights: of a fine-tuned model and its start (WiSE-FT), or of runs and checkpoints (model soups)."""

import math
from collections.abc import Sequence
from dataclasses import replace

from clipscale.common.errors import UserError
from clipscale.config.sections import ModelConfig
from clipscale.models.sources import find
from clipscale.models.towers import ClipModel, build_model, load_model
from clipscale.models.weights import Weights, without_weights


def average(
    model: ClipModel, config: ModelConfig, others: Sequence[str], shares: Sequence[float], weights: str
) -> list[float]:
    """theta = sum_k w_k theta_k over the model and `others`, in the model; returns the w_k, `shares` or equal ones.

    Summed in float64, and a share of 1 gives that model bit for bit. Sources: WiSE-FT (arXiv 2109.01903), model soups
    (arXiv 2203.05482). `others`: runs or checkpoints, of which `weights` are taken, or values of `model.weights`.
    Running statistics are averaged, too. Raises UserError for shares that do not add up to 1 and for models of another
    architecture or of other pixels.
    """
    count = len(others) + 1
    shares = shares or [1 / count] * count
    if len(shares) != count or not math.isclose(sum(shares), 1, abs_tol=1e-6):
        raise UserError(f"shares={[*shares]}: give {count} that add up to 1: of the run, then of {[*others]}")
    state = model.state_dict()
    largest = shares.index(max(shares))
    total: Weights = {}
    for k, share in enumerate(shares):
        other = state if k == 0 else state_of(others[k - 1], config, weights)
        if {n: x.shape for n, x in other.items()} != {n: x.shape for n, x in state.items()}:
            raise UserError(f"average={others[k - 1]}: another architecture than the run's {config.name}")
        for name, value in other.items():
            if value.is_floating_point() and share:
                part = share * value.double()
                total[name] = total[name] + part if name in total else part
            elif k == largest:  # a count of batches
                total[name] = value
    model.load_state_dict({name: value.to(state[name].dtype) for name, value in total.items()})
    return [*shares]


def state_of(other: str, config: ModelConfig, weights: str) -> Weights:
    """The weights of a run, its checkpoint, or any `model.weights`. Raises UserError."""
    source = find(other, config.name, "average")
    if not source.shards:
        model, other_config, _ = load_model(source.path, str(source.path), weights)
        pixels = other_config.pixels
    else:
        pixels = replace(config, preprocess={**config.preprocess, **source.model.preprocess}).pixels
        model = build_model(replace(without_weights(config), weights=other))
    if pixels != config.pixels:
        raise UserError(f"average={other}: trained with another model.preprocess than the run")
    return model.state_dict()
