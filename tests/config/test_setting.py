"""Settings are declared in the fields of dataclasses, and listed from them."""

import json
import subprocess
import sys
from dataclasses import dataclass, field

import pytest

from clipscale.cli.verbs import TOOLS
from clipscale.config.setting import Setting, sections, setting, settings_of


@dataclass
class Inner:
    """A section. More about it."""

    name: str = setting("a", "Its name.", choices=("a", "b"))
    path: str | None = setting(None, "Its path.")


@dataclass
class Outer:
    """All."""

    sizes: list[int] = setting([1], "Sizes.")
    inner: Inner = field(default_factory=Inner)


def test_nested_settings_are_listed_by_dotted_name() -> None:
    assert settings_of(Outer) == (
        Setting("sizes", list[int], [1], "Sizes."),
        Setting("inner.name", str, "a", "Its name.", choices=("a", "b")),
        Setting("inner.path", str | None, None, "Its path."),
    )
    assert sections(Outer) == {"inner": "A section. More about it."}


def test_no_two_objects_share_a_mutable_default() -> None:
    one = Outer()
    one.sizes.append(2)
    assert Outer().sizes == [1]


@pytest.mark.parametrize("tool", TOOLS)
def test_every_setting_and_section_has_help(tool: str) -> None:
    declared = TOOLS[tool].settings
    silent = [one.name for one in settings_of(declared) if not one.help]
    silent += [section for section, text in sections(declared).items() if not text]
    assert not silent, f"without help: {silent}"


@pytest.mark.parametrize("tool", TOOLS)
def test_limits_suit_the_type_and_the_default(tool: str) -> None:
    for one in settings_of(TOOLS[tool].settings):
        if one.choices:
            assert one.kind is str and one.default in one.choices, one
        if one.least is not None:
            assert one.kind in (int, float), one
            assert one.default is None or one.default >= one.least, one


HEAVY = {"torch", "open_clip", "torchvision", "timm", "hydra", "omegaconf"}


LIGHT = [
    "train --help",
    "completion query clipscale\\ train\\ optim.on_divergence=",
    "train run=x batch=banana",
    "train batch=0",
    "train modle=vit-b32",
    "train model=vit-b33",
    "train optim.name=adamw offload=hots",
    "train -m batch=32k,many",
    "train data=demo batch=1k,2k",
    "eval rum=a",
    "plan gpu=8",
    "eval run=nope",
    "plan run=nope",
    "report run=nope",
    "export run=nope",
    "data check a.tar allow_pipe=perhaps",
]
COMPOSED = [
    "eval",
    "plan hardware=h101-80g",
    "train data=demo epochs=1 samples=2",
    "train",
    "train data.train=/nowhere/{0..3}.tar",
    "train data.train=@nowhere.txt",
    "train data.train=/dev/null run=x resume=nowhere",
]
"""Mistakes that only the whole composition shows."""


def test_help_completion_and_mistakes_need_neither_torch_nor_hydra() -> None:
    assert imported_by(LIGHT, HEAVY) == {}


def test_what_only_the_whole_composition_shows_needs_no_torch() -> None:
    assert imported_by(COMPOSED, HEAVY - {"hydra", "omegaconf"}) == {}


def imported_by(commands: list[str], heavy: set[str]) -> dict[str, list[str]]:
    """Command -> the modules among `heavy` that one process has imported after it, as far as there are any."""
    code = f"""
import json, shlex, sys
import clipscale.config
from clipscale.cli.main import main
loaded = {{}}
for words in {commands!r}:
    main(shlex.split(words))
    loaded[words] = sorted({heavy!r} & {{*sys.modules}})
print(json.dumps(loaded))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = json.loads(done.stdout.splitlines()[-1])
    assert set(loaded) == set(commands)
    return {words: modules for words, modules in loaded.items() if modules}
