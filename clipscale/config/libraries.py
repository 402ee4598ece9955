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


def listed_tags(name: str) -> list[str]:
    """The tags of weights with a model's activation, as far as open_clip's file shows them: of others ask open_clip."""
    file = _file("open_clip", "pretrained.py")
    text = file.read_text("utf-8") if file.is_file() else ""
    model = re.escape(name.replace("/", "-").removesuffix("-quickgelu"))
    entry = re.search(rf"""(?ms)^ +["']{model}["']: (?:(_\w+),|(dict.*?)^ {{0,4}}\S)""", text)
    table = re.search(rf"(?ms)^{entry[1]} = (.*?)^\S", text) if entry and entry[1] else None
    found = table[1] if table else entry[2] if entry else ""
    tags = re.findall(r"""["']?([\w-]+)["']?\s*[=:]\s*_\w*cfg\((.*?)\)""", found or "", re.S)
    quick = model_description(name).get("quick_gelu", False)
    return [tag for tag, options in tags if ("quick_gelu=True" in options) == quick]


@cache
def optimizers() -> list[str]:
    """timm's optimizers."""
    import timm.optim

    return [str(name) for name in timm.optim.list_optimizers()]
