"""How weights want their pictures prepared: `mean`, `std`, `resize` and `interpolation` of the model's settings."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from clipscale.config.parse import typed
from clipscale.config.sections import ModelConfig

PIXELS = ("mean", "std", "interpolation", "resize")


def of_open_clip(preprocess: dict[str, Any]) -> dict[str, Any]:
    """open_clip's description as settings. Raises UserError for values that they cannot have."""
    return checked(preprocess | {"resize": preprocess.get("resize_mode", "shortest")})


def of_transformers(folder: Path, kind: str) -> dict[str, Any]:
    """transformers' in a folder, as settings. `kind`: clip or siglip; "": a tower alone, of mean and deviation."""
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
    return checked(values)


def checked(values: dict[str, Any]) -> dict[str, Any]:
    """Of these values the settings of pictures, with their types. Raises UserError."""
    known = {key: values[key] for key in PIXELS if key in values}
    settings = typed(ModelConfig, known)
    return {key: getattr(settings, key) for key in known}


def filled(config: ModelConfig, known: Mapping[str, Any]) -> ModelConfig:
    """The settings with the known values in place of defaults. Settings that differ from their defaults stay."""
    default = ModelConfig()
    return replace(config, **{k: value for k, value in known.items() if getattr(config, k) == getattr(default, k)})
