"""The names that open_clip and timm know. Importing these libraries takes seconds, so their files are read instead."""

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from clipscale.common import files
from clipscale.common.record import Record


def _file(package: str, name: str) -> Path:
    spec = find_spec(package)
    assert spec and spec.origin  # installed with this package
    return Path(spec.origin).parent / name


@cache
def architectures() -> list[str]:
    """Names of open_clip's architectures."""
    return sorted(file.stem for file in _file("open_clip", "model_configs").glob("*.json"))


def model_description(name: str) -> Record:
    """open_clip's description of a model; empty for a name that it does not know."""
    file = _file("open_clip", f"model_configs/{name.replace('/', '-')}.json")
    return files.read_json(file) if file.is_file() else {}


def optimizers_in_file() -> list[str]:
    """Nearly all names of timm's optimizers, read from the text of its factory; empty if timm has moved that."""
    return re.findall(r"\bname='(\w+)'", _factory())


def has_optimizer(name: str) -> bool:
    """Whether timm has an optimizer of this name. Imports timm only if its factory's text does not say it."""
    if name in optimizers_in_file():
        return True
    text = _factory()
    return (not text or f"'{name}'" in text) and name in optimizers()


@cache
def _factory() -> str:
    file = _file("timm", "optim/_optim_factory.py")
    return file.read_text(encoding="utf-8") if file.is_file() else ""


@cache
def optimizers() -> list[Any]:
    """Names of timm's optimizers. Imports timm."""
    import timm.optim

    return timm.optim.list_optimizers()
