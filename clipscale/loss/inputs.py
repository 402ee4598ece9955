"""The tensors of one call: checked, with one type for the features, and described by numbers that the ranks compare.

Letters: n rows (images) and m columns (texts) of this rank, D feature width.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from clipscale.config.sections import EXCHANGES, OBJECTIVES, SHARED
from clipscale.loss.block import sum_dtype

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # from wide to narrow
FACTS = (
    "number of images",
    "number of texts",
    "size of an image's features",
    "size of a text's features",
    "feature type",
    "width of all teachers' features",
    "choice of keys",
    "choice of tensors that need a gradient",
    "objective",
    "exchange",
    "treatment of equal keys",
    "number of captions",
)
"""What must be the same on all ranks: sizes for the transfers, the rest for their order."""
Pair = tuple[Tensor | None, Tensor | None]  # of the images and of the texts


@dataclass
class Inputs:
    """The tensors of one call: images as rows and texts as columns."""

    rows: Tensor
    cols: Tensor
    scale: Tensor  # 0-d, in sum_dtype
    bias: Tensor
    keys: Pair
    dtype: torch.dtype  # what the features are cast to
    captions: int = 1  # of an image: text i + c n is the c-th of image i; then come the hard negatives
    owners: Pair = (None, None)
    shares: Pair = (None, None)
    teachers: Pair = (None, None)

    def facts(self, objective: str, exchange: str, shared: str) -> list[int]:
        """The FACTS of this rank."""
        given = [x is not None for x in self.keys]
        trained = [torch.is_grad_enabled() and x.requires_grad for x in (self.rows, self.cols, self.scale, self.bias)]
        choices = [sum(2**i for i, chosen in enumerate(flags) if chosen) for flags in (given, trained)]
        sizes = [len(self.rows), len(self.cols), self.rows[0].numel(), self.cols[0].numel()]
        widths = [0 if self.teachers[0] is None else self.teachers[0].shape[1]]
        words = OBJECTIVES.index(objective), EXCHANGES.index(exchange), SHARED.index(shared)
        return [*sizes, DTYPES.index(self.dtype), *widths, *choices, *words, self.captions]

    def positives_only(self) -> "Inputs":
        """Without the hard negatives among the texts."""
        n = len(self.rows) * self.captions
        pairs: dict[str, Any] = {
            name: (row, None if col is None else col[:n]) for name, (row, col) in self.pairs().items()
        }
        return replace(self, cols=self.cols[:n], **pairs)

    def swapped(self) -> "Inputs":
        """The texts as rows, without the hard negatives, and the images as columns."""
        texts = self.positives_only()
        pairs = {name: pair[::-1] for name, pair in texts.pairs().items()}
        return replace(texts, rows=texts.cols, cols=texts.rows, **pairs)

    def pairs(self) -> dict[str, Any]:
        """What each row and each column has beside its features, by name."""
        return {name: getattr(self, name) for name in ("keys", "owners", "shares", "teachers")}


def checked_inputs(
    image_features: Tensor, text_features: Tensor, logit_scale: Tensor | float, logit_bias: Tensor | float,
    similarity: str, *, keys: Tensor | Pair | None, captions: int, check: bool,
) -> Inputs:  # fmt: skip
    """The inputs, ready for use. `similarity` is "module" for a module. Raises ValueError where they do not fit."""
    u, v = image_features, text_features
    if any(isinstance(x, DTensor) for x in (u, v, logit_scale, logit_bias)):
        raise ValueError("a DTensor; pass this rank's own rows and plain numbers: x.full_tensor() if all hold the same")
    shapes = f"image_features {tuple(u.shape)}, text_features {tuple(v.shape)}"
    _require(
        u.dtype in DTYPES and v.dtype in DTYPES, f"features must be floating-point numbers, not {u.dtype} and {v.dtype}"
    )
    _require(u.device == v.device, f"image_features are on {u.device}, but text_features on {v.device}")
    _require(u.numel() > 0 and v.numel() > 0, f"the batch is empty: {shapes}")
    if similarity != "module":
        _require(u.dim() == v.dim() == 2, f"similarity=dot takes features of 2 dimensions, not {shapes}")
        _require(u.shape[-1] == v.shape[-1], f"image and text features differ in width: {shapes}")
    _require(
        captions >= 1 and len(v) >= captions * len(u),
        f"fewer texts than images: {shapes}, captions={captions}; text j belongs to image j // captions, texts beyond "
        "are hard negatives",
    )
    keys = (keys, keys) if isinstance(keys, Tensor) else keys or (None, None)
    _require((keys[0] is None) == (keys[1] is None), "keys of one side alone have nothing to be compared with")
    own = captions * len(u)
    if captions > 1:
        first = v[:own].unflatten(0, (-1, captions)).transpose(0, 1).flatten(0, 1)
        v = torch.cat([first, v[own:]]) if len(v) > own else first
    if keys[0] is not None and keys[1] is not None:
        keys = keys[0], torch.cat([keys[0].repeat(captions), keys[1][own:]])
    for x, features in zip(keys, (u, v)):
        _require(
            x is None or (x.dtype, x.shape, x.device) == (torch.int64, features.shape[:1], u.device),
            f"keys must be torch.int64 on {u.device}, of shapes {tuple(u.shape[:1])} and {tuple(v.shape[:1])}",
        )
    dtype = _feature_dtype(u, v)
    scale, bias = (_number(x, sum_dtype(dtype), u.device) for x in (logit_scale, logit_bias))
    if check and not bool(scale > 0) and bool(scale.isfinite()):
        raise ValueError(
            f"logit_scale is {float(scale):g} and must be positive: it is the multiplier itself, not its logarithm "
            "(pass log_scale.exp())"
        )
    return Inputs(u, v, scale, bias, keys, dtype, captions)


def _feature_dtype(u: Tensor, v: Tensor) -> torch.dtype:
    """The narrower type (float32 where neither contains the other); under autocast what matmul would take."""
    pair = {u.dtype, v.dtype}
    if pair == {torch.float16, torch.bfloat16}:
        return torch.float32
    narrow = max(pair, key=DTYPES.index)
    if narrow == torch.float32 and torch.is_autocast_enabled(u.device.type):
        return torch.get_autocast_dtype(u.device.type)
    return narrow


def _number(x: Tensor | float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """x, of one element, as a 0-d tensor."""
    if not isinstance(x, Tensor):
        x = torch.tensor(x, dtype=dtype, device=device)
    _require(x.numel() == 1, f"logit_scale and logit_bias are single numbers, not tensors of shape {tuple(x.shape)}")
    return x.reshape(()).to(device=device, dtype=dtype)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
