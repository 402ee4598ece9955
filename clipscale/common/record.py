"""The type of plain nested values."""

from typing import Any

Record = dict[str, Any]
"""Values by name, as JSON and YAML hold them."""
