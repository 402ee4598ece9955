"""The precision in which a call of the loss multiplies matrices."""

import contextlib
from collections.abc import Iterator

import torch

from clipscale.loss.inputs import Inputs
from clipscale.loss.similarity import Similarity


@contextlib.contextmanager
def matmul_precision(inputs: Inputs, similarity: Similarity) -> Iterator[None]:
    """In this context, autocast is off, since features are cast already, and float32 matmuls have IEEE precision on
    CUDA."""
    device = inputs.scale.device
    matmuls: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    # A module keeps the caller's setting.
    if device.type == "cuda" and similarity.is_dot_product:
        matmuls = float32_matmuls("tf32" if takes_half_precision(inputs) else "ieee")
    with torch.autocast(device.type, enabled=False), matmuls:
        yield


def takes_half_precision(inputs: Inputs) -> bool:
    """Whether all features, the teachers' too, are in half precision. Their products are then exact in TF32."""
    teacher_features = inputs.rows.teacher_features
    has_float32_teacher = teacher_features is not None and teacher_features.itemsize > 2
    return inputs.dtype.itemsize == 2 and not has_float32_teacher


@contextlib.contextmanager
def float32_matmuls(precision: str) -> Iterator[None]:
    """In this context, matmuls of float32 on CUDA have this precision, "ieee" or "tf32".

    `allow_tf32` sets torch's old and new interface alike. After the new one alone, reading the old one raises, as
    Inductor does.
    """
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    if before == precision:
        yield
        return
    matmul.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        matmul.allow_tf32 = before == "tf32"
        matmul.fp32_precision = before
