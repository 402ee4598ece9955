"""The facts of each family of encoders that the trainer uses. A new family is one entry of FAMILIES.

A field that an entry leaves out has the default for any encoder of open_clip.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypedDict

from open_clip.hf_model import HFTextEncoder
from open_clip.timm_model import TimmModel
from open_clip.transformer import TextTransformer, VisionTransformer
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from clipscale.models.lean import LeanCaptions, LeanText, LeanVision


class LayerGroups(TypedDict):
    """Patterns of parameters' names, as timm's `group_parameters` takes them."""

    stem: str
    blocks: list[tuple[str, tuple[int, ...] | None]]


# Layer group -> patterns of parameters' names, in timm's form. 99999 means the group before. Parameters that no pattern
# matches are the head. Towers of timm have patterns of their own.
GROUPS: LayerGroups = {
    "stem": r"conv|bn|(?:class|positional|token)_embedding|cls_emb|ln_pre|transformer\.(?:embed|shared|layernorm_emb)",
    "blocks": [
        (r"transformer\.resblocks\.(\d+)", None),
        (r"layer(\d+)\.(\d+)", None),  # ResNets
        (r"transformer\.(?:encoder\.)?(?:layers?|block|h)\.(\d+)", None),  # towers of transformers
        (r"ln_post|ln_final|transformer\.(?:encoder\.)?(?:final_)?layer_?norm", (99999,)),
    ],
}


@dataclass(frozen=True)
class Family:
    """Encoders whose parameters have the same names, and facts about them."""

    # open_clip's class of the encoders.
    encoder: type[nn.Module] = nn.Module
    # Whether a caption's feature stays the same without its padding, so that a run may order captions by length and cut
    # them.
    ignores_padding: Callable[[Any], bool] = lambda encoder: False
    # The one padding token for which this holds. None: any.
    required_pad_id: Callable[[Any], int | None] = lambda encoder: None
    # Whether adapters suit it: its blocks call their linear layers as modules, or are `LeanBlock`s, which lora.py
    # replaces.
    supports_lora: Callable[[Any], bool] = lambda encoder: False
    groups: LayerGroups = field(default_factory=lambda: GROUPS)


def _ignores_padding(encoder: TextTransformer) -> bool:
    if isinstance(encoder, LeanCaptions):
        return True
    causal = isinstance(encoder, LeanText) and encoder.attn_mask is not None
    return causal and encoder.pool_type in ("first", "argmax", "eos")


def _has_plain_blocks(encoder: TimmModel) -> bool:
    blocks = getattr(encoder.trunk, "blocks", ())
    return len(blocks) > 0 and all(type(block) is Block for block in blocks)


FAMILIES = (
    Family(VisionTransformer, supports_lora=lambda encoder: isinstance(encoder, LeanVision)),
    Family(
        TextTransformer,
        ignores_padding=_ignores_padding,
        required_pad_id=lambda encoder: encoder.pad_id if isinstance(encoder, LeanCaptions) else None,
        supports_lora=lambda encoder: isinstance(encoder, LeanText | LeanCaptions),
    ),
    Family(TimmModel, supports_lora=_has_plain_blocks),
    # open_clip masks the padding in attention and in every pooler.
    Family(
        HFTextEncoder,
        ignores_padding=lambda encoder: True,
        required_pad_id=lambda encoder: encoder.config.pad_token_id,
        supports_lora=lambda encoder: True,
    ),
)
OTHER_FAMILY = Family()


def family_of(encoder: nn.Module) -> Family:
    """An encoder's family; `OTHER_FAMILY` if no entry has it, such as for a residual network."""
    return next((family for family in FAMILIES if isinstance(encoder, family.encoder)), OTHER_FAMILY)


def may_cut_captions(encoder: nn.Module, tokenizer: Callable[[list[str]], Tensor]) -> bool:
    """Whether captions may lose their padding, for a text tower's encoder. The tokenizer says which token that is."""
    family = family_of(encoder)
    if not family.ignores_padding(encoder):
        return False
    required_pad_id = family.required_pad_id(encoder)
    return required_pad_id is None or required_pad_id == int(tokenizer([""])[0, -1])
