"""The names in the libraries' files are the libraries' own."""

import sys
from importlib import import_module

import open_clip
import pytest

from clipscale.config import libraries
from clipscale.config.sections import SHARDABLE_OPTIMIZERS
from tests.support.towers import architecture


def test_all_names_of_the_libraries_are_found_without_them() -> None:
    assert all(libraries.model_description(name) for name in libraries.architectures())
    assert set(SHARDABLE_OPTIMIZERS) < set(libraries.optimizers())
    left = {*libraries.optimizers()} - {*libraries.optimizers_in_file()}
    assert all(name.startswith(("bnb", "nesterov")) for name in left), left


def test_an_optimizer_is_known_by_the_library_wherever_its_name_is(monkeypatch: pytest.MonkeyPatch) -> None:
    known = [name for name in [*libraries.optimizers(), "adamww", "betas"] if libraries.has_optimizer(name)]
    assert known == libraries.optimizers()
    monkeypatch.setattr(libraries, "_factory", lambda: "")  # of another version
    assert libraries.has_optimizer("lamb") and not libraries.has_optimizer("adamww")


def test_the_table_of_tags_is_open_clips() -> None:
    table = libraries.pretrained()
    assert table.list_pretrained() == open_clip.list_pretrained()
    tag = "laion2b_s34b_b79k"
    assert table.get_pretrained_cfg("ViT-B-32", tag) == open_clip.get_pretrained_cfg("ViT-B-32", tag)


def test_a_package_that_a_model_does_not_need_is_hidden_while_open_clip_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It takes seconds. Afterwards, whoever imports it finds it."""
    assert libraries.unneeded(architecture()) == [], "open_clip is here already"
    for name in [name for name in sys.modules if name.partition(".")[0] in ("open_clip", "transformers")]:
        monkeypatch.delitem(sys.modules, name)  # until the test ends
    assert libraries.unneeded({}) == libraries.unneeded({"text_cfg": {"hf_model_name": "roberta-base"}}) == []
    with libraries.hidden(*libraries.unneeded(architecture())):
        assert import_module("open_clip.hf_model").transformers is None
    assert "transformers" not in sys.modules
