"""The names that open_clip and timm know, read from their files: to import these libraries takes seconds."""

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path


def _folder(package: str) -> Path:
    spec = find_spec(package)
    assert spec and spec.origin  # installed with this package
    return Path(spec.origin).parent


@cache
def architectures() -> list[str]:
    """open_clip's models."""
    return sorted(file.stem for file in (_folder("open_clip") / "model_configs").glob("*.json"))


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
