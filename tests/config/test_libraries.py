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


def test_tags_of_a_model_are_those_with_its_activation() -> None:
    for name in {name for name, _ in open_clip.list_pretrained()}:
        quick = open_clip.get_model_config(name).get("quick_gelu", False)
        tags = open_clip.list_pretrained_tags_by_model(name)
        same = [tag for tag in tags if open_clip.get_pretrained_cfg(name, tag).get("quick_gelu", False) == quick]
        assert libraries.listed_tags(name) == same, name
    assert libraries.listed_tags("none") == []
