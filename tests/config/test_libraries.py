"""The names in the libraries' files are the libraries' own."""

import subprocess
import sys
from importlib import import_module

import open_clip
import pytest

from clipscale.config import libraries
from clipscale.config.sections import SHARDABLE_OPTIMIZERS
from tests.support.towers import architecture


def test_all_names_of_the_libraries_are_found_without_them() -> None:
    names = libraries.architectures()
    assert "ViT-B-32" in names and all(map(libraries.model_description, names))
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


def test_the_table_of_tags_is_read_without_what_fetches_weights() -> None:
    """Importing that takes a second. A wrong tag is answered sooner."""
    code = "import sys; from clipscale.config.libraries import pretrained; print(pretrained().list_pretrained()[0]); "
    code += "print({'torch', 'open_clip', 'safetensors.torch', 'huggingface_hub'} & sys.modules.keys())"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert out.splitlines() == [str(open_clip.list_pretrained()[0]), "set()"]


def test_a_package_that_a_model_does_not_need_is_hidden_while_open_clip_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Importing it takes seconds. Afterwards any import finds it."""
    assert libraries.unneeded_packages(architecture(), fetches=False) == [], "open_clip is here already"
    packages = "open_clip", "timm", "transformers", "huggingface_hub"
    for name in [name for name in sys.modules if name.partition(".")[0] in packages]:
        monkeypatch.delitem(sys.modules, name)  # until the test ends
    monkeypatch.setitem(sys.modules, "wandb", None)  # as in the program
    for known in ({}, {"text_cfg": {"hf_model_name": "roberta-base"}}):
        assert libraries.unneeded_packages(known, fetches=False) == []
    assert libraries.unneeded_packages(architecture(), fetches=True) == ["transformers"], "weights come from a hub"
    with libraries.hidden_packages(*libraries.unneeded_packages(architecture(), fetches=False)):
        assert import_module("open_clip.hf_model").transformers is None
    assert not {"transformers", "huggingface_hub"} & sys.modules.keys()


def test_the_server_of_data_workers_imports_no_package_that_no_worker_needs() -> None:
    code = "import sys, clipscale.data.loader.server_imports; print({'transformers', 'wandb'} & sys.modules.keys())"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "set()\n"
