"""One embedded set and its page for all tests of this folder."""

from tests.explore.pages import page, place

__all__ = ["page", "place"]
