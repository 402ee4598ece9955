"""The keys read from source are the dataclasses' own."""

import json
import subprocess
import sys
from dataclasses import asdict
from typing import Any

import pytest

from clipscale.cli.main import declared_class
from clipscale.cli.verbs import TOOLS
from clipscale.config.keys import choices, group_options, keys, meaning, tree
from clipscale.config.train import CHOICES


def plain(value: Any) -> Any:
    return json.loads(json.dumps(value))


@pytest.mark.parametrize("tool", TOOLS)
def test_the_tree_read_from_source_is_the_dataclass_with_its_defaults(tool: str) -> None:
    assert plain(tree(*TOOLS[tool].settings)) == plain(asdict(declared_class(tool)()))


def test_the_choices_read_from_source_are_the_ones_that_are_checked() -> None:
    assert choices() == CHOICES


@pytest.mark.parametrize("tool", TOOLS)
def test_every_key_and_section_says_what_it_means(tool: str) -> None:
    settings = TOOLS[tool].settings
    silent = [key.name for key in keys(*settings) if not key.doc]
    silent += [section for section, text in meaning(*settings).items() if not text]
    assert not silent, f"without a docstring: {silent}"


@pytest.mark.parametrize(
    "words", [["train", "--help"], ["completion", "query", "clipscale train optim.on_divergence="]]
)
def test_help_and_completion_import_nothing_heavy(words: list[str]) -> None:
    code = f"import sys, clipscale.cli.main as c; c.main({words}); print({{'torch', 'hydra', 'omegaconf', 'open_clip'}} & set(sys.modules))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.rstrip().endswith("set()"), shown[-200:]


def test_every_group_of_the_configuration_has_choices() -> None:
    options = group_options()
    assert set(options) == {"data", "experiment", "log", "loss", "model", "optim", "precision", "schedule"}
    assert all(options.values()), options
