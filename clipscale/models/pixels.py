"""How pictures are prepared for weights: the settings `mean`, `std`, `resize` and `interpolation`, by what comes with the weights."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.config.parse import typed
from clipscale.config.sections import ModelConfig

PIXELS = ("mean", "std", "interpolation", "resize")
_HALF = (0.5, 0.5, 0.5)


def of_open_clip(found: dict[str, Any]) -> dict[str, Any]:
    """open_clip's description of the pictures' preparation, as settings of the model. Raises UserError for values that they cannot have."""
    values = found | {"resize": found.get("resize_mode", "shortest")}
    return _checked({key: values[key] for key in PIXELS if key in values})


def of_transformers(folder: Path, kind: str) -> dict[str, Any]:
    """transformers' description in a folder. `kind`: of CLIP and SigLIP; "" for a tower alone, of which it is mean and deviation."""
    file = folder / "preprocessor_config.json"
    found = files.read_json(file) if file.is_file() else {}
    found = found.get("image_processor", found)
    values: dict[str, Any] = {}
    if kind:
        values = {"resize": "squash" if kind == "siglip" else "shortest", "interpolation": "bicubic"}
    if found.get("resample") == 2 and kind:
        values["interpolation"] = "bilinear"
    for name, key in (("image_mean", "mean"), ("image_std", "std")):
        if name in found or kind == "siglip":
            values[key] = tuple(found.get(name) or _HALF)
    return _checked(values)


def of_timm(found: dict[str, Any]) -> dict[str, Any]:
    """timm's description of a tower alone: mean and deviation."""
    return _checked({key: found[key] for key in ("mean", "std") if key in found})


def _checked(values: dict[str, Any]) -> dict[str, Any]:
    """Settings of the model, with their types. Raises UserError."""
    made = typed(ModelConfig, values)
    return {key: getattr(made, key) for key in values}


def filled(config: ModelConfig, known: Mapping[str, Any]) -> ModelConfig:
    """The settings with the known values in place of defaults. Settings that differ from their defaults stay."""
    default = ModelConfig()
    return replace(config, **{k: value for k, value in known.items() if getattr(config, k) == getattr(default, k)})


def check_agreement(config: ModelConfig, known: Mapping[str, Any], what: str) -> None:
    """Raise UserError for a mean or deviation of the settings that is neither the default nor the known one, which `what` says."""
    default = ModelConfig()
    for key in ("mean", "std"):
        ours = tuple(getattr(config, key))
        if key in known and ours not in (tuple(known[key]), getattr(default, key)):
            raise UserError(
                f"model.{key}={list(ours)}: {what} with {list(known[key])}; leave model.{key} unset, which takes these"
            )
