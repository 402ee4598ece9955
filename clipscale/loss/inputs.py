"""The tensors of one call: checked once, with one type for the features, and described by numbers that the ranks compare.

Letters: n rows (images) and m columns (texts) of this rank, D feature width, T tokens of a sample.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from clipscale.loss.block import sum_dtype

# What must be the same on all ranks: sizes for the transfers, the rest for their order.
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
Pair = tuple[Tensor | None, Tensor | None]  # of the rows and of the columns


@dataclass
class Inputs:
    """The tensors of one call: images as rows and texts as columns."""

    rows: Tensor
    cols: Tensor
    scale: Tensor  # 0-d, in sum_dtype
    bias: Tensor
    masks: Pair
    keys: Pair
    dtype: torch.dtype  # what the features are cast to

    def facts(self) -> list[int]:
        """The FACTS of this rank."""
        given = [x is not None for x in (*self.masks, *self.keys)]
        trained = [torch.is_grad_enabled() and x.requires_grad for x in (self.rows, self.cols, self.scale, self.bias)]
        choices = [sum(2**i for i, chosen in enumerate(flags) if chosen) for flags in (given, trained)]
        sizes = [len(self.rows), len(self.cols), self.rows[0].numel(), self.cols[0].numel()]
        return [*sizes, DTYPES.index(self.dtype), *choices]

    def positives_only(self) -> "Inputs":
        """Without the hard negatives among the texts."""
        n = len(self.rows)
        masks, keys = ((row, None if col is None else col[:n]) for row, col in (self.masks, self.keys))
        return replace(self, cols=self.cols[:n], masks=masks, keys=keys)

    def swapped(self) -> "Inputs":
        """The texts as rows, without the hard negatives, and the images as columns."""
        own = self.positives_only()
        return replace(own, rows=own.cols, cols=own.rows, masks=own.masks[::-1], keys=own.keys[::-1])


def checked_inputs(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: Tensor | float,
    logit_bias: Tensor | float,
    masks: Pair,
    keys: Pair,
    similarity: str,
) -> Inputs:
    """The inputs, ready for use. `similarity` is "module" for a module. Raises ValueError where they do not fit each other."""
    u, v = image_features, text_features
    _check_features(u, v, similarity)
    image_keys, text_keys = keys
    if image_keys is not None and text_keys is None:
        _require(
            len(u) == len(v), f"{len(v)} texts of {len(u)} images: the hard negatives among them need text_keys, too"
        )
        text_keys = image_keys
    _require(image_keys is not None or text_keys is None, "text_keys are given, but no image_keys to compare them with")
    given = [("image_keys", image_keys, torch.int64, u.shape[:1]), ("text_keys", text_keys, torch.int64, v.shape[:1])]
    given += [("image_mask", masks[0], torch.bool, u.shape[:2]), ("text_mask", masks[1], torch.bool, v.shape[:2])]
    for name, x, kind, shape in given:
        if x is not None:
            _require(kind != torch.bool or similarity == "late", f"{name} is only for similarity=late")
            _require(
                (x.dtype, x.shape, x.device) == (kind, shape, u.device),
                f"{name} must be {kind} of shape {tuple(shape)} on {u.device}, not {x.dtype} of {tuple(x.shape)} on {x.device}",
            )
    dtype = _feature_dtype(u, v)
    scale = _number("logit_scale", logit_scale, sum_dtype(dtype), u.device)
    bias = _number("logit_bias", logit_bias, sum_dtype(dtype), u.device)
    return Inputs(u, v, scale, bias, masks, (image_keys, text_keys), dtype)


def _check_features(u: Tensor, v: Tensor, similarity: str) -> None:
    for name, x in (("image_features", u), ("text_features", v)):
        _require(
            not isinstance(x, DTensor),
            f"{name} is a DTensor; pass this rank's own rows: x.full_tensor() if all hold the same",
        )
    shapes = f"image_features {tuple(u.shape)}, text_features {tuple(v.shape)}"
    _require(
        u.dtype in DTYPES and v.dtype in DTYPES, f"features must be floating-point numbers, not {u.dtype} and {v.dtype}"
    )
    _require(u.device == v.device, f"image_features are on {u.device}, but text_features on {v.device}")
    _require(u.dim() > 0 and v.dim() > 0 and u.numel() > 0 and v.numel() > 0, f"the batch is empty: {shapes}")
    if similarity in ("dot", "late"):
        dims = 2 if similarity == "dot" else 3
        _require(
            u.dim() == v.dim() == dims, f"similarity={similarity} takes features of {dims} dimensions, not {shapes}"
        )
        _require(u.shape[-1] == v.shape[-1], f"image and text features differ in width: {shapes}")
    _require(
        len(v) >= len(u),
        f"fewer texts than images: {shapes}; text i belongs to image i, texts beyond are hard negatives",
    )


def _feature_dtype(u: Tensor, v: Tensor) -> torch.dtype:
    """The narrower of the two types (float32 where neither contains the other); under autocast what matmul would take."""
    pair = {u.dtype, v.dtype}
    if pair == {torch.float16, torch.bfloat16}:
        return torch.float32
    narrow = max(pair, key=DTYPES.index)
    if narrow == torch.float32 and torch.is_autocast_enabled(u.device.type):
        return torch.get_autocast_dtype(u.device.type)
    return narrow


def _number(name: str, x: Tensor | float, dtype: torch.dtype, device: torch.device) -> Tensor:
    if not isinstance(x, Tensor):
        x = torch.tensor(x, dtype=dtype, device=device)
    _require(not isinstance(x, DTensor), f"{name} is a DTensor; pass x.full_tensor()")
    _require(x.numel() == 1, f"{name} must be a single number, not a tensor of shape {tuple(x.shape)}")
    return x.reshape(()).to(device=device, dtype=dtype)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
