"""A run's `config.yaml`: writes settings, and compares a start's settings with those in the file."""

from collections.abc import Mapping
from dataclasses import asdict
from enum import Enum

import yaml

from clipscale.common import files
from clipscale.config.secrets import without_secrets
from clipscale.config.setting import UNSET, Section, differences


def to_yaml(config: Section) -> str:
    """The configuration as YAML without its secrets. `dataclass_from` reads it back."""
    # `without_secrets` makes lists of tuples, which YAML does not have.
    return yaml.safe_dump(
        without_secrets(asdict(config, dict_factory=plain_fields)), sort_keys=False, allow_unicode=True
    )


def plain_fields(settings: list[tuple[str, object]]) -> dict[str, object]:
    """The fields of a section that are set, with the words of enums."""
    as_set = [(name, value) for name, value in settings if value is not UNSET]
    return {name: value.value if isinstance(value, Enum) else value for name, value in as_set}


def changed_settings(before: Mapping[str, object], settings: str) -> dict[str, tuple[object, object]]:
    """The settings that differ from those of the run's `config.yaml`: dotted key -> (old, new).

    `before`: the file's settings. If they are empty, there was no file, and nothing counts as changed. `settings`: the
    present ones, as `to_yaml` writes them. Leaves out `run` and `resume`.
    """
    if not before:
        return {}
    changes = differences(before, files.parse_yaml(settings))
    return {key: values for key, values in changes.items() if key not in ("run", "resume")}


def change_lines(before: Mapping[str, object], settings: str) -> list[str]:
    """The differences of `changed_settings`, as lines `key old -> new`."""
    return [f"{key} {old} -> {new}" for key, (old, new) in changed_settings(before, settings).items()]
