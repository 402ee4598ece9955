"""The names that open_clip and timm know, read from their files: to import these libraries takes seconds."""

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from clipscale.common import files
from clipscale.common.record import Record


def _folder(package: str) -> Path:
    spec = find_spec(package)
    assert spec and spec.origin  # installed with this package
    return Path(spec.origin).parent


@cache
def architectures() -> list[str]:
    """open_clip's models."""
    return sorted(file.stem for file in (_folder("open_clip") / "model_configs").glob("*.json"))


def model_description(name: str) -> Record:
    """open_clip's description of a model; empty for a name that it does not know."""
    file = _folder("open_clip") / "model_configs" / f"{name.replace('/', '-')}.json"
    return files.read_json(file) if file.is_file() else {}


@cache
def pretrained_tags() -> list[str]:
    """The tags of open_clip's weights, of all its models."""
    text = (_folder("open_clip") / "pretrained.py").read_text(encoding="utf-8")
    return sorted({*re.findall(r"""["']?([\w-]+)["']?\s*[=:]\s*_\w*cfg\(""", text)})


@cache
def optimizers() -> list[str]:
    """timm's optimizers."""
    text = (_folder("timm") / "optim/_optim_factory.py").read_text(encoding="utf-8")
    return re.findall(r"""(?m)(?:name=|alias\(|^\s+)["'](\w+)["'],""", text)
