"""Checks the tensors of one call, gives the features one type, and describes them in numbers that the ranks compare.

Letters: n rows (images) and m columns (texts) of this rank, k captions of an image, D feature width.
"""

from dataclasses import dataclass, replace
from numbers import Integral

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from clipscale.loss.block import BlockSide, PositiveLayout, sum_dtype
from clipscale.loss.communicator import AllGatherRows, Communicator

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # from wide to narrow


@dataclass
class Inputs:
    """The tensors of one call: images as rows and texts as columns."""

    rows: BlockSide
    cols: BlockSide
    scale: Tensor  # 0-d, in sum_dtype
    bias: Tensor
    dtype: torch.dtype  # to which the features are cast
    # The columns are the first captions of all images, then their second ones, and so on; then hard negatives.
    positive_layout: PositiveLayout

    @property
    def is_paired(self) -> bool:
        """Whether each image has one text, and there are no others."""
        return len(self.rows) == len(self.cols)

    def facts_to_compare(self) -> dict[str, int]:
        """Sizes and types that must be the same on all ranks: otherwise their transfers of features would not match."""
        u = self.rows.features
        v = self.cols.features
        teacher_features = self.rows.teacher_features
        return {
            "number of images": len(u),
            "number of texts": len(v),
            "size of an image's features": u[0].numel(),
            "size of a text's features": v[0].numel(),
            "feature type": DTYPES.index(self.dtype),
            "number of captions of an image": self.positive_layout.captions_per_image,
            "number of keys": 0 if self.rows.keys is None else len(self.rows.keys),
            "width of all teachers' features": 0 if teacher_features is None else teacher_features.shape[1],
        }

    def pad_features(self, step: int) -> "Inputs":
        """The features padded with zeros to a width that is a multiple of `step`."""
        missing = -self.rows.features.shape[-1] % step
        if missing == 0:
            return self
        rows = replace(self.rows, features=F.pad(self.rows.features, (0, missing)))
        cols = replace(self.cols, features=F.pad(self.cols.features, (0, missing)))
        return replace(self, rows=rows, cols=cols)

    def without_hard_negatives(self) -> "Inputs":
        """Without the texts that belong to no image."""
        paired = len(self.rows) * self.positive_layout.captions_per_image
        return replace(self, cols=self.cols[:paired])

    def gather_over_ranks(self, comm: Communicator) -> "Inputs":
        """A collective: all ranks' rows and columns. Each rank gets 1/P of the scale's and the bias's gradients."""
        return replace(
            self,
            rows=_gather_with_grad(self.rows, comm),
            cols=_gather_with_grad(self.cols, comm),
            scale=_share_gradient(self.scale, comm.size),
            bias=_share_gradient(self.bias, comm.size),
        )


def _gather_with_grad(side: BlockSide, comm: Communicator) -> BlockSide:
    """A collective: this side of all ranks as one. The gradient of this rank's rows flows back to them."""
    return BlockSide(**{name: AllGatherRows.apply(x, comm) for name, x in side.tensors().items()})


def _share_gradient(x: Tensor, world_size: int) -> Tensor:
    """x. Its gradient is divided by the number of ranks."""
    return x.detach() + (x - x.detach()) / world_size


def make_inputs(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: Tensor | float,
    logit_bias: Tensor | float | None,
    keys: Tensor | None,
    *,
    captions_per_image: int,
    has_module: bool,
    check: bool,
) -> Inputs:
    """The inputs, ready for use. Texts are reordered: first captions of all images, then their second ones, and so on.

    Raises ValueError if they do not fit each other; with `check` also for a scale that is not positive.
    """
    u = image_features
    v = text_features
    if logit_bias is None:
        logit_bias = 0.0
    if any(isinstance(x, DTensor) for x in (u, v, logit_scale, logit_bias)):
        raise ValueError("a DTensor; pass this rank's own rows and plain numbers: x.full_tensor() if all hold the same")
    given = {"image_features": u, "text_features": v, **({} if keys is None else {"keys": keys})}
    for name, value in given.items():
        _require(isinstance(value, Tensor), f"{name} must be a tensor, not a {type(value).__name__}")
    _check_features(u, v, captions_per_image, has_module)
    paired = captions_per_image * len(u)
    if captions_per_image > 1:
        by_number = v[:paired].unflatten(0, (-1, captions_per_image)).transpose(0, 1).flatten(0, 1)
        v = torch.cat([by_number, v[paired:]])
    if keys is not None:
        _require(len(v) == paired, "keys go with an image's own texts, and there are hard negatives")
        _require(
            (keys.dtype, keys.shape, keys.device) == (torch.int64, u.shape[:1], u.device),
            f"keys must be torch.int64 on {u.device}, of shape {tuple(u.shape[:1])}",
        )
    dtype = _feature_dtype(u, v)
    scale = _to_scalar(logit_scale, sum_dtype(dtype), u.device)
    bias = _to_scalar(logit_bias, sum_dtype(dtype), u.device)
    if check and _is_not_positive(scale):
        raise ValueError(
            f"logit_scale is {float(scale):g} and must be positive: it is the multiplier itself, not its logarithm "
            "(pass log_scale.exp())"
        )
    text_keys = None if keys is None else keys.repeat(captions_per_image)
    layout = PositiveLayout(captions_per_image, stride=len(u))
    return Inputs(BlockSide(u, keys), BlockSide(v, text_keys), scale, bias, dtype, layout)


def _check_features(u: Tensor, v: Tensor, captions_per_image: int, has_module: bool) -> None:
    """Raise ValueError for features that are not floating-point, or do not fit each other."""
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
        isinstance(captions_per_image, Integral) and captions_per_image >= 1,
        f"captions={captions_per_image!r}: give the number of an image's texts, 1 or more",
    )
    _require(
        len(v) >= captions_per_image * len(u),
        f"fewer texts than images: {shapes}, captions={captions_per_image}; text j belongs to image j // captions, "
        "texts beyond are hard negatives",
    )


def _feature_dtype(u: Tensor, v: Tensor) -> torch.dtype:
    """The narrower of two types, or float32 if neither contains the other; under autocast the type matmul would use."""
    pair = {u.dtype, v.dtype}
    if pair == {torch.float16, torch.bfloat16}:
        return torch.float32
    narrow = max(pair, key=DTYPES.index)
    if narrow == torch.float32 and torch.is_autocast_enabled(u.device.type):
        return torch.get_autocast_dtype(u.device.type)
    return narrow


def _is_not_positive(scale: Tensor) -> bool:
    """Whether the scale is 0 or less. False for NaN, which the check of the loss's value names. Waits for the GPU."""
    return not bool(scale > 0) and bool(scale.isfinite())


def _to_scalar(x: Tensor | float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """x, of one element, as a 0-d tensor."""
    if not isinstance(x, Tensor):
        x = torch.tensor(x, dtype=dtype, device=device)
    _require(x.numel() == 1, f"logit_scale and logit_bias are single numbers, not tensors of shape {tuple(x.shape)}")
    return x.reshape(()).to(device=device, dtype=dtype)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
