"""Low-rank adapters (LoRA, arXiv 2106.09685) by peft's layers: W x + B A x, where only A and B train.

Adapters are on the linear layers of attention and the MLP, in the blocks that do not train whole. B begins at 0.

N: samples, T: tokens, W: width.
"""

import re

from torch import Tensor, nn

from clipscale.common.errors import UserError
from clipscale.models.families import family_of
from clipscale.models.groups import layer_groups, lock
from clipscale.models.lean import LeanBlock


class AdaptedAttention(nn.Module):
    """The parameters of torch's attention, with its packed projection as a layer that peft can adapt."""

    def __init__(self, attention: nn.MultiheadAttention) -> None:
        super().__init__()
        self.num_heads = attention.num_heads
        outputs, inputs = attention.in_proj_weight.shape
        self.in_proj = nn.Linear(inputs, outputs, device="meta")
        self.in_proj.weight = attention.in_proj_weight
        self.in_proj.bias = attention.in_proj_bias
        self.out_proj = attention.out_proj


class AdaptedBlock(LeanBlock):
    """A `LeanBlock` with an `AdaptedAttention`."""

    attn: AdaptedAttention
    accepts_half_weights = False

    def __init__(self, block: LeanBlock) -> None:
        super().__init__(block)
        self.attn = AdaptedAttention(block.attn)

    def project(self, y: Tensor) -> Tensor:
        return self.attn.in_proj(y)

    def project_from(self, token: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        width = y.shape[-1]
        return self.attn.in_proj(token)[..., :width], self.attn.in_proj(y)[..., width:]


def add_adapters(encoder: nn.Module, tower: str, rank: int, unlocked: int) -> None:
    """Freeze all but the last `unlocked` layer groups, and put adapters of a rank into the blocks that are frozen.

    `tower`: `image` or `text`, for messages. Raises UserError for a tower without such blocks, and without peft.
    """
    if not family_of(encoder).supports_lora(encoder):
        raise UserError(
            f"model.lora={rank}: the {tower} tower is not a transformer of open_clip, a ViT of timm or a text tower of "
            f"transformers; take model.{tower}.train=none, or model.lora=0"
        )
    try:
        import peft
    except ImportError as error:
        raise UserError(f"model.lora={rank} needs peft; pip install 'clipscale[lora]'") from error
    lock(encoder, tower, unlocked)
    groups = layer_groups(encoder, tower)
    trained = [p for p in encoder.parameters() if p.requires_grad]
    blocks = groups[1 : len(groups) - max(1, unlocked)]
    adapted = {id(encoder.get_parameter(name)) for group in blocks for name in group}
    for name, block in list(encoder.named_modules()):
        if isinstance(block, LeanBlock) and id(block.attn.in_proj_weight) in adapted:
            encoder.set_submodule(name, AdaptedBlock(block))
    layers = [
        name for name, layer in encoder.named_modules() if isinstance(layer, nn.Linear) and id(layer.weight) in adapted
    ]
    if not layers:
        raise UserError(
            f"model.lora={rank}: with model.{tower}.train={unlocked} no block of the {tower} tower is left to adapt; "
            "give fewer groups, or model.lora=0"
        )
    rule = peft.LoraConfig(r=rank, lora_alpha=rank, target_modules="|".join(map(re.escape, layers)))
    peft.inject_adapter_in_model(rule, encoder)
    for p in trained:  # peft has frozen these
        p.requires_grad_()
