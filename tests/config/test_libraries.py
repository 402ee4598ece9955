"""The names in the libraries' files are the libraries' own; a file that has moved is not missed."""

import pytest

from clipscale.config import libraries


def test_all_names_of_the_libraries_are_found_without_them() -> None:
    assert all(libraries.model_description(name) for name in libraries.architectures())
    assert all(libraries.spelt("open_clip", "pretrained.py", name) for name in libraries.pretrained_tags())
    missed = [n for n in libraries.optimizers() if not libraries.spelt("timm", "optim/_optim_factory.py", n)]
    assert len(missed) < 9, missed


@pytest.mark.parametrize(("file", "name"), [("pretrained.py", "laion9b"), ("moved.py", "openai")])
def test_another_word_or_file_is_not(file: str, name: str) -> None:
    assert not libraries.spelt("open_clip", file, name)
