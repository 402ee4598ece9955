"""Predicts the memory and time of a run before it starts, without a GPU."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import cast

from clipscale.common import files
from clipscale.config.sections import ModelConfig

# The figures of assumed.yaml.
ASSUMED = SimpleNamespace(**files.read_yaml(Path(__file__).with_name("assumed.yaml")))


@contextmanager
def without_unused(model: ModelConfig) -> Iterator[None]:
    """Inside, open_clip finds no transformers when it is imported, unless a plan of this model needs it: it takes two
    seconds. A module that is None is not found (Python's language reference, 5.3.1).
    """
    description = str(model.description or "hf_model_name")
    hidden = "hf_model_name" not in description and not {"open_clip", "transformers"} & sys.modules.keys()
    if hidden:
        sys.modules["transformers"] = cast(ModuleType, None)
    try:
        yield
    finally:
        if hidden:
            del sys.modules["transformers"]
