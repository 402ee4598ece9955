"""What the loss is given: checked, brought to one device and one operand type, and compared between ranks.

Letters: n rows (images) and m columns (texts) of this rank, D feature width, T tokens of a sample.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from clipscale.loss.similarity import widened

# What has to be the same on all ranks: sizes for the transfers, the rest for their order.
FACTS = (
    "number of images",
    "number of texts",
    "size of an image's features",
    "size of a text's features",
    "feature type",
    "choice of masks and keys",
    "choice of tensors that need a gradient",
)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # from wide to narrow


@dataclass
class Inputs:
    """The tensors of one call. The order of the checks is that of the fields."""

    image_features: Tensor
    text_features: Tensor
    scale: Tensor  # 0-d, in the type of the sums
    bias: Tensor
    image_mask: Tensor | None
    text_mask: Tensor | None
    image_keys: Tensor | None
    text_keys: Tensor | None
    operands: torch.dtype

    def facts(self) -> list[int]:
        """The FACTS of this rank."""
        u, v = self.image_features, self.text_features
        given = [x is not None for x in (self.image_mask, self.text_mask, self.image_keys)]
        wanted = [torch.is_grad_enabled() and x.requires_grad for x in (u, v, self.scale, self.bias)]
        choices = [sum(2**i for i, chosen in enumerate(flags) if chosen) for flags in (given, wanted)]
        return [len(u), len(v), u[0].numel(), v[0].numel(), DTYPES.index(self.operands), *choices]


def checked_inputs(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: Tensor | float,
    logit_bias: Tensor | float | None,
    image_mask: Tensor | None,
    text_mask: Tensor | None,
    image_keys: Tensor | None,
    text_keys: Tensor | None,
    similarity: object,
) -> Inputs:
    """The inputs, ready for use. Raises ValueError with the reason where they do not fit each other."""
    u, v = image_features, text_features
    _check_features(u, v, similarity)
    if text_keys is None and image_keys is not None:
        _require(len(u) == len(v), f"text_keys: with hard negatives ({len(v)} texts of {len(u)} images) the texts need keys of their own")
        text_keys = image_keys
    _require(image_keys is not None or text_keys is None, "image_keys must be given along with text_keys")
    for name, keys, side in (("image_keys", image_keys, u), ("text_keys", text_keys, v)):
        if keys is not None:
            _require(
                keys.dtype == torch.int64 and keys.shape == side.shape[:1] and keys.device == u.device,
                f"{name} must be int64 of shape ({len(side)},) on {u.device}, not {keys.dtype} of {tuple(keys.shape)} on {keys.device}",
            )
    for name, mask, side in (("image_mask", image_mask, u), ("text_mask", text_mask, v)):
        if mask is not None:
            _require(similarity == "late", f'{name} is only for similarity="late"')
            _require(
                mask.dtype == torch.bool and mask.shape == side.shape[:2] and mask.device == u.device,
                f"{name} must be bool of shape {tuple(side.shape[:2])} on {u.device}, not {mask.dtype} of {tuple(mask.shape)} on {mask.device}",
            )
    operands = _operand_dtype(u, v)
    scale, bias = (_number(name, x, operands, u.device) for name, x in (("logit_scale", logit_scale), ("logit_bias", 0.0 if logit_bias is None else logit_bias)))
    return Inputs(u, v, scale, bias, image_mask, text_mask, image_keys, text_keys, operands)


def _check_features(u: Tensor, v: Tensor, similarity: object) -> None:
    shapes = f"image_features {tuple(u.shape)}, text_features {tuple(v.shape)}"
    dims = {"dot": 2, "late": 3}.get(similarity) if isinstance(similarity, str) else None
    _require(u.dtype in DTYPES and v.dtype in DTYPES, f"features must be floating-point numbers, not {u.dtype} and {v.dtype}")
    _require(u.device == v.device, f"image_features are on {u.device} but text_features on {v.device}")
    _require(u.dim() >= 1 and v.dim() >= 1 and u.numel() > 0 and v.numel() > 0, f"the batch is empty: {shapes}")
    if dims is not None:
        _require(u.dim() == v.dim() == dims, f'similarity="{similarity}" takes features of {dims} dimensions, not {shapes}')
        _require(u.shape[-1] == v.shape[-1], f"image and text features differ in width: {shapes}")
    _require(len(v) >= len(u), f"fewer texts than images: {shapes}; text i belongs to image i, and texts beyond are hard negatives")


def _operand_dtype(u: Tensor, v: Tensor) -> torch.dtype:
    """The narrower of the two types (neither holds the other: float32); under autocast what matmul would take."""
    pair = {u.dtype, v.dtype}
    if pair == {torch.float16, torch.bfloat16}:
        return torch.float32
    narrow = max(pair, key=DTYPES.index)
    if narrow == torch.float32 and torch.is_autocast_enabled(u.device.type):
        return torch.get_autocast_dtype(u.device.type)
    return narrow


def _number(name: str, x: Tensor | float, operands: torch.dtype, device: torch.device) -> Tensor:
    dtype = widened(torch.empty(0, dtype=operands)).dtype
    if not isinstance(x, Tensor):
        x = torch.tensor(x, dtype=dtype, device=device)
    _require(x.numel() == 1, f"{name} must be a single number, not a tensor of shape {tuple(x.shape)}")
    return x.reshape(()).to(device=device, dtype=dtype)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
