"""Plain values in, settings out: types, choices and bounds, each with one message; and only the command line knows
Hydra.
"""

import ast
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import pytest

from clipscale.cli import compose
from clipscale.cli.verbs import VERBS
from clipscale.common.errors import UserError
from clipscale.config.eval import existing_run
from clipscale.config.parse import typed
from clipscale.config.presets import PACKAGE
from clipscale.config.setting import nested, settings_of, summary
from clipscale.config.train import TrainConfig


@pytest.mark.parametrize(
    ("values", "read"),
    [
        ({"batch": "1M"}, 2**20),
        ({"samples": 1e6}, 1_000_000),
        ({"cache": {"chunk": 512}}, ["512"]),
        ({"model": {"compile": True}}, True),
        ({"optim": {"lr": "1e-3"}}, 1e-3),
        ({"optim": {"clip_norm": 1}}, 1.0),
        ({"optim": {"eps": None}}, None),
        ({"run": 3}, "3"),
        ({"eval": {"sets": "a"}}, ["a"]),
        ({"data": {"weights": [1, "0.5"]}}, [1.0, 0.5]),
        ({"optim": {"betas": [0.8, 0.9]}}, (0.8, 0.9)),
        ({"optim": {"options": {"foreach": True}}}, {"foreach": True}),
        ({"data": {"max_pixels": "5M"}}, 5 * 2**20),
    ],
)
def test_a_value_becomes_the_type_of_its_setting(values: dict[str, Any], read: Any) -> None:
    value = typed(TrainConfig, values)
    while is_dataclass(value):
        (name, values), *_ = values.items()
        value = getattr(value, name)
    assert (value, type(value)) == (read, type(read))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"seed": None}, "seed=null: give a whole number"),
        ({"batch": True}, "batch=true: give a whole number"),
        ({"batch": [1, 2]}, "batch=[1,2]: give a whole number"),
        ({"run": ["a"]}, "run=[a]: give one text"),
        ({"optim": {"lr": float("nan")}}, "optim.lr=nan: give at least 0"),
        ({"epochs": 0}, "epochs=0: give more than 0"),
        ({"model": {"patch_dropout": 1}}, "model.patch_dropout=1: give less than 1"),
        ({"model": {"compile": "perhaps"}}, "model.compile=perhaps: give true or false"),
        ({"optim": {"betas": [0.9]}}, "optim.betas=[0.9]: give 2 numbers, 'optim.betas=[...]'"),
        ({"optim": {"options": 3}}, "optim.options: give names and values, optim.options.NAME=VALUE"),
        ({"data": {"augment": {"scale": [0, 1]}}}, "data.augment.scale=[0,1]: give more than 0"),
    ],
)
def test_a_wrong_value_is_refused_in_one_line(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        typed(TrainConfig, values)
    assert str(caught.value) == message


def test_a_run_must_exist_and_a_sweep_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"^run={tmp_path}/none: there is no folder {tmp_path}/none$"):
        existing_run(f"{tmp_path}/none")
    for name in ("batch=64", "batch=128"):
        (tmp_path / "sizes" / name).mkdir(parents=True)
        (tmp_path / "sizes" / name / "config.yaml").write_text("")
    with pytest.raises(UserError, match=rf"^run={tmp_path}/sizes: a sweep of 2 runs; .*/sizes/batch=128$"):
        existing_run(f"{tmp_path}/sizes")
    assert existing_run(f"{tmp_path}/sizes/batch=64") == tmp_path / "sizes/batch=64"


@pytest.mark.parametrize("verb", VERBS)
def test_every_setting_has_help_and_accepts_its_default(verb: str) -> None:
    declared = VERBS[verb].settings
    silent = [name for name, setting in settings_of(declared).items() if not setting.help]
    silent += [name for name, section in nested(declared).items() if not summary(section)]
    assert not silent, f"without help: {silent}"
    assert compose.settings(verb, []) == declared(), "conf/ has no other defaults"


def test_only_the_command_line_knows_hydra() -> None:
    imports = {}
    for path in PACKAGE.rglob("*.py"):
        names = imports.setdefault(".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts), set())
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module.partition(".")[0])
    assert [module for module, names in imports.items() if names & {"hydra", "omegaconf"}] == ["clipscale.cli.compose"]


def test_a_dictionary_is_given_whole_or_by_its_keys() -> None:
    whole = compose.settings("train", ["model.architecture={embed_dim:3,text_cfg:{width:4}}"])
    by_keys = compose.settings("train", ["model.architecture.embed_dim=3", "model.architecture.text_cfg.width=4"])
    assert whole.model.architecture == by_keys.model.architecture == {"embed_dim": 3, "text_cfg": {"width": 4}}
