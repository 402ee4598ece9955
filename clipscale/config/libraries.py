"""The names that open_clip and timm know. To import these libraries takes seconds: a word of their sources is accepted
without, and they are asked about any other."""

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from clipscale.common import files
from clipscale.common.record import Record


def _file(package: str, name: str) -> Path:
    spec = find_spec(package)
    assert spec and spec.origin  # installed with this package
    return Path(spec.origin).parent / name


def spelt(package: str, source: str, name: str) -> bool:
    """Whether a library's file has this word; False where the file has moved."""
    file = _file(package, source)
    return file.is_file() and bool(re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", file.read_text("utf-8")))


@cache
def architectures() -> list[str]:
    """open_clip's models."""
    import open_clip

    return sorted(open_clip.list_models())


def model_description(name: str) -> Record:
    """open_clip's description of a model; empty for a name that it does not know."""
    file = _file("open_clip", f"model_configs/{name.replace('/', '-')}.json")
    return files.read_json(file) if file.is_file() else {}


@cache
def pretrained_tags() -> list[str]:
    """The tags of open_clip's weights, of all its models."""
    import open_clip

    return sorted({tag for _, tag in open_clip.list_pretrained()})


@cache
def optimizers() -> list[str]:
    """timm's optimizers."""
    import timm.optim

    return [str(name) for name in timm.optim.list_optimizers()]
