"""Low-rank adapters (LoRA, arXiv 2106.09685) by peft's layers: W x + B A x, of which A and B train.

They are on every linear layer of the blocks that do not train by themselves: attention's and the MLP's.
"""

import re
from typing import Any

import torch
from torch import Tensor, nn

from clipscale.common.errors import UserError
from clipscale.models.families import family_of
from clipscale.models.groups import layer_groups
from clipscale.models.lean import LeanBlock


class LoraBlock(LeanBlock):
    """The lean block whose attention has adapters. peft's forward pass would change the base weights by rounding."""

    attn: Any

    def in_proj(self) -> tuple[Tensor, Tensor]:
        return self.attn.in_proj_weight + self.attn.get_delta_weight("default"), self.attn.in_proj_bias

    def out_proj(self, x: Tensor) -> Tensor:
        return self.attn.get_base_layer().out_proj(x)


def add(encoder: nn.Module, tower: str, rank: int, unlocked: int) -> None:
    """Put adapters into the blocks of an encoder but the last `unlocked` layer groups. Its features stay, bit for bit.
    `tower`: `image` or `text`, for messages. Raises UserError for a tower without such blocks, and without peft."""
    if not family_of(encoder).adapters(encoder):
        raise UserError(
            f"model.lora={rank}: the {tower} tower is no transformer of open_clip, no ViT of timm and no "
            f"text tower of transformers; set model.{tower}.train=none, or model.lora=0"
        )
    try:
        import peft
    except ImportError as error:
        raise UserError(f"model.lora={rank} needs peft; pip install 'clipscale[lora]'") from error
    groups = layer_groups(encoder, tower)
    names = {name.rpartition(".")[0] for group in groups[1 : len(groups) - max(1, unlocked)] for name in group}
    modules = {name: encoder.get_submodule(name) for name in names}
    attentions = tuple(f"{name}." for name, module in modules.items() if isinstance(module, nn.MultiheadAttention))
    targets = sorted(
        name
        for name, module in modules.items()
        if isinstance(module, nn.Linear | nn.MultiheadAttention) and not name.startswith(attentions)
    )
    trained = [p for p in encoder.parameters() if p.requires_grad]
    rule = peft.LoraConfig(r=rank, lora_alpha=rank, target_modules="|".join(map(re.escape, targets)))
    peft.inject_adapter_in_model(rule, encoder)
    for p in trained:  # peft has frozen them
        p.requires_grad_()
    for name, module in list(encoder.named_modules()):
        if type(module) is LeanBlock and not isinstance(module.attn, nn.MultiheadAttention):
            encoder.set_submodule(name, LoraBlock(module))


@torch.no_grad()
def merge(encoder: nn.Module) -> None:
    """Add the adapters to the weights and take them out."""
    modules: list[tuple[str, Any]] = list(encoder.named_modules())
    for name, module in reversed(modules):  # inner ones first
        if hasattr(module, "get_delta_weight"):
            base = module.get_base_layer()
            weight = base.in_proj_weight if isinstance(base, nn.MultiheadAttention) else base.weight
            weight += module.get_delta_weight("default")
            encoder.set_submodule(name, base)
        elif type(module) is LoraBlock:
            encoder.set_submodule(name, LeanBlock(module))
