"""A user's mistake."""

from typing import Any

import pytest

from clipscale.common.errors import UserError


def refused(match: str) -> Any:
    """In its context a UserError is raised, whose one line matches."""
    return pytest.raises(UserError, match=match)
