"""clipscale: contrastive image-text pretraining at any batch size.

Its public names are loaded on first use, so that `import clipscale` is fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"
__all__ = ["ChunkOutput", "GradCache", "__version__", "contrastive_loss", "distillation_loss"]

if TYPE_CHECKING:
    from clipscale.loss.api import contrastive_loss, distillation_loss
    from clipscale.step.cache.encoder_io import ChunkOutput
    from clipscale.step.cache.grad_cache import GradCache

_HOME = dict.fromkeys(("contrastive_loss", "distillation_loss"), "clipscale.loss.api")
_HOME |= {"ChunkOutput": "clipscale.step.cache.encoder_io", "GradCache": "clipscale.step.cache.grad_cache"}


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'clipscale' has no attribute {name!r}")
