"""Number formats of a run: what autocast computes in, and whether losses are scaled."""

from dataclasses import dataclass


@dataclass
class PrecisionConfig:
    """Precision of the encoders' arithmetic; weights stay in float32."""

    name: str = "fp32"
    """`fp32`, `bf16` (autocast) or `fp16` (autocast with a gradient scaler)."""
    tf32: bool = True
    """Allow TF32 in float32 matrix products on GPUs that have it."""
