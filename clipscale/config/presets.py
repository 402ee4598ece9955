"""The files in conf/: groups of presets, and the defaults of each verb."""

import re
from pathlib import Path

from clipscale.common import files

PACKAGE = Path(__file__).resolve().parent.parent


def conf_dir() -> Path:
    """The folder: packaged with the wheel, or beside the package in a checkout."""
    return next(parent / "conf" for parent in (PACKAGE, PACKAGE.parent) if (parent / "conf").is_dir())


def group_options() -> dict[str, list[str]]:
    """Group -> the presets to choose from."""
    folders = sorted(path for path in conf_dir().iterdir() if path.is_dir())
    return {path.name: sorted(file.stem for file in path.glob("*.yaml")) for path in folders}


def default_choices(conf: str) -> dict[str, str | None]:
    """Group -> its default preset in conf/NAME.yaml; none for an empty name."""
    if not conf:
        return {}
    entries = files.read_yaml(conf_dir() / f"{conf}.yaml")["defaults"]
    return {group: choice for entry in entries if isinstance(entry, dict) for group, choice in entry.items()}


def preset_title(group: str, option: str) -> str:
    """The first comment of a preset's file."""
    text = (conf_dir() / group / f"{option}.yaml").read_text(encoding="utf-8")
    return re.findall(r"^# ([^@].*)", text, re.M)[0]
