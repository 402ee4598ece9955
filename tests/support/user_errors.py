"""Expects a user's mistake."""

from typing import Any

import pytest

from clipscale.common.errors import UserError


def refused(match: str) -> Any:
    """A context that expects a UserError of one matching line."""
    return pytest.raises(UserError, match=match)
