"""The tensors of one call: checked, with one type for the features, and described by numbers that the ranks compare.

Letters: n rows (images) and m columns (texts) of this rank, D feature width.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypedDict

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from clipscale.loss.block import sum_dtype
from clipscale.loss.machine import Machine
from clipscale.loss.objectives import EXCHANGES, SHARED

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
Pair = tuple[Tensor, Tensor]  # of the images and of the texts
Teacher = tuple[Tensor, Tensor, float]
"""Features of images and of texts, and the logit scale."""


class LossOptions(TypedDict, total=False):
    """The rarer keyword arguments of `contrastive_loss`, which describes them."""

    group: dist.ProcessGroup | DeviceMesh | None
    similarity: nn.Module | Literal["dot"] | None
    shared: str
    captions: int
    check: bool
    machine: Machine | None


@dataclass
class Arguments:
    """The tensors of one call, as the caller gives them."""

    image_features: Tensor
    text_features: Tensor
    logit_scale: Tensor | float
    logit_bias: Tensor | float | None = None
    keys: Tensor | Pair | None = None
    teachers: Sequence[Teacher] = ()


@dataclass
class Inputs:
    """The tensors of one call: images as rows and texts as columns."""

    rows: Tensor
    cols: Tensor
    scale: Tensor  # 0-d, in sum_dtype
    bias: Tensor
    dtype: torch.dtype  # what the features are cast to
    captions: int = 1  # of an image: text i + c n is the c-th of image i; then come the hard negatives
    beside: tuple[dict[str, Tensor], dict[str, Tensor]] = field(default_factory=lambda: ({}, {}))
    """What a row and a column have beside features, by the names of RowBlock's fields."""

    def facts(self, objective: int, exchange: str, shared: str) -> list[int]:
        """The FACTS of this rank."""
        rows, _ = self.beside
        trained = [torch.is_grad_enabled() and x.requires_grad for x in (self.rows, self.cols, self.scale, self.bias)]
        gradients = sum(2**i for i, is_trained in enumerate(trained) if is_trained)
        sizes = [len(self.rows), len(self.cols), self.rows[0].numel(), self.cols[0].numel()]
        width = rows["teachers"].shape[1] if "teachers" in rows else 0
        choices = [objective, EXCHANGES.index(exchange), SHARED.index(shared)]
        return [*sizes, DTYPES.index(self.dtype), width, int("keys" in rows), gradients, *choices, self.captions]

    def positives_only(self) -> "Inputs":
        """Without the hard negatives among the texts."""
        paired = len(self.rows) * self.captions
        rows, cols = self.beside
        return replace(self, cols=self.cols[:paired], beside=(rows, {name: x[:paired] for name, x in cols.items()}))

    def swapped(self) -> "Inputs":
        """The texts as rows, without the hard negatives, and the images as columns."""
        texts = self.positives_only()
        rows, cols = texts.beside
        return replace(texts, rows=texts.cols, cols=texts.rows, beside=(cols, rows))

    def padded(self, step: int) -> "Inputs":
        """With zeros up to a width that is a multiple of `step`."""
        missing = -self.rows.shape[-1] % step
        if missing == 0:
            return self
        return replace(self, rows=F.pad(self.rows, (0, missing)), cols=F.pad(self.cols, (0, missing)))


def checked_inputs(arguments: Arguments, captions: int, has_module: bool, check: bool) -> Inputs:
    """The inputs, ready for use: captions of an image apart, so that its first is its pair, then the second ones.

    Raises ValueError where they do not fit. `check`: also for a scale that is not positive.
    """
    u, v = arguments.image_features, arguments.text_features
    bias = 0.0 if arguments.logit_bias is None else arguments.logit_bias
    if any(isinstance(x, DTensor) for x in (u, v, arguments.logit_scale, bias)):
        raise ValueError("a DTensor; pass this rank's own rows and plain numbers: x.full_tensor() if all hold the same")
    _check_features(u, v, captions, has_module)
    paired = captions * len(u)
    if captions > 1:
        first = v[:paired].unflatten(0, (-1, captions)).transpose(0, 1).flatten(0, 1)
        v = torch.cat([first, v[paired:]]) if len(v) > paired else first
    rows: dict[str, Tensor] = {}
    cols: dict[str, Tensor] = {}
    if arguments.keys is not None:
        rows["keys"], cols["keys"] = _checked_keys(arguments.keys, u, v, captions)
    dtype = _feature_dtype(u, v)
    if arguments.teachers:
        rows["teachers"], cols["teachers"] = _side_by_side(arguments.teachers, u, v, dtype)
    scale, bias = (_number(x, sum_dtype(dtype), u.device) for x in (arguments.logit_scale, bias))
    if check and not bool(scale > 0) and bool(scale.isfinite()):
        raise ValueError(
            f"logit_scale is {float(scale):g} and must be positive: it is the multiplier itself, not its logarithm "
            "(pass log_scale.exp())"
        )
    return Inputs(u, v, scale, bias, dtype, captions, (rows, cols))


def _check_features(u: Tensor, v: Tensor, captions: int, has_module: bool) -> None:
    """Raise ValueError for features that are no numbers, or do not fit each other."""
    shapes = f"image_features {tuple(u.shape)}, text_features {tuple(v.shape)}"
    _require(
        u.dtype in DTYPES and v.dtype in DTYPES, f"features must be floating-point numbers, not {u.dtype} and {v.dtype}"
    )
    _require(u.device == v.device, f"image_features are on {u.device}, but text_features on {v.device}")
    _require(u.numel() > 0 and v.numel() > 0, f"the batch is empty: {shapes}")
    if not has_module:
        _require(u.dim() == v.dim() == 2, f"the dot product takes features of 2 dimensions, not {shapes}")
        _require(u.shape[-1] == v.shape[-1], f"image and text features differ in width: {shapes}")
    _require(
        captions >= 1 and len(v) >= captions * len(u),
        f"fewer texts than images: {shapes}, captions={captions}; text j belongs to image j // captions, texts beyond "
        "are hard negatives",
    )


def _checked_keys(keys: Tensor | Pair, u: Tensor, v: Tensor, captions: int) -> Pair:
    """The keys of all images and texts; an own text's is its image's. Raises ValueError where they do not fit."""
    pair = (keys, keys) if isinstance(keys, Tensor) else keys
    _require(all(x is not None for x in pair), "keys of one side alone have nothing to be compared with")
    images = pair[0]
    texts = torch.cat([images.repeat(captions), pair[1][captions * len(u) :]])
    for x, features in ((images, u), (texts, v)):
        _require(
            (x.dtype, x.shape, x.device) == (torch.int64, features.shape[:1], u.device),
            f"keys must be torch.int64 on {u.device}, of shapes {tuple(u.shape[:1])} and {tuple(v.shape[:1])}",
        )
    return images, texts


def _side_by_side(teachers: Sequence[Teacher], u: Tensor, v: Tensor, dtype: torch.dtype) -> Pair:
    """The teachers' images and texts, in one type. Raises ValueError where they do not fit."""
    n, m = len(u), len(v)
    for a, b, _ in teachers:
        if a.shape != (n, b.shape[-1]) or b.shape != (m, a.shape[-1]) or a.device != u.device:
            raise ValueError(f"a teacher's features {tuple(a.shape)} and {tuple(b.shape)} for {n} images and {m} texts")
    images = torch.cat([a for a, _, _ in teachers], 1)
    texts = torch.cat([b for _, b, _ in teachers], 1)
    wide = torch.float64 if dtype == torch.float64 else torch.promote_types(images.dtype, texts.dtype)
    return images.to(wide), texts.to(wide)


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
