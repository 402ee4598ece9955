"""Predicts the memory and time of a run before it starts, without a GPU."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import cast

from clipscale.common import files
from clipscale.config.sections import ModelConfig

# The figures of assumed.yaml.
ASSUMED = SimpleNamespace(**files.read_yaml(Path(__file__).with_name("assumed.yaml")))


def without_unused(model: ModelConfig) -> None:
    """Let open_clip and timm, which are not imported yet, find no library that they would import and a plan of this
    model does not need: they take two seconds. A module that is None is not found (Python's language reference, 5.3.1).
    """
    description = str(model.description or "hf_model_name")
    if "hf_model_name" not in description and "open_clip" not in sys.modules:
        sys.modules.setdefault("transformers", cast(ModuleType, None))
