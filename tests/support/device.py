"""Where the tests marked gpu run: on a CUDA device, or, to see that the tests are right, on the CPU at smaller sizes.

pytest -m gpu                                                        on a machine with a CUDA device
CLIPSCALE_TEST_DEVICE=cpu TRITON_INTERPRET=1 pytest -m gpu tests     anywhere; what only a device has is skipped
"""

import importlib.metadata
import os

import pytest
import torch

DEVICE = os.environ.get("CLIPSCALE_TEST_DEVICE", "cuda")
CUDA = DEVICE == "cuda"
VERSIONS = [tuple(map(int, importlib.metadata.version(name).split(".")[:2])) for name in ("triton", "numpy")]
# Triton 3.6 and older make scalars of arrays of one element, which numpy 2.5 refuses.
NO_INTERPRETER = VERSIONS[0] <= (3, 6) and VERSIONS[1] >= (2, 5)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and not NO_INTERPRETER
# Whether the Triton kernels can run.
KERNELS = CUDA or INTERPRETED
# Divisor of all problem sizes.
SMALLER = 1 if CUDA else 16

on_device = [
    pytest.mark.gpu,
    pytest.mark.skipif(CUDA and not torch.cuda.is_available(), reason="no CUDA device"),
]
only_on_cuda = pytest.mark.skipif(not CUDA, reason="only a CUDA device has this")
with_kernels = pytest.mark.skipif(not KERNELS, reason="needs a CUDA device or Triton's interpreter")


def sized(*sizes: int, smaller: int = SMALLER) -> tuple[int, ...]:
    """Problem sizes: unchanged on a CUDA device, smaller elsewhere. Ragged sizes stay ragged."""
    return sizes if CUDA else tuple(max(3, size // smaller + size % 2) for size in sizes)
