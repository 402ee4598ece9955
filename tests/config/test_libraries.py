"""The names in the libraries' files are the libraries' own; a file that has moved is not missed."""

import open_clip
import pytest

from clipscale.config import libraries


def test_all_names_of_the_libraries_are_found_without_them() -> None:
    assert all(libraries.model_description(name) for name in libraries.architectures())
    missed = [n for n in libraries.optimizers() if not libraries.spelt("timm", "optim/_optim_factory.py", n)]
    assert len(missed) < 9, missed


@pytest.mark.parametrize(("file", "name"), [("pretrained.py", "laion9b"), ("moved.py", "openai")])
def test_another_word_or_file_is_not(file: str, name: str) -> None:
    assert not libraries.spelt("open_clip", file, name)


def test_tags_are_open_clips() -> None:
    assert libraries.pretrained().list_pretrained() == open_clip.list_pretrained()
