"""The files in conf/: groups of presets, and the defaults that each verb composes from them."""

from pathlib import Path
from typing import Any

import yaml

from clipscale.common.errors import UserError
from clipscale.config.setting import flat

PACKAGE = Path(__file__).resolve().parent.parent


def conf_dir() -> Path:
    """The folder: packaged with the wheel, or beside the package in a checkout."""
    for candidate in (PACKAGE / "conf", PACKAGE.parent / "conf"):
        if candidate.is_dir():
            return candidate
    raise UserError(f"no conf folder in {PACKAGE} or beside it; install clipscale again")


def group_options() -> dict[str, list[str]]:
    """Group -> the presets to choose from."""
    folders = sorted(path for path in conf_dir().iterdir() if path.is_dir())
    return {path.name: sorted(file.stem for file in path.glob("*.yaml")) for path in folders}


def about(group: str, option: str) -> str:
    """The first comment of a preset's file."""
    lines = (conf_dir() / group / f"{option}.yaml").read_text(encoding="utf-8").splitlines()
    return next((line.removeprefix("# ") for line in lines if line.startswith("# ") and not line.startswith("# @")), "")


def composed_defaults(name: str) -> tuple[dict[str, str | None], dict[str, Any]]:
    """The group choices of conf/`name`.yaml; and, by dotted key, the values that these presets and the file itself set."""
    file: dict[str, Any] = yaml.safe_load((conf_dir() / f"{name}.yaml").read_text(encoding="utf-8"))
    entries = [entry for entry in file.pop("defaults") if isinstance(entry, dict)]
    choices = {
        group: option for entry in entries for group, option in entry.items() if not group.startswith("override")
    }
    values: dict[str, Any] = {}
    for group, option in choices.items():
        if option is not None:
            text = (conf_dir() / group / f"{option}.yaml").read_text(encoding="utf-8")
            values |= flat(yaml.safe_load(text), "" if text.startswith("# @package _global_") else group + ".")
    return choices, values | dict(flat(file))
