"""What imports what, as the architecture page has it, and who reads the settings."""

import ast
import pickle
import re
import sys
from functools import cache
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name, walk_packages
from symtable import symtable

import pytest

from clipscale.config.presets import PACKAGE
from tests.support.ranks import run_ranks
from tests.support.runs import four_step_config
from tests.support.syntax import tree_of

CHECKOUT = PACKAGE.parent
PAGE = CHECKOUT / "docs/contributing/architecture.md"


# Who reads a section of the settings: where a run, a verb or its processes begin; and the one owner of each section.
READS_SETTINGS = {
    "clipscale.config.train_config": ["cli/*", "config/*", "launch/local.py", "start/*", "tools/*", "train.py"],
    "clipscale.config.data": ["config/*", "data/*", "start/*", "tools/*"],
    "clipscale.config.model": ["config/*", "models/*", "start/*", "tools/*"],
    "clipscale.config.run_model": ["cli/*", "config/*", "tools/*"],
    "clipscale.config.checks": ["cli/*", "config/*", "launch/local.py", "start/*", "tools/*"],
    "clipscale.config.config_file": ["cli/*", "config/*", "start/*", "tools/*"],
    "clipscale.config.stages": [  # below `start/`, its classes `Stage` and `OptimizerPolicy`, which are no settings
        "config/*",
        "run/train_loop.py",
        "start/*",
        "step/checkpoint_state.py",
    ],
    "clipscale.config.sections": [
        "config/*",
        "tools/*",
        "launch/local.py",
        "eval/set_paths.py",
        "eval/suites.py",
        "step/optim.py",
    ],
}


def test_the_settings_end_where_a_run_begins() -> None:
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE)
        for module, line in imported_modules(tree_of(path)).items():
            readers = READS_SETTINGS.get(module)
            if readers is not None:
                assert any(name.match(pattern) or pattern[:-1] == f"{name.parts[0]}/" for pattern in readers), (
                    f"{name}:{line} reads settings: take what it uses as arguments"
                )


def importable(name: str) -> bool:
    """Whether a dotted name is a module or a folder of this checkout, or a name at the top level of a module."""
    place = CHECKOUT / name.replace(".", "/")
    if place.is_dir() or place.with_suffix(".py").is_file():
        return True
    return place.name in names_of_module(place.parent)


@cache
def names_of_module(place: Path) -> set[str]:
    """The names at the top level of a module or of a folder's `__init__.py`; empty if there is no such file."""
    file = place.with_suffix(".py")
    if not file.is_file():
        file = place / "__init__.py"
    if not file.is_file():
        return set()
    names = symtable(file.read_text(encoding="utf-8"), str(file), "exec").get_symbols()
    return {each.get_name() for each in names if each.is_assigned() or each.is_imported()}


@pytest.mark.parametrize("folder", ["benchmarks", "clipscale", "docs", "tests"])
def test_everything_of_the_package_that_a_file_imports_exists(folder: str) -> None:
    """Imports inside functions count, too. mypy sees none of docs/."""
    missing = []
    for path in (CHECKOUT / folder).rglob("*.py"):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                continue
            missing += [
                f"{path.relative_to(CHECKOUT)}:{node.lineno}: {name}"
                for name in names
                if re.match(r"(clipscale|tests)\.\w+\.", name) and not importable(name)
            ]
    assert missing == []


def test_only_the_command_line_names_tools() -> None:
    """Neither an import nor a name in a string, wherever it stands."""
    named = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if re.search(r"clipscale(\.| import )(tools|cli)\b", path.read_text(encoding="utf-8"))
        and path.relative_to(PACKAGE).parts[0] not in ("tools", "cli")
    }
    assert named == {"__main__.py"}


def part_of(path: Path) -> str:
    """The folder of clipscale/ that a file is in, or the file itself where it lies beside the folders."""
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else path.stem


def imported_modules(tree: ast.Module) -> dict[str, int]:
    """The modules and folders of the package that a module imports, inside functions too -> the line."""
    found: dict[str, int] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        names = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}", *(f"{node.module}.{name}" for name in names)]
        for name in names:
            place = CHECKOUT / name.replace(".", "/")
            if name.startswith("clipscale.") and (place.is_dir() or place.with_suffix(".py").is_file()):
                found[name] = node.lineno
    return found


def imported_parts(path: Path) -> set[str]:
    """The parts of the package that a file imports, inside functions too."""
    return {name.split(".")[1] for name in imported_modules(tree_of(path))} - {part_of(path)}


def test_imports_are_seen_in_every_form() -> None:
    """A module of a folder, a name of a module, a module by its full name, and inside a function."""
    planted = """
from clipscale.config import sections
from clipscale.loss.api import contrastive_loss
import clipscale.models.towers
from clipscale import __version__, train
def f():
    import clipscale.step as step
"""
    assert sorted(imported_modules(ast.parse(planted))) == [
        "clipscale.config",
        "clipscale.config.sections",
        "clipscale.loss.api",
        "clipscale.models.towers",
        "clipscale.step",
        "clipscale.train",
    ]


def test_no_two_folders_import_each_other() -> None:
    """An import by way of other folders counts, too."""
    imports: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        imports.setdefault(part_of(path), set()).update(imported_parts(path))
    order = [*TopologicalSorter(imports).static_order()]  # raises CycleError, which names the cycle
    assert order[0] == "common" and len(order) > 15
    page = PAGE.read_text().partition("## What imports what")[2].split("```")[1]
    rows = [line.split() for line in page.splitlines()[1:]]
    shown = {name: {*parts, "common"} for name, *parts in rows}
    actual = {name: parts for name, parts in imports.items() if parts - {"common"} and not name.startswith("__")}
    assert shown == actual
    for i, (name, *_) in enumerate(rows):
        assert not shown[name] & {above for above, *_ in rows[: i + 1]}, f"{name} imports a row above it"


