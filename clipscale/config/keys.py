"""The settings as dotted keys, with type, default and meaning, read from the dataclasses' source; and the groups of conf/.

Each part declares its dataclass beside its code, so importing them all brings in torch and open_clip, which takes seconds. Reading the
source instead keeps `--help`, Tab completion and the answer to a mistyped key instant.
"""

import ast
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from clipscale.errors import UserError

PACKAGE = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Key:
    """One setting."""

    name: str
    """Dotted from the top: `optim.lr`."""
    type: str
    """The annotation as written."""
    default: Any
    doc: str

    @property
    def section(self) -> str:
        """The key's first part where it lies in a section, else empty."""
        return self.name.partition(".")[0] if "." in self.name else ""


@cache
def keys(module: str, class_name: str, prefix: str = "") -> tuple[Key, ...]:
    """All keys under a dataclass, nested ones flattened in the order of declaration; those of a class it extends come first."""
    found: list[Key] = []
    previous: ast.stmt | None = None
    declared = _class(module, class_name)
    for base in declared.bases:
        found += keys(*_home(module, ast.unparse(base)), prefix=prefix)
    for node in declared.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = prefix + node.target.id
            section = _nested(module, node.value)
            if section:
                found += keys(*section, prefix=name + ".")
            else:
                found.append(Key(name, ast.unparse(node.annotation), _default(node.value), ""))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            last = previous if isinstance(previous, ast.AnnAssign) else None
            if last is not None and found and found[-1].name == prefix + ast.unparse(last.target):
                found[-1] = replace(found[-1], doc=" ".join(node.value.value.split()))
        previous = node
    return tuple(found)


def tree(module: str, class_name: str) -> dict[str, Any]:
    """The defaults as a nested dictionary; equal to `asdict()` of the dataclass."""
    root: dict[str, Any] = {}
    for key in keys(module, class_name):
        *path, leaf = key.name.split(".")
        node = root
        for part in path:
            node = node.setdefault(part, {})
        node[leaf] = copy(key.default)
    return root


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of every leaf; free-form dictionaries are descended into too, lists and empty dictionaries are leaves."""
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def meaning(module: str, class_name: str) -> dict[str, str]:
    """Section -> the first line of its dataclass's docstring."""
    found: dict[str, str] = {}
    declared = _class(module, class_name)
    for base in declared.bases:
        found |= meaning(*_home(module, ast.unparse(base)))
    for node in declared.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            section = _nested(module, node.value)
            if section:
                found[node.target.id] = docstring(*section)
    return found


def docstring(module: str, class_name: str) -> str:
    """The first line of a dataclass's docstring."""
    return (ast.get_docstring(_class(module, class_name)) or "").partition("\n")[0]


def choices() -> dict[str, tuple[str, ...]]:
    """`clipscale.config.train.CHOICES`: dotted key -> what a text setting may say."""
    table = _value("clipscale.config.train", "CHOICES")[1]
    assert isinstance(table, ast.Dict)
    return {
        ast.literal_eval(key): _names("clipscale.config.train", value)
        for key, value in zip(table.keys, table.values)
        if key
    }


def _names(module: str, value: ast.expr) -> tuple[str, ...]:
    """A tuple of texts, or a dictionary's keys, written out or behind a name or `tuple(NAME)`."""
    if isinstance(value, ast.Call):
        return _names(module, value.args[0])
    if isinstance(value, ast.Name):
        return _names(*_value(module, value.id))
    listed = value.keys if isinstance(value, ast.Dict) else value.elts if isinstance(value, ast.Tuple) else []
    return tuple(ast.literal_eval(item) for item in listed if item)


def _value(module: str, name: str) -> tuple[str, ast.expr]:
    """The expression that a name is bound to, and the module where."""
    module, name = _home(module, name)
    for node in _source(module).body:
        if isinstance(node, ast.Assign) and name in (ast.unparse(target) for target in node.targets):
            return module, node.value
        if isinstance(node, ast.AnnAssign) and node.value and name == ast.unparse(node.target):
            return module, node.value
    raise LookupError(f"{module} has no {name}")


@cache
def _source(module: str) -> ast.Module:
    relative = Path(*module.split(".")[1:]).with_suffix(".py")
    return ast.parse((PACKAGE / relative).read_text(encoding="utf-8"))


def _class(module: str, name: str) -> ast.ClassDef:
    return next(n for n in _source(module).body if isinstance(n, ast.ClassDef) and n.name == name)


def _nested(module: str, value: ast.expr | None) -> tuple[str, str] | None:
    """Module and name of the dataclass behind `field(default_factory=NAME)`, or None for a plain field."""
    factory = _factory(value)
    return None if factory is None or factory in ("list", "dict") else _home(module, factory)


def _home(module: str, name: str) -> tuple[str, str]:
    """The module that defines a name, found by following imports."""
    for node in _source(module).body:
        if isinstance(node, ast.ImportFrom) and node.module and name in (alias.name for alias in node.names):
            return _home(node.module, name)
    return module, name


def _factory(value: ast.expr | None) -> str | None:
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "field":
        for keyword in value.keywords:
            if keyword.arg == "default_factory" and isinstance(keyword.value, ast.Name):
                return keyword.value.id
    return None


def _default(value: ast.expr | None) -> Any:
    if value is None:
        return None
    factory = _factory(value)
    return {"list": [], "dict": {}}[factory] if factory else ast.literal_eval(value)


def conf_dir() -> Path:
    """The configuration files: packaged with the wheel, or beside the package in a checkout."""
    for candidate in (PACKAGE / "conf", PACKAGE.parent / "conf"):
        if candidate.is_dir():
            return candidate
    raise UserError(f"no conf folder in {PACKAGE} or beside it; install clipscale again")


def composed_defaults(name: str) -> tuple[dict[str, str | None], dict[str, Any]]:
    """The group choices that conf/`name`.yaml makes, and by dotted key what these set and, over them, the file itself."""
    file: dict[str, Any] = yaml.safe_load((conf_dir() / f"{name}.yaml").read_text(encoding="utf-8"))
    entries = [entry for entry in file.pop("defaults") if isinstance(entry, dict)]
    choices = {
        group: option for entry in entries for group, option in entry.items() if not group.startswith("override")
    }
    values: dict[str, Any] = {}
    for group, option in choices.items():
        if option is not None:
            text = (conf_dir() / group / f"{option}.yaml").read_text(encoding="utf-8")
            values |= flat(yaml.safe_load(text), "" if text.startswith("# @package _global_") else group + ".")
    return choices, values | dict(flat(file))


def group_options() -> dict[str, list[str]]:
    """Group -> the names that may be chosen, from the files in conf/."""
    folders = sorted(path for path in conf_dir().iterdir() if path.is_dir())
    return {path.name: sorted(file.stem for file in path.glob("*.yaml")) for path in folders}
