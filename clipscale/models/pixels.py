"""How pictures are prepared for weights: the settings `mean`, `std`, `resize` and `interpolation`, by what comes with
the weights.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from clipscale.config.parse import typed
from clipscale.config.sections import ModelConfig

PIXELS = ("mean", "std", "interpolation", "resize")


def of_open_clip(preprocess: dict[str, Any]) -> dict[str, Any]:
    """open_clip's description of the pictures' preparation, as settings of the model. Raises UserError for values that
    they cannot have.
    """
    values = preprocess | {"resize": preprocess.get("resize_mode", "shortest")}
    return _checked({key: values[key] for key in PIXELS if key in values})


def of_transformers(folder: Path, kind: str) -> dict[str, Any]:
    """transformers' description in a folder. `kind`: clip or siglip; "" for a tower alone, of which it is mean and
    deviation.
    """
    file = folder / "preprocessor_config.json"
    processor = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    processor = processor.get("image_processor", processor)
    values: dict[str, Any] = {}
    if kind:
        interpolation = "bilinear" if processor.get("resample") == 2 else "bicubic"
        values = {"resize": "squash" if kind == "siglip" else "shortest", "interpolation": interpolation}
    for name, key in (("image_mean", "mean"), ("image_std", "std")):
        if name in processor or kind == "siglip":
            values[key] = tuple(processor.get(name) or (0.5, 0.5, 0.5))
    return _checked(values)


def of_timm(pretrained: dict[str, Any]) -> dict[str, Any]:
    """timm's description of a tower alone: mean and deviation."""
    return _checked({key: pretrained[key] for key in ("mean", "std") if key in pretrained})


def _checked(values: dict[str, Any]) -> dict[str, Any]:
    """Settings of the model, with their types. Raises UserError."""
    settings = typed(ModelConfig, values)
    return {key: getattr(settings, key) for key in values}


def filled(config: ModelConfig, known: Mapping[str, Any]) -> ModelConfig:
    """The settings with the known values in place of defaults. Settings that differ from their defaults stay."""
    default = ModelConfig()
    return replace(config, **{k: value for k, value in known.items() if getattr(config, k) == getattr(default, k)})
