"""Weights between open_clip's names and transformers', by the table `hugging_face.yaml`, in both directions."""

import re
from collections.abc import Iterable

import torch
from torch import Tensor

from clipscale.common.record import Record
from clipscale.models.hugging_face import TABLES

Weights = dict[str, Tensor]
"""By name."""


def of_transformers(state: Weights) -> Weights:
    """Weights of transformers' CLIP or SigLIP, or of one of their towers, under open_clip's names; others as they are.

    Names that are not known stay. Raises what torch raises for other shapes.
    """
    for tower, known in (("vision_model.", "patch"), ("text_model.", "token")):
        if f"embeddings.{known}_embedding.weight" in state:  # a tower alone
            state = {f"{tower}{name}": value for name, value in state.items()}
    if not any(name.startswith(("vision_model.", "text_model.")) for name in state):
        return state
    table = TABLES["siglip" if any("_model.head." in name for name in state) else "clip"]
    state = {name: value for name, value in state.items() if not name.endswith("position_ids")}
    state = renamed(state, [(theirs, ours) for ours, theirs in table["names"]])
    for name in table["transposed"]:
        if name in state:
            state[name] = state[name].mT.contiguous()
    for name in table["batched"]:
        if name in state:
            state[name] = state[name][None]
    return state


def to_transformers(state: Weights, kind: str) -> Weights:
    """Weights under the names of transformers' `kind`. Raises ValueError for one that its models do not have."""
    table = TABLES[kind]
    state = dict(state)
    for name in table["transposed"]:
        state[name] = state[name].mT.contiguous()
    for name in table["batched"]:
        state[name] = state[name][0]
    new = renamed(state, table["names"])
    unknown = state.keys() & new.keys() - {"logit_scale", "logit_bias"}
    if unknown:
        raise ValueError(f"{min(unknown)} is no part of it")
    return {name: value.contiguous() for name, value in new.items()}


def renamed(state: Weights, pairs: Iterable[tuple[str | Record, str | Record]]) -> Weights:
    """Weights with new names. Each pair: one name or several, before and after; see the table."""
    left = dict(state)
    new: Weights = {}
    for before, after in pairs:
        first, *others = shares(before)
        targets = shares(after)
        pattern = re.compile(re.escape(first).replace(r"\#", r"(\d+)").replace(r"\*", "(weight|bias)"))
        for found in filter(None, map(pattern.fullmatch, state)):
            names = [filled(part, found.groups()) for part in (first, *others)]
            if not all(part in left for part in names):
                continue
            parts = [left.pop(part) for part in names]
            whole = torch.cat(parts) if others else parts[0]
            pieces = [whole]
            if len(targets) > 1:
                unit = len(whole) // sum(targets.values())
                pieces = whole.split([unit * share for share in targets.values()])
            new |= {filled(target, found.groups()): piece for target, piece in zip(targets, pieces)}
    return left | new


def shares(names: str | Record) -> dict[str, int]:
    """Names and their shares of the rows."""
    return {names: 1} if isinstance(names, str) else names


def filled(pattern: str, values: Iterable[str]) -> str:
    """A name by its pattern."""
    for value in values:
        pattern = re.sub(r"[#*]", value, pattern, count=1)
    return pattern
