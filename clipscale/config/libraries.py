"""The names that open_clip and timm know, read from their files: to import these libraries takes seconds."""

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path


def _files(package: str, pattern: str) -> list[Path]:
    """The files of an installed package; none without it."""
    spec = find_spec(package)
    places = spec.submodule_search_locations if spec else None
    return [file for place in places or [] for file in Path(place).glob(pattern)]


def _names(package: str, file: str, pattern: str) -> list[str]:
    texts = [path.read_text(encoding="utf-8") for path in _files(package, file)]
    return sorted({name for text in texts for name in re.findall(pattern, text)})


@cache
def architectures() -> list[str]:
    """open_clip's models."""
    return sorted(file.stem for file in _files("open_clip", "model_configs/*.json"))


@cache
def pretrained_tags() -> list[str]:
    """The tags of open_clip's weights, of all its models."""
    return _names("open_clip", "pretrained.py", r"""["']?([\w-]+)["']?\s*[=:]\s*_\w*cfg\(""")


@cache
def optimizers() -> list[str]:
    """timm's optimizers."""
    return _names("timm", "optim/_optim_factory.py", r"""(?m)(?:name=|alias\(|^\s+)["'](\w+)["'],""")
