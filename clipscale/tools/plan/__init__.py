"""Predicts the memory and time of a run before it starts, without a GPU."""

from pathlib import Path
from types import SimpleNamespace

from clipscale.common import files

# The figures of assumed.yaml.
ASSUMED = SimpleNamespace(**files.read_yaml(Path(__file__).with_name("assumed.yaml")))
