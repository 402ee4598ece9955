"""Averages weights: of a fine-tuned model and its start (WiSE-FT), or of runs and checkpoints (model soups)."""

import math
from collections.abc import Sequence
from dataclasses import replace

from clipscale.common.errors import UserError
from clipscale.config.model import ModelConfig
from clipscale.models.towers import ClipModel, build_model
from clipscale.models.weights.descriptions import difference
from clipscale.models.weights.load_weights import AVERAGE, Weights, fit_positions, without_weights
from clipscale.models.weights.sources import SET, find_source
from clipscale.tools.trained_model import load_checkpoint


def average(
    model: ClipModel, config: ModelConfig, others: Sequence[str], shares: Sequence[float], weights: str
) -> list[float]:
    """Set the model's weights to sum_k w_k theta_k over the model and `others`. Returns the w_k.

    The w_k are the `shares`, or equal. Sources: WiSE-FT (arXiv 2109.01903), model soups (arXiv 2203.05482). Sums are
    float64, and a share of 1 gives that model bit for bit. Running statistics are averaged, too; counts come from the
    model with the largest share.

    `others`: values of `model.weights`. `weights`: `trained` or `ema`, which weights are taken of a run that is given
    without `::ema`. Position embeddings are interpolated for the run's own sizes. Raises UserError for shares that do
    not add up to 1, and for models of another architecture or of other pixels.
    """
    number = len(others) + 1
    chosen = [*shares] or [1 / number] * number
    if len(chosen) != number or not math.isclose(sum(chosen), 1, abs_tol=1e-6):
        raise UserError(f"shares={[*shares]}: give {number} that add up to 1: of the run, then of {[*others]}")
    ours = model.state_dict()
    totals: Weights = {}
    largest = chosen.index(max(chosen))
    for k, share in enumerate(chosen):  # one model at a time is in memory
        state = weights_of(others[k - 1], model, config, weights) if k else ours
        for name, value in state.items():
            if value.is_floating_point() and share:
                totals[name] = totals.get(name, 0) + share * value.double()
            elif k == largest and not value.is_floating_point():
                totals[name] = value.clone()
    for name, value in ours.items():
        value.copy_(totals[name])
    return chosen


def weights_of(other: str, model: ClipModel, config: ModelConfig, weights: str) -> Weights:
    """The weights of `other`, in the sizes of `model`. Raises UserError for another architecture or other pixels."""
    source = find_source(other, config.name, "average")
    differs = difference(config, source.model)
    if config.is_captioner and source.model.name and not source.model.is_captioner:
        differs = "without a decoder"
    if differs:
        raise UserError(f"average={other}: another architecture than the run's {config.name}, {differs}")
    if source.shards:
        pixels = replace(config, preprocess={**config.preprocess, **source.model.preprocess}).pixels
        state = build_model(replace(without_weights(config), weights=other)).state_dict()
    else:
        if source.key not in ("", AVERAGE):
            raise UserError(f"average={other}: the run has no {source.key!r}; leave {SET}{source.key} out")
        theirs, trained, _ = load_checkpoint(source.path, source.key or weights)
        pixels = trained.pixels
        state = theirs.state_dict()
        fit_positions(state, model)
    ours = model.state_dict()
    if {name: weight.shape for name, weight in state.items()} != {name: weight.shape for name, weight in ours.items()}:
        raise UserError(f"average={other}: another architecture than the run's {config.name}")
    if pixels != config.pixels:
        raise UserError(f"average={other}: trained with another model.preprocess than the run")
    return state
