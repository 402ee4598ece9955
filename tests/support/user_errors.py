"""Expects a user's mistake."""

from typing import Any

import pytest

from clipscale.common.errors import UserError


def refused(match: str) -> Any:
    """The context expects a UserError whose one line matches."""
    return pytest.raises(UserError, match=match)
