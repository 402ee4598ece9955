"""The type of plain nested values."""

from typing import Any

Record = dict[str, Any]
"""Values by name, as JSON and YAML hold them."""
Metrics = dict[str, float]
"""Metrics of an evaluation set: shares in [0, 1], counts and losses; `main` is the set's main metric in its suite."""
Results = dict[str, Metrics]
"""Metrics by the name of the set."""
