"""The layer groups of a tower: which of them train, and at which share of the learning rate.

A tower has n groups: what embeds its input, each block (the last one with the norm after it), and the heads, such as
the projection. timm says the groups of its own towers. Other towers have the groups of open_clip's `lock`.
"""

from collections.abc import Iterator

from timm.models import group_parameters
from torch import nn

from clipscale.common.errors import UserError
from clipscale.config.model import TowerConfig
from clipscale.models.families import family_of


class WithoutTrunk(nn.Module):
    """An encoder that names its parameters as timm's patterns expect: without a leading `trunk.`."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self.encoder.named_parameters(prefix, recurse, remove_duplicate):
            yield name.removeprefix("trunk."), parameter


def layer_groups(encoder: nn.Module, tower: str) -> list[list[str]]:
    """The names of an encoder's parameters by group. `tower`: `image` or `text`, for messages. Raises UserError."""
    trunk = getattr(encoder, "trunk", None)
    if trunk is not None and not hasattr(trunk, "group_matcher"):
        raise UserError(
            f"model.{tower}: timm has no layer groups of {type(trunk).__name__}; take layer_decay=1, train=all or none"
        )
    patterns = family_of(encoder).groups if trunk is None else trunk.group_matcher()
    groups = group_parameters(WithoutTrunk(encoder), patterns, return_values=True)
    if len(groups) < 3:  # no blocks lie between the embeddings and the heads
        raise UserError(
            f"model.{tower}: the blocks of {type(encoder).__name__} are not known, so it has no layer groups; take "
            "layer_decay=1, and train=all or none"
        )
    names = {id(parameter): name for name, parameter in encoder.named_parameters()}
    return [[names[id(parameter)] for parameter in groups[i]] for i in range(len(groups))]


def lr_factors(encoder: nn.Module, tower: str, config: TowerConfig) -> dict[str, float]:
    """Factors of the learning rate by an encoder's parameter: lr_factor * layer_decay^(n - 1 - g) in group g of n."""
    if config.layer_decay == 1:
        return {name: config.lr_factor for name, _ in encoder.named_parameters()}
    from_last = enumerate(reversed(layer_groups(encoder, tower)))
    return {name: config.lr_factor * config.layer_decay**depth for depth, names in from_last for name in names}


def lock(encoder: nn.Module, tower: str, unlocked: int) -> None:
    """Freeze all but the last `unlocked` groups. Raises UserError where there are fewer groups."""
    if not unlocked:
        encoder.requires_grad_(False)
        return
    groups = layer_groups(encoder, tower)
    if unlocked > len(groups):
        raise UserError(
            f"model.{tower}.train={unlocked}: the tower has {len(groups)} groups; choose 1 to that, all or none"
        )
    for group in groups[:-unlocked]:
        for name in group:
            encoder.get_parameter(name).requires_grad_(False)
