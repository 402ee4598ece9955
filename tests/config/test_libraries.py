"""The names in the libraries' files are the libraries' own."""

import open_clip

from clipscale.config import libraries
from clipscale.config.sections import SHARDABLE_OPTIMIZERS


def test_all_names_of_the_libraries_are_found_without_them() -> None:
    assert all(libraries.model_description(name) for name in libraries.architectures())
    assert set(SHARDABLE_OPTIMIZERS) < set(libraries.optimizers())


def test_tags_are_open_clips() -> None:
    assert libraries.pretrained().list_pretrained() == open_clip.list_pretrained()
