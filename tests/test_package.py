"""The wheel holds all that `clipscale train` needs, and names in pages, comments and code are of what exists."""

import ast
import io
import re
import subprocess
import sys
import sysconfig
import tokenize
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from clipscale.cli.verbs import VERBS
from clipscale.config.presets import PACKAGE
from clipscale.config.setting import settings_of
from clipscale.config.train_config import TrainConfig
from clipscale.run_folder.records import StepRecord
from tests.conftest import TINY
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


# Words with one meaning in the whole package -> the type of what they name; perhaps `| None`. See glossary.md.
TYPE_OF_WORD = {
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
    "next_step_sync": "NextStepSync",
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
    """Classes, functions, constants, methods and attributes as `Class.name`: of the package, and of test_imports.py."""
    names = set()
    for path in (*PACKAGE.rglob("*.py"), Path(__file__).with_name("test_imports.py")):
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
