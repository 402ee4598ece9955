"""Declares a setting: a dataclass field with its help and its limits. Lists all settings of a dataclass."""

import re
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import Field, dataclass, field, fields, is_dataclass, replace
from enum import Enum
from types import NoneType, UnionType
from typing import Any, ClassVar, Final, Protocol, TypeVar, get_args, get_origin

from clipscale.common.text import one_of


class Unset(Enum):
    """Sentinel of a stage's setting: the stage inherits the run's value."""

    UNSET = "unset"


UNSET: Final = Unset.UNSET


class Section(Protocol):
    """Any dataclass of settings."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


SectionT = TypeVar("SectionT", bound=Section)


def setting(
    default: object, help: str, *, choices: tuple[str, ...] = (), changes_weights: bool = True, **bounds: float
) -> Any:
    """A dataclass field: its default, one or two sentences of help, and its limits.

    choices: the texts that the setting accepts. changes_weights: see the function `changes_weights`. bounds: of a
    number, or of each number of a list; `least` and `most` are inclusive, `above` and `below` exclusive.
    """
    metadata = {"help": help, "choices": choices, "bounds": bounds, "changes_weights": changes_weights}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: copy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def section(section_type: type[Section], *, changes_weights: bool = True) -> Any:
    """A dataclass field with a section of settings. changes_weights: see the function `changes_weights`."""
    return field(default_factory=section_type, metadata={"changes_weights": changes_weights})


def changes_weights(settings_type: type, key: str) -> bool:
    """Whether a setting, by its dotted key, may change the weights that a run trains by more than rounding.

    A complete run stays complete if all settings that differ have `changes_weights=False`. One exception is accepted:
    with dropout, the chunks (`cache.`) decide which sample gets which random numbers. True for a key that is not
    declared.
    """
    name, _, rest = key.partition(".")
    found = next((member for member in fields(settings_type) if member.name == name), None)
    if found is None:
        return True
    if not found.metadata.get("changes_weights", True):
        return False
    section_type = sections_of(settings_type).get(name)
    return changes_weights(section_type, rest) if section_type else True


@dataclass(frozen=True)
class Setting:
    """A declared setting. `help`, `choices`, `changes_weights` and `bounds`: see `setting`."""

    # Dotted from the top: `optim.lr`.
    name: str
    # The annotation: `int | None`, `list[str]`, ...
    type: Any
    default: object
    help: str
    choices: tuple[str, ...] = ()
    changes_weights: bool = True
    bounds: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_optional(self) -> bool:
        """Whether the setting may be null."""
        return NoneType in get_args(self.type)

    @property
    def meaning(self) -> str:
        """The help, with choices that it does not explain."""
        help_names_all = all(f"`{choice}`" in self.help for choice in self.choices)
        return self.help if help_names_all else f"{self.help} Choose {one_of(self.choices)}."

    @property
    def required_type(self) -> Any:
        """The type without `| None` and `| Unset`."""
        return get_args(self.type)[0] if isinstance(self.type, UnionType) else self.type

    @property
    def kind(self) -> type:
        """The bare type: `int`, `list`, `dict`, ..."""
        return get_origin(self.required_type) or self.required_type

    @property
    def item_type(self) -> type | None:
        """The dataclass of a list's items; None for other settings."""
        item = get_args(self.required_type)[0] if self.kind is list else None
        return item if is_dataclass(item) else None


def settings_of(settings_type: type, prefix: str = "") -> dict[str, Setting]:
    """All settings of a dataclass by name in the order of declaration, nested sections flattened to dotted names.

    A dataclass that uses only a part of a section has a dictionary USED_SETTINGS: section -> the names that it uses.
    """
    settings: dict[str, Setting] = {}
    subsections = sections_of(settings_type)
    defaults = settings_type()
    only = getattr(settings_type, "USED_SETTINGS", {})
    for member in fields(settings_type):
        name = prefix + member.name
        if member.name in subsections:
            used = [f"{name}.{part}" for part in only.get(member.name, "").split()]
            inner = settings_of(subsections[member.name], name + ".")
            settings |= {key: setting for key, setting in inner.items() if not used or key in used}
        else:
            settings[name] = Setting(name, member.type, getattr(defaults, member.name), **member.metadata)
    return settings


def differences(old: Mapping[str, object], new: Mapping[str, object]) -> dict[str, tuple[object, object]]:
    """The values of two nested mappings that differ: dotted key -> (old, new)."""
    before = dict(flatten(old))
    after = dict(flatten(new))
    return {key: (before.get(key), after.get(key)) for key in before | after if before.get(key) != after.get(key)}


def with_setting(config: SectionT, name: str, value: object) -> SectionT:
    """The settings with this value for the setting `name`."""
    head, _, rest = name.partition(".")
    if rest:
        value = with_setting(getattr(config, head), rest, value)
    return replace(config, **{head: value})


def sections_of(settings_type: type) -> dict[str, type]:
    """Section -> its dataclass."""
    return {each.name: each.type for each in fields(settings_type) if is_dataclass(each.type)}  # type: ignore[misc]


def summary(settings_type: type) -> str:
    """The first paragraph of a dataclass's docstring, without the verb's name that it may begin with."""
    return re.sub(r"^`clipscale.*?`: ", "", " ".join((settings_type.__doc__ or "").partition("\n\n")[0].split()))


def flatten(tree: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Dotted key and value of every leaf.

    Free-form dictionaries are flattened too; lists and empty dictionaries are leaves.
    """
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
