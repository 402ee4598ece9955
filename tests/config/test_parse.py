"""Plain values in, settings out: types, choices and bounds, each with one message."""

from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import pytest

from clipscale.cli.compose import compose_settings
from clipscale.cli.verbs import VERBS
from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.config.parse import dataclass_from
from clipscale.config.setting import sections_of, settings_of, summary
from clipscale.config.train_config import TrainConfig
from tests.support.user_errors import refused

VALUES = files.read_yaml(Path(__file__).with_name("values.yaml"))


@pytest.mark.parametrize(("values", "read"), VALUES["read"])
def test_a_value_becomes_the_type_of_its_setting(values: dict, read: Any) -> None:
    value = dataclass_from(TrainConfig, values)
    while is_dataclass(value):
        (name, values), *_ = values.items()
        value = getattr(value, name)
    value = [*value] if isinstance(value, tuple) else value  # YAML has none
    assert (value, type(value)) == (read, type(read))


@pytest.mark.parametrize(("values", "message"), VALUES["refused"])
def test_a_wrong_value_is_refused_in_one_line(values: dict, message: str) -> None:
    with pytest.raises(UserError) as caught:
        dataclass_from(TrainConfig, values)
    assert str(caught.value) == message


@pytest.mark.parametrize("verb", VERBS)
def test_every_setting_has_help_and_accepts_its_default(verb: str) -> None:
    declared = VERBS[verb].settings
    silent = [name for name, setting in settings_of(declared).items() if not setting.help]
    silent += [name for name, section in sections_of(declared).items() if not summary(section)]
    assert not silent, f"without help: {silent}"
    assert compose_settings(verb, []) == declared(), "conf/ has no other defaults"


def test_memory_is_a_number_of_bytes_in_any_form_that_people_type() -> None:
    for text in ("2T", "2TB", "2048G", str(2**41)):
        assert compose_settings("plan", [f"host_memory={text}"]).host_memory == 2**41
    with refused(r"^host_memory=much: 'much' is not a size such as 8G"):
        compose_settings("plan", ["host_memory=much"])


def test_a_dictionary_is_given_whole_or_by_its_keys() -> None:
    whole = compose_settings("train", ["model.architecture={embed_dim:3,text_cfg:{width:4},vision_cfg:{}}"])
    keys = ["embed_dim=3", "text_cfg.width=4", "vision_cfg={}"]
    by_keys = compose_settings("train", [f"model.architecture.{key}" for key in keys])
    description = {"embed_dim": 3, "text_cfg": {"width": 4}, "vision_cfg": {}}
    assert whole.model.architecture == by_keys.model.architecture == description
