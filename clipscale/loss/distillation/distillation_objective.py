"""Distillation: a softmax whose targets are teachers' probabilities, beside or instead of the pairs.

MobileCLIP; Vasu et al. 2023, arXiv 2311.17049 (open_clip's DistillClipLoss). The teachers' log-sum-exps come first, by
sweeps over their own features. Each tile then computes its teachers' scores again: nothing is N x M.

Letters: n images and m = n texts of this rank, K teachers, D_k feature width of a teacher.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from clipscale.loss.autograd import LossCall, forward_sweep
from clipscale.loss.block import BlockSide, LossParameters, sum_dtype
from clipscale.loss.distillation.tile import DistillationTileOps, TeacherSpec
from clipscale.loss.exchange import Exchange
from clipscale.loss.inputs import Inputs
from clipscale.loss.objective import Objective, Softmax
from clipscale.loss.precision import matmul_precision
from clipscale.loss.runtime import LossRuntime
from clipscale.loss.similarity import DotProduct
from clipscale.loss.torch_backend import TorchBackend

# Features of images (n, D_k) and of texts (m, D_k), and the logit scale: the multiplier itself.
Teacher = tuple[Tensor, Tensor, float]


@dataclass(frozen=True)
class Distillation(Objective):
    """Cross-entropy to the mean of K teachers' probabilities, and to the pairs.

        L = sum_i a_i (r_i - sum_j P_ij x_ij) + sum_j b_j (c_j - sum_i Q_ij x_ij)

    P_ij = w * mean over teachers of softmax_j(y) + (1 - w) [i = j], and Q is the same with softmax_i. w is
    `teacher_share`. A teacher's scores are y = t <its feature of image i, its feature of text j>. r and c are the
    log-sum-exps of rows and columns, a and b are `direction_weights` / N.
    """

    direction_weights: tuple[float | None, float | None] = (0.5, 0.5)
    is_pairwise: bool = False
    function_name: str = "distillation_loss"
    teachers: tuple[TeacherSpec, ...] = ()
    # The teachers' share of the targets. The rest is the pairs'.
    teacher_share: float = 1.0

    def prepare(self, inputs: Inputs, exchange: Exchange, runtime: LossRuntime) -> Inputs:
        return add_teacher_lses(inputs, self.teachers, exchange, runtime)

    def target_inputs_by_name(self, inputs: Inputs) -> dict[str, Tensor]:
        widths = [teacher.width for teacher in self.teachers]
        targets: dict[str, Tensor] = {}
        for side, features in (("image", inputs.rows.teacher_features), ("text", inputs.cols.teacher_features)):
            assert features is not None
            targets |= {f"teachers[{k}]'s {side} features": x for k, x in enumerate(features.split(widths, 1))}
        return targets | {f"teachers[{k}]'s scale": torch.tensor(t.scale) for k, t in enumerate(self.teachers)}

    def make_tile_ops(self) -> DistillationTileOps:
        return DistillationTileOps(self.teachers, self.teacher_share)


def add_teachers(inputs: Inputs, teachers: Sequence[Teacher]) -> Inputs:
    """The inputs with the teachers' features, in one type. Raises ValueError where they do not fit."""
    n = len(inputs.rows)
    m = len(inputs.cols)
    if any(len(teacher) != 3 for teacher in teachers):
        raise ValueError("a teacher is its image features, its text features and its logit scale")
    for a, b, _ in teachers:
        if a.shape != (n, b.shape[-1]) or b.shape != (m, a.shape[-1]) or a.device != inputs.scale.device:
            raise ValueError(f"a teacher's features {tuple(a.shape)} and {tuple(b.shape)} for {n} images and {m} texts")
    # Autocast to bf16 has no cat of float16, the type in which `embed` writes features.
    with torch.autocast(inputs.scale.device.type, enabled=False):
        images = torch.cat([a for a, _, _ in teachers], 1).detach()
        texts = torch.cat([b for _, b, _ in teachers], 1).detach()
    if inputs.dtype == torch.float64:
        dtype = torch.float64
    else:
        dtype = torch.promote_types(images.dtype, texts.dtype)
    return replace(
        inputs,
        rows=replace(inputs.rows, teacher_features=images.to(dtype)),
        cols=replace(inputs.cols, teacher_features=texts.to(dtype)),
    )


@torch.no_grad()
def add_teacher_lses(
    inputs: Inputs, teachers: Sequence[TeacherSpec], exchange: Exchange, runtime: LossRuntime
) -> Inputs:
    """A collective: the inputs with the log-sum-exps of each teacher's scores over rows and columns, (n, K) float64."""
    assert inputs.rows.teacher_features is not None and inputs.cols.teacher_features is not None
    widths = [teacher.width for teacher in teachers]
    images_by_teacher = inputs.rows.teacher_features.split(widths, 1)
    texts_by_teacher = inputs.cols.teacher_features.split(widths, 1)
    softmax = Softmax((0.5, 0.5))
    backend = TorchBackend(softmax.make_tile_ops(), DotProduct(), runtime, is_dense=False)
    row_lses = []
    col_lses = []
    for images, texts, teacher in zip(images_by_teacher, texts_by_teacher, teachers, strict=True):
        teacher_inputs = replace(
            inputs,
            rows=BlockSide(images, inputs.rows.keys),
            cols=BlockSide(texts, inputs.cols.keys),
            dtype=images.dtype,
        )
        call = LossCall(exchange, backend, DotProduct(), softmax, teacher_inputs, check=False, needs_backward=False)
        rows, cols = call.local_sides(images, texts)
        teacher_scale = torch.tensor(teacher.scale, dtype=sum_dtype(images.dtype), device=images.device)
        with matmul_precision(teacher_inputs, DotProduct()):
            forward_sweep(call, rows, cols, LossParameters(teacher_scale, torch.zeros_like(teacher_scale)))
        assert rows.lse is not None and cols.lse is not None
        row_lses.append(rows.lse)
        col_lses.append(cols.lse)
    return replace(
        inputs,
        rows=replace(inputs.rows, teacher_lse=torch.stack(row_lses, 1)),
        cols=replace(inputs.cols, teacher_lse=torch.stack(col_lses, 1)),
    )
