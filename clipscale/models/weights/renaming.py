"""Renames weights from open_clip's names to transformers' and back, by the table `hugging_face.yaml`."""

import re
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from clipscale.models.weights.hugging_face import MODEL_TYPES

# Name -> weight.
Weights = dict[str, Tensor]


def from_transformers(state: Weights) -> Weights:
    """Weights of transformers' CLIP or SigLIP under open_clip's names; others as they are.

    Names that are not known stay. Raises what torch raises for other shapes, and KeyError.
    """
    if not any(name.startswith(("vision_model.", "text_model.")) for name in state):
        return state
    model_type = "siglip" if any("_model.head." in name for name in state) else "clip"
    state = {name: value for name, value in state.items() if not name.endswith("position_ids")}
    return rename_weights(state, [(theirs, ours, *how) for ours, theirs, *how in MODEL_TYPES[model_type]["names"]])


def to_transformers(state: Weights, model_type: str) -> Weights:
    """Weights under the names of transformers' `model_type`. Raises ValueError for one that its models do not have."""
    new = rename_weights(state, MODEL_TYPES[model_type]["names"])
    unknown = state.keys() & new.keys() - {"logit_scale", "logit_bias"}
    if unknown:
        raise ValueError(f"{min(unknown)} is not part of it")
    return new


def rename_weights(state: Weights, rules: Iterable[Sequence[str]]) -> Weights:
    """Weights with new names. A rule: the names before and after, and how the shape changes; see the table."""
    new = dict(state)
    for before, after, *how in rules:
        sources = before.split()
        pattern = re.escape(sources[0]).replace(r"\#", r"(?P<block>\d+)").replace(r"\*", "(?P<kind>weight|bias)")
        for match in filter(None, (re.fullmatch(pattern, name) for name in state)):
            names = [
                match.expand(name.replace("#", r"\g<block>").replace("*", r"\g<kind>"))
                for name in (*sources, *after.split())
            ]
            joined = torch.cat([new.pop(name) for name in dict.fromkeys(names[: len(sources)])])
            if how == ["transposed"]:
                joined = joined.mT.contiguous()
            elif how == ["batched"]:
                joined = joined[None] if joined.ndim == 2 else joined[0]
            targets = names[len(sources) :]
            for name, rows in zip(targets, joined.chunk(len(targets))):
                new[name] = torch.cat([new[name], rows]) if name in new else rows
    return new
