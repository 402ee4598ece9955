"""The names that open_clip and timm know. Importing these libraries takes seconds, so their files are read instead."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import cast

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


@contextmanager
def hidden_packages(*packages: str) -> Iterator[None]:
    """In this context, these packages are not found, unless they are imported already.

    For packages that another package imports if it finds them. Python does not find a module that is None in
    sys.modules (language reference, 5.3.1).
    """
    absent = [name for name in packages if name not in sys.modules]
    for name in absent:
        sys.modules[name] = cast(ModuleType, None)
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]


def needs_transformers(description: Record) -> bool:
    """Whether a model may have a text tower of transformers: its description says so, or is not known."""
    return not description or "hf_model_name" in str(description)


def unneeded_packages(description: Record, *, fetches: bool) -> list[str]:
    """Packages that open_clip and timm import if they find them, for seconds, and that this model does not need.

    Empty if open_clip is imported already. `fetches`: its weights may be fetched. `clipscale.__main__` hides wandb.
    """
    if needs_transformers(description) or "open_clip" in sys.modules:
        return []
    return ["transformers"] if fetches else ["transformers", "huggingface_hub"]


@cache
def pretrained() -> ModuleType:
    """open_clip's module `pretrained`, its table of tags, without the rest of open_clip and what that imports."""
    alone = ModuleType("clipscale_open_clip_alone")
    alone.__path__ = [str(_file("open_clip", ""))]
    sys.modules[alone.__name__] = alone
    with hidden_packages("safetensors.torch", "huggingface_hub"):  # needed only to fetch weights
        return import_module(f"{alone.__name__}.pretrained")


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
def optimizers() -> list[str]:
    """Names of timm's optimizers. Imports timm."""
    import timm.optim

    return list(map(str, timm.optim.list_optimizers()))