def rows_of_the_parts() -> list[list[str]]:
    """The table of the core and what is around it: part, folders and files, lines, and which tools use it."""
    table = PAGE.read_text().partition("## The core, and what is around it")[2].partition("|--:|---|\n")[2]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.partition("\n\n")[0].splitlines()]


def files_of(place: str) -> list[Path]:
    """The Python files of a folder of clipscale/, or the file itself."""
    return [PACKAGE / place] if place.endswith(".py") else [*(PACKAGE / place).rglob("*.py")]


def test_every_file_is_of_one_part_and_the_parts_have_their_lines() -> None:
    counted: list[Path] = []
    for part, places, lines, _ in rows_of_the_parts():
        files = [path for place in re.findall(r"`([\w./]+)`", places) for path in files_of(place)]
        actual = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
        assert actual == pytest.approx(int(lines.replace(",", "")), rel=0.1), f"{part}: {actual} lines"
        counted += files
    assert sorted(counted) == sorted(
        {*PACKAGE.rglob("*.py")} - {PACKAGE / "__init__.py", PACKAGE / "tools/__init__.py"}
    )


def test_the_tools_that_other_tools_use_are_those_of_the_table() -> None:
    """Any other tool can be deleted with its entry of the command line."""
    used_by: dict[str, set[str]] = {}
    for path in (PACKAGE / "tools").rglob("*.py"):
        tool = path.relative_to(PACKAGE / "tools").parts[0].removesuffix(".py")
        for used in re.findall(r"clipscale\.tools(?:\.| import )(\w+)", path.read_text(encoding="utf-8")):
            if used != tool:
                used_by.setdefault(used, set()).add(tool)
    shown = {
        places.strip("`").removeprefix("tools/").removesuffix(".py"): {*re.findall(r"\w+", users)}
        for _, places, _, users in rows_of_the_parts()
        if users
    }
    assert used_by == shown


def trained_by_the_core_alone(rank: int, ranks: int, config: bytes) -> tuple[int, set[str]]:
    """The steps of a run where the parts around the core cannot be imported, and the parts that it has loaded."""
    forget_the_package()
    around = {f"clipscale.{part}" for part in ("cli", "launch", "tools")}
    sys.modules.update(dict.fromkeys(around))  # an import of these then fails
    train = resolve_name("clipscale.train:train")
    result = train(pickle.loads(config))
    for name in around:
        del sys.modules[name]
    return result["step"], loaded_parts()


def test_the_core_trains_alone(shards: str, tmp_path: Path) -> None:
    config = four_step_config(shards, tmp_path / "run")
    ((steps, parts),) = run_ranks(trained_by_the_core_alone, 1, pickle.dumps(config))
    core = {name for part, places, *_ in rows_of_the_parts() if "core" in part for name in re.findall(r"\w+", places)}
    assert steps == 4 and parts == core - {"py"}


def test_the_settings_know_the_choices_of_the_loss_alone() -> None:
    modules = set()
    for path in (PACKAGE / "config").rglob("*.py"):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("clipscale.loss"):
                modules.add(node.module)
    assert modules == {"clipscale.loss.choices", "clipscale.loss.objective"}


def test_models_know_nothing_of_distribution() -> None:
    for path in (PACKAGE / "models").rglob("*.py"):
        found = re.search(
            r"import.*\bdist\b|torch\.distributed|clipscale\.(distributed|step|start|loss)\b", path.read_text()
        )
        assert found is None, f"{path.name}: {found}"


def forget_the_package() -> None:
    """Let the next import of each module be its first."""
    for name in [name for name in sys.modules if re.match(r"clipscale\b", name)]:
        del sys.modules[name]


def loaded_parts() -> set[str]:
    """The package's parts that this process has."""
    return {name.split(".")[1] for name in sys.modules if name.startswith("clipscale.")}


def parts_of_models(*_: int) -> set[str]:
    """The parts of a process that has imported every module of the models."""
    forget_the_package()
    for module in walk_packages([str(PACKAGE / "models")], "clipscale.models."):
        import_module(module.name)
    return loaded_parts()


def test_a_process_with_the_models_has_no_ranks() -> None:
    (parts,) = run_ranks(parts_of_models, 1)
    assert parts - {"run_folder"} == {"common", "config", "data", "models"}


def parts_of_the_libraries(*_: int) -> tuple[set[str], set[str], set[str]]:
    """The parts of a process that has imported every module of the gradient cache, with the files of `step/` beside it;
    and its parts when it has used the loss, too."""
    forget_the_package()
    for module in walk_packages([str(PACKAGE / "step" / "cache")], "clipscale.step.cache."):
        import_module(module.name)
    cache = loaded_parts()
    beside = {name for name in sys.modules if re.match(r"clipscale\.step\.(?!cache\b)", name)}
    resolve_name("clipscale:contrastive_loss")
    return cache, beside, loaded_parts()


def test_the_gradient_cache_and_the_loss_load_no_other_part_of_the_program() -> None:
    ((cache, beside, both),) = run_ranks(parts_of_the_libraries, 1)
    assert cache == {"common", "step"} and not beside and not both & {"data", "config", "distributed"}
