"""The keys read from source are the dataclasses' own."""

import json
import subprocess
import sys
from dataclasses import asdict
from typing import Any

import pytest

from clipscale.config import TrainConfig
from clipscale.eval.verb import EvalRunConfig
from clipscale.keys import group_options, keys, meaning, tree
from clipscale.plan.config import PlanConfig
from clipscale.usage import EVAL, PLAN, TRAIN


def plain(value: Any) -> Any:
    return json.loads(json.dumps(value))


@pytest.mark.parametrize(("settings", "source"), [(TrainConfig, TRAIN), (EvalRunConfig, EVAL), (PlanConfig, PLAN)])
def test_the_tree_read_from_source_is_the_dataclass_with_its_defaults(settings: type, source: tuple[str, str]) -> None:
    assert plain(tree(*source)) == plain(asdict(settings()))


def test_every_key_and_section_says_what_it_means() -> None:
    silent = [key.name for key in keys(*TRAIN) if not key.doc]
    silent += [section for section, text in meaning(*TRAIN).items() if not text]
    assert not silent, f"without a docstring: {silent}"


def test_reading_the_keys_imports_nothing_heavy() -> None:
    code = (
        "import sys, clipscale.usage as u; u.show_train([]); print({'torch', 'hydra', 'open_clip'} & set(sys.modules))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.rstrip().endswith("set()"), shown[-200:]


def test_every_group_of_the_configuration_has_choices() -> None:
    options = group_options()
    assert set(options) == {"data", "experiment", "log", "loss", "model", "optim", "precision", "schedule"}
    assert all(options.values()), options
