"""Predicts the memory and time of a run before it starts, without a GPU."""

from pathlib import Path
from types import SimpleNamespace

import yaml

ASSUMED = SimpleNamespace(**yaml.safe_load(Path(__file__).with_name("assumed.yaml").read_text(encoding="utf-8")))
"""The figures of assumed.yaml."""
