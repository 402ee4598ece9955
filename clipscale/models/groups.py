"""The layer groups of a tower: which of them train, and at which share of the learning rate.

A tower has n groups, first to last: what embeds its input, each block, and the heads: what follows the last block and
its norm, such as the projection. They are timm's for timm's towers and those of open_clip's `lock` for the others; in
all towers the projection is the last group.
"""

from types import SimpleNamespace
from typing import Any

from open_clip.hf_model import HFTextEncoder
from open_clip.modified_resnet import ModifiedResNet
from open_clip.transformer import TextTransformer, VisionTransformer
from timm.models import group_parameters
from torch import nn

from clipscale.common.errors import UserError
from clipscale.config.sections import TowerConfig

WITH_LAST = (99999,)
"""timm's suffix for what belongs to the group before."""
_MATCHERS: dict[type[nn.Module], dict[str, Any]] = {
    VisionTransformer: {
        "stem": r"conv1|class_embedding|positional_embedding|ln_pre",
        "blocks": [(r"transformer\.resblocks\.(\d+)", None), (r"ln_post", WITH_LAST)],
    },
    TextTransformer: {
        "stem": r"token_embedding|positional_embedding|cls_emb",
        "blocks": [(r"transformer\.resblocks\.(\d+)", None), (r"ln_final", WITH_LAST)],
    },
    ModifiedResNet: {"stem": r"conv|bn", "blocks": r"layer(\d+)\.(\d+)"},
    HFTextEncoder: {
        "stem": r"transformer\.(?:embed|shared|layernorm_embedding)",
        "blocks": [
            (r"transformer\.(?:encoder\.)?(?:layers?|block|h)\.(\d+)", None),
            (r"transformer\.(?:encoder\.)?(?:final_)?layer_?norm", WITH_LAST),
        ],
    },
}
"""By open_clip's class: patterns of names, in timm's form. What none matches is a head."""


def layer_groups(encoder: nn.Module, tower: str) -> list[list[str]]:
    """The names of an encoder's parameters by group. `tower`: `image` or `text`, for messages.

    Raises UserError for a tower of timm without groups.
    """
    trunk: Any = getattr(encoder, "trunk", None)
    if trunk is None:
        matcher: Any = next((m for kind, m in _MATCHERS.items() if isinstance(encoder, kind)), None)
    else:
        matcher = trunk.group_matcher() if hasattr(trunk, "group_matcher") else None
    if matcher is None:
        raise UserError(
            f"model.{tower}: timm has no layer groups of a {type(trunk or encoder).__name__}; leave layer_decay and "
            "unlocked_groups of this tower"
        )
    names = [(name.removeprefix("trunk."), name) for name, _ in encoder.named_parameters()]
    named: Any = SimpleNamespace(named_parameters=lambda: names)
    groups = group_parameters(named, matcher, return_values=True)
    return [groups[i] for i in range(len(groups))]


def rate_factors(encoder: nn.Module, tower: str, config: TowerConfig) -> dict[str, float]:
    """Factors of the learning rate by an encoder's parameter: lr_factor * layer_decay^(n - 1 - g) in group g of n."""
    if config.layer_decay == 1:
        return {name: config.lr_factor for name, _ in encoder.named_parameters()}
    groups = layer_groups(encoder, tower)
    rates = [config.lr_factor * config.layer_decay ** (len(groups) - 1 - g) for g in range(len(groups))]
    return {name: rate for rate, names in zip(rates, groups) for name in names}


def lock(encoder: nn.Module, tower: str, unlocked: int) -> None:
    """Freeze all but the last `unlocked` groups. Raises UserError where there are fewer."""
    groups = layer_groups(encoder, tower) if unlocked else [[name for name, _ in encoder.named_parameters()]]
    if unlocked > len(groups):
        raise UserError(f"model.{tower}.unlocked_groups={unlocked}: the tower has {len(groups)}; choose 0 to that")
    for name in (name for group in groups[: len(groups) - unlocked] for name in group):
        encoder.get_parameter(name).requires_grad_(False)
