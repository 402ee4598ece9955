"""The wheel holds all that `clipscale train` needs, and the architecture page names what exists."""

import ast
import io
import pickle
import re
import subprocess
import sys
import sysconfig
import tokenize
import tomllib
import venv
import zipfile
from functools import cache
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name, walk_packages
from symtable import symtable

import pytest

from clipscale.cli.verbs import VERBS
from clipscale.config.presets import PACKAGE
from clipscale.config.setting import settings_of
from clipscale.config.train_config import TrainConfig
from clipscale.run_folder.records import StepRecord
from tests.conftest import TINY
from tests.support.ranks import run_ranks
from tests.support.runs import four_step_config
from tests.support.syntax import tree_of

CHECKOUT = PACKAGE.parent
PAGES = [
    CHECKOUT / f"docs/contributing/{name}.md"
    for name in ("architecture", "collectives", "debugging", "glossary", "how-to-add", "printing")
]
# Nothing but the environment's own packages.
ALONE = {"PYTHONPATH": ""}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    words = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(CHECKOUT)]
    built = subprocess.run(words, capture_output=True, text=True, timeout=240)
    assert built.returncode == 0, built.stdout + built.stderr
    return next(folder.glob("clipscale-*.whl"))


def test_the_wheel_holds_the_package_and_its_configuration(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    files = [path for kind in ("py", "html", "css", "js", "yaml") for path in PACKAGE.rglob(f"*.{kind}")]
    sources = {f"clipscale/{path.relative_to(PACKAGE)}" for path in files}
    settings = {f"clipscale/conf/{path.relative_to(CHECKOUT / 'conf')}" for path in CHECKOUT.glob("conf/**/*.yaml")}
    assert settings
    assert not (sources | settings) - names
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel. It sees the dependencies of this one, but not this checkout."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, with_pip=False, symlinks=True)
    site = home / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    install = [sys.executable, "-m", "pip", "--python", str(home / "bin/python"), "install", "--quiet", "--no-deps"]
    subprocess.run([*install, "--no-index", str(wheel)], check=True, timeout=600)
    # Python does not follow the .pth files in a folder added this way, such as the editable install of this checkout.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return home


@pytest.mark.slow  # it installs the wheel, whose files the test above knows
def test_the_wheel_composes_a_run_from_another_folder(installed: Path, tmp_path: Path, environment: dict) -> None:
    (tmp_path / "x.tar").touch()
    words = [str(installed / "bin/clipscale"), "train", *TINY, "data.train=x.tar", "--cfg", "job"]
    done = subprocess.run(words, cwd=tmp_path, env=environment | ALONE, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "- x.tar\n" in done.stdout
    where = [str(installed / "bin/python"), "-c", "import clipscale; print(clipscale.__file__)"]
    done = subprocess.run(where, cwd=tmp_path, env=environment | ALONE, capture_output=True, text=True, check=True)
    assert str(installed) in done.stdout


@pytest.mark.slow  # imports torch; the ordinary test above finds what is missing of the package and its configuration
def test_the_wheel_trains_from_another_folder(installed: Path, shards: str, tmp_path: Path, environment: dict) -> None:
    words = [str(installed / "bin/clipscale"), "train", *TINY, f"data.train={shards}", "run=wheel"]
    done = subprocess.run(words, cwd=tmp_path, env=environment | ALONE, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "done: runs/wheel (step 2" in done.stdout


# A page or a file of the repository.
ELSEWHERE = re.compile(r"\b(docs|clipscale|launch|conf)/[\w/-]+\.(md|yaml|py|sh)")


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cpu"])
def test_the_container_has_every_extra_that_a_user_needs(name: str) -> None:
    extras = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys()
    installed = re.findall(r'"\.\[(.*?)\]"', (CHECKOUT / "docker" / name).read_text())
    assert {*installed[0].split(",")} == extras - {"dev", "bench", "clients"}


def test_every_file_opens_with_a_sentence() -> None:
    for path in PACKAGE.rglob("*.py"):
        if tree_of(path).body:
            opening = (ast.get_docstring(tree_of(path)) or "").partition("\n\n")[0]
            assert len(opening.split()) > 2, f"{path} does not say what it is for"
            assert opening.endswith((".", ":")), f"{path} opens with half a sentence: {opening}"


def test_files_that_a_file_opens_by_naming_are_in_its_folder_or_have_their_path() -> None:
    for path in PACKAGE.rglob("*.py"):
        opening = ast.get_docstring(tree_of(path)) or ""
        for name in re.findall(r"[\w./]*\w\.py\b", opening):
            assert any((folder / name).exists() for folder in (path.parent, PACKAGE, PACKAGE.parent)), f"{path}: {name}"


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


# Words with one meaning in the whole package -> the type of what they name; perhaps `| None`. See glossary.md.
TYPE_OF_WORD = {
    "agreement": "StepAgreement",
    "before_chunk": "Poll",
    "chunk_sizes": "ChunkSizes",
    "backend_name": "str",
    "epoch": "int",
    "epoch_samples": "int",
    "exchange_name": "str",
    "global_batch": "int",
    "is_last_backward": "bool",
    "keep_bytes": "float",
    "local_batch": "int",
    "objective_name": "str",
    "poll": "Poll",
    "run_dir": "Path",
    "runtime": "LossRuntime",
    "stage": "Stage",
    "text_layout": "TextLayout",
    "texts_per_sample": "int",
    "timer": "StepTimer",
    "tower_input": "object",
    "world": "World",
    "world_size": "int",
}


def test_a_word_of_the_main_path_names_one_type() -> None:
    found: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(tree_of(path)):
            match node:
                case ast.arg(arg=word, annotation=ast.expr() as annotation):
                    found.setdefault(word, set()).add(ast.unparse(annotation))
                case ast.AnnAssign(target=ast.Name(id=word) | ast.Attribute(attr=word), annotation=annotation):
                    found.setdefault(word, set()).add(ast.unparse(annotation))
                case ast.Assign(targets=[ast.Name(id=word)], value=ast.Constant(value=value)) if value is not None:
                    found.setdefault(word, set()).add(type(value).__name__)
    types = {word: {name.strip("'").removesuffix(" | None") for name in found[word]} for word in TYPE_OF_WORD}
    assert types == {word: {name} for word, name in TYPE_OF_WORD.items()}


# Most annotations of the package that say nothing of a type, `Any`, or of its keys, `Record`.
MAX_UNTYPED = 110


def untyped_names(tree: ast.Module) -> list[str]:
    """`Any` and `Record` in the annotations of a module, also where an annotation is a string."""
    found = []
    for node in ast.walk(tree):
        for annotation in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
                annotation = ast.parse(annotation.value, mode="eval")
            if annotation is not None:
                names = (part.id for part in ast.walk(annotation) if isinstance(part, ast.Name))
                found += [name for name in names if name in ("Any", "Record")]
    return found


def test_annotations_say_what_is_there() -> None:
    planted = "def f(a: Any, *b: 'list[Record]', **c: int) -> dict[str, Any]:\n    d: Record = a\n    return Any"
    assert sorted(untyped_names(ast.parse(planted))) == ["Any", "Any", "Record", "Record"]
    count = {str(path): len(untyped_names(tree_of(path))) for path in PACKAGE.rglob("*.py")}
    most = sorted(count, key=count.__getitem__)[-5:]
    assert sum(count.values()) <= MAX_UNTYPED, f"most are in {most}"


def test_no_text_of_a_program_names_a_file_that_a_wheel_lacks() -> None:
    """Pages of docs/, and files by their place in the repository: who installed a wheel has neither."""
    for path in PACKAGE.rglob("*.py"):
        tree = tree_of(path)
        owners = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        firsts = [node.body[0] for node in ast.walk(tree) if isinstance(node, owners) and node.body]
        docstrings = {id(first.value) for first in firsts if isinstance(first, ast.Expr)}
        texts = [n for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
        named = [text.value for text in texts if id(text) not in docstrings and ELSEWHERE.search(text.value)]
        assert not named, f"{path}: {named}"
    for path in [*PACKAGE.rglob("*.yaml"), *PACKAGE.rglob("*.txt")]:
        lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
        assert not [line for line in lines if ELSEWHERE.search(line)], path


def definitions() -> set[str]:
    """Classes, functions, constants, methods and attributes as `Class.name`, of all modules and of this one."""
    names = set()
    for path in (*PACKAGE.rglob("*.py"), Path(__file__)):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            if isinstance(node, ast.ClassDef):
                names |= {f"{node.name}.{member.name}" for member in node.body if isinstance(member, ast.FunctionDef)}
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
    return names


def test_every_name_on_the_pages_of_the_code_exists() -> None:
    text = re.sub(r"^```.*?^```$", "", "\n".join(page.read_text() for page in PAGES), flags=re.M | re.S)
    words = set(re.findall(r"`([\w./]+)`", text))
    places = [PACKAGE, CHECKOUT, *(path for path in PACKAGE.rglob("*") if path.is_dir())]
    known = definitions() | settings_of(TrainConfig).keys() | VERBS.keys()
    known |= {"async_save", "clipscale.GradCache", "torch.optim.Optimizer", "metrics.jsonl"}
    known |= {"sys.modules", "module.", "_orig_mod"}
    parts = ("encode", "loss", "replay", "optim")
    known |= {*StepRecord.__annotations__, "mem_peak_bytes", *(f"{part}_s" for part in parts), "mem_encode_bytes"}
    missing = {word for word in words - known if not any((place / word).exists() for place in places)}
    assert missing == set()


# Names of other packages, examples of users' names, and parts of such names.
NAMES_OF_OTHERS = {"A320", "CoCa", "Lean", "NAME", "caption_2", "class_01", "filter_NAME", "filter_no_NAME", "generate"}
NAMES_OF_OTHERS |= {"ENDING", "_orig_mod", "init_parameters", "lrr", "step_N", "student", "to_empty"}


def test_every_name_in_comments_and_docstrings_exists() -> None:
    """A renamed field leaves its old name behind there: `name` and `a.name` are words of the code or of its data."""
    files = [path for top in (PACKAGE, CHECKOUT / "conf") for path in top.rglob("*") if path.is_file()]
    known = NAMES_OF_OTHERS | {part for path in files for part in path.relative_to(CHECKOUT).with_suffix("").parts}
    known |= {word for path in files if path.suffix == ".yaml" for word in re.findall(r"\w+", path.read_text())}
    named = {}
    for path in PACKAGE.rglob("*.py"):
        for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
            is_docstring = token.type == tokenize.STRING and '"""' in token.string[:4]
            if is_docstring or token.type == tokenize.COMMENT:
                for words in re.findall(r"`([A-Za-z_][\w.]*)`", token.string):
                    named |= {word: f"{path}:{token.start[0]}" for word in words.split(".") if word}
            else:
                known |= set(re.findall(r"\w+", token.string))
    assert {word: place for word, place in named.items() if word not in known} == {}


def test_every_python_file_that_the_package_names_exists() -> None:
    """In comments, docstrings and strings. A renamed file leaves its old name behind there."""
    files = [f"/{path.relative_to(CHECKOUT)}" for top in (PACKAGE, CHECKOUT / "tests") for path in top.rglob("*.py")]
    of_others = {"optim/_optim_factory.py"}  # timm's
    missing = [
        f"{path.relative_to(CHECKOUT)}: {name}"
        for path in PACKAGE.rglob("*.py")
        for name in re.findall(r"[\w/]*\w\.py\b", path.read_text(encoding="utf-8"))
        if name not in of_others and not any(file.endswith(f"/{name}") for file in files)
    ]
    assert missing == []


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
    page = PAGES[0].read_text().partition("## What imports what")[2].split("```")[1]
    rows = [line.split() for line in page.splitlines()[1:]]
    shown = {name: {*parts, "common"} for name, *parts in rows}
    actual = {name: parts for name, parts in imports.items() if parts - {"common"} and not name.startswith("__")}
    assert shown == actual
    for i, (name, *_) in enumerate(rows):
        assert not shown[name] & {above for above, *_ in rows[: i + 1]}, f"{name} imports a row above it"


def rows_of_the_parts() -> list[list[str]]:
    """The table of the core and what is around it: part, folders and files, lines, and which tools use it."""
    table = PAGES[0].read_text().partition("## The core, and what is around it")[2].partition("|--:|---|\n")[2]
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


@pytest.mark.parametrize("folder", ["config", "cli"])
def test_the_page_of_the_command_line_has_all_modules(folder: str) -> None:
    page = (CHECKOUT / "docs/contributing/command-line.md").read_text()
    table = page.partition(f"| `clipscale/{folder}/` |")[2].partition("\n\n")[0]
    modules = {path.name for path in (PACKAGE / folder).glob("*.py")} - {"__init__.py"}
    assert modules - set(re.findall(r"`(\w+\.py)`", table)) == set()


# A docstring that opens so goes on with the name above it: half a sentence.
HALF = re.compile(r"(Of|So|Also|Else|As|And|Or|But|Not|Nor|Unless|Beyond|Such as|Bit for bit|That of|Those of)\b")


@pytest.mark.parametrize("folder", ["clipscale", "tests", "benchmarks"])
def test_a_docstring_is_whole_sentences(folder: str) -> None:
    halves = []
    count = 0
    for path in (CHECKOUT / folder).rglob("*.py"):
        for node in ast.walk(tree_of(path)):
            match node:  # a docstring, or a text below what it explains
                case ast.Expr(value=ast.Constant(value=str(text))):
                    count += 1
                    if HALF.match(text.lstrip()):
                        halves.append(f"{path.relative_to(CHECKOUT)}:{node.lineno}: {text.strip()[:40]}")
    assert count > 100 and not halves, "\n".join(halves)


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
    assert parts - {"batch", "run_folder"} == {"common", "config", "data", "models"}


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
