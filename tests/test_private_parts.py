"""What other packages do not document, and the package uses, is in a table, with a test that fails without it."""

import ast
import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from clipscale.config.presets import PACKAGE
from tests.breaks import BREAKS
from tests.support.syntax import tree_of

CHECKOUT = PACKAGE.parent
TABLE = CHECKOUT / "docs/contributing/private-parts.md"
MAX_ROWS = 25
# Bases of other packages that classes of ours read attributes of. Their packages document these attributes.
DOCUMENTED = {"Module", "Conv2d", "Linear", "Optimizer", "FileSystemReader", "FileSystemWriter", "GzipFile"}
# Names with an underscore that Python documents.
OF_PYTHON = {"_replace", "_exit"}
# Longest time of the tests in a copy: 52 breaks took 13 minutes on two busy cores.
TIMEOUT_S = 1800
# Functions that take an attribute's name.
BY_NAME = {"getattr", "hasattr", "setattr", "delattr"}


# ---- what the code uses ----


def is_private(name: str) -> bool:
    return re.match("_[^_]", name) is not None


@dataclass
class OwnClass:
    """What a class of the package defines, what it reads of `self`, and the names of its bases."""

    defined: set[str] = field(default_factory=set)
    read: set[str] = field(default_factory=set)
    bases: set[str] = field(default_factory=set)

    def add(self, node: ast.ClassDef) -> None:
        """Classes of one name are one."""
        for base in node.bases:
            base = base.value if isinstance(base, ast.Subscript) else base
            self.bases.add(ast.unparse(base).rpartition(".")[2])
        for member in node.body:
            if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                self.defined.add(member.name)
            elif isinstance(member, ast.Assign | ast.AnnAssign):
                self.defined |= {name.id for name in ast.walk(member) if is_stored(name) and isinstance(name, ast.Name)}
        for part in ast.walk(node):
            if of_self(part):
                assert isinstance(part, ast.Attribute)
                (self.defined if is_stored(part) else self.read).add(part.attr)


def is_stored(node: ast.AST) -> bool:
    return isinstance(getattr(node, "ctx", None), ast.Store)


def of_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def inherited(classes: dict[str, OwnClass], name: str) -> tuple[set[str], set[str]]:
    """What a class and its bases in the package define, and its bases elsewhere."""
    if name not in classes:
        return set(), {name}
    defined, elsewhere = set(classes[name].defined), set[str]()
    for base in classes[name].bases - {name}:
        more, others = inherited(classes, base)
        defined |= more
        elsewhere |= others
    return defined, elsewhere


def names_in(node: ast.AST) -> set[str]:
    """What a node names of an object or a module."""
    if isinstance(node, ast.Attribute) and not of_self(node):
        return {node.attr}
    if isinstance(node, ast.ImportFrom):
        return {*(node.module or "").split("."), *(alias.name for alias in node.names)}
    if isinstance(node, ast.Import):
        return {name for alias in node.names for name in alias.name.split(".")}
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BY_NAME:
        return {word.value for word in node.args if isinstance(word, ast.Constant) and isinstance(word.value, str)}
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        if re.fullmatch(r"([\w.-]+/)+[\w.-]+", node.value):  # a file
            return {*re.split(r"[/.]", node.value)}
        # `_token` alone may be the end of a name.
        return {*node.value.split(".")} if re.fullmatch(r"([a-z]\w*\.)+_\w+|_[a-z]+(_[a-z]+)+", node.value) else set()
    return set()


def private_parts(trees: Sequence[ast.Module]) -> tuple[set[str], set[str]]:
    """Names with an underscore of other packages that code imports, reads or spells; and the bases of other packages
    of which a class reads what it does not define."""
    nodes = [node for tree in trees for node in ast.walk(tree)]
    names = set[str]().union(*map(names_in, nodes))
    bases = set[str]()
    classes: dict[str, OwnClass] = defaultdict(OwnClass)
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            classes[node.name].add(node)
    classes = dict(classes)
    for name, own in classes.items():
        defined, elsewhere = inherited(classes, name)
        for read in own.read - defined:
            if is_private(read):
                names.add(read)
            elif elsewhere:
                bases |= elsewhere
    return {name for name in names if is_private(name)} - OF_PYTHON, bases


PLANTED = {
    "self._embeds": "class Ours(Theirs):\n    def forward(self):\n        return self._embeds",
    "super()._embeds": "class Ours(Theirs):\n    def _embeds(self):\n        return super()._embeds",
    "by way of a base": "class Base(Theirs): pass\nclass Ours(Base):\n    def forward(self):\n        self._embeds()",
    "an attribute": "encoder._embeds(x)",
    "an import": "from theirs import _embeds",
    "a module": "import theirs._embeds",
    "a string": "getattr(encoder, '_embeds')",
    "a file": "source('theirs/_embeds.py')",
}


@pytest.mark.parametrize("source", PLANTED.values(), ids=PLANTED.keys())
def test_a_private_part_is_found_wherever_it_hides(source: str) -> None:
    assert private_parts([ast.parse(source)])[0] == {"_embeds"}


def test_what_a_class_defines_is_its_own_and_the_rest_its_bases() -> None:
    source = "class Base(Theirs):\n    _a: int\n    def _b(self): self._c = 1\n"
    source += "class Ours(Base):\n    def d(self): return self._a, self._b(), self._c, self.d"
    assert private_parts([ast.parse(source)]) == (set(), set())
    assert private_parts([ast.parse(source + ", self.transport")]) == (set(), {"Theirs"})


# ---- the table ----


@dataclass(frozen=True)
class Row:
    what: str
    where: str
    tests: str

    @property
    def part(self) -> str:
        """The first name that the row has."""
        return re.search("`(.+?)`", self.what)[1]


def rows() -> Iterator[Row]:
    for line in TABLE.read_text().splitlines():
        if line.startswith("| ") and not line.startswith("| what "):
            _, what, where, _, tests, _ = line.split("|")
            yield Row(what, where, tests)


def package() -> list[ast.Module]:
    return [tree_of(path) for path in sorted(PACKAGE.rglob("*.py"))]


def test_every_private_part_of_another_package_has_a_row() -> None:
    listed = [*rows()]
    assert len(listed) <= MAX_ROWS
    spans = [name for row in listed for name in re.findall("`(.+?)`", row.what)]
    words = {word for name in spans for word in re.split(r"\W+", name)}
    names, bases = private_parts(package())
    private = {word for word in words if is_private(word)}
    assert (names - private, private - names) == (set(), set()), f"{TABLE.name} lacks, and names in vain"
    assert bases - words == DOCUMENTED, "bases of other packages with attributes that they do not document need a row"


def test_every_row_names_its_files_and_its_tests_and_each_has_a_break() -> None:
    named = set()
    for row in rows():
        files = re.findall("`(.+?)`", row.where)
        assert files and all((CHECKOUT / file).is_file() for file in files), row
        for test in re.findall("`(.+?)`", row.tests):
            file, _, function = test.partition("::")
            defined = {node.name for node in tree_of(CHECKOUT / file).body if hasattr(node, "name")}
            assert function in defined, test
            named |= {(row.part, file, test) for file in files}
    assert {(part, test) for part, _, test in named} == {(each.part, each.test) for each in BREAKS}
    assert {(part, file) for part, file, _ in named} == {(each.part, each.file) for each in BREAKS}


def test_every_break_is_of_code_that_is_there() -> None:
    for each in BREAKS:
        each.broken(CHECKOUT)


# ---- without the part, its test fails ----


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int | None, dict]:
    """pytest's status and output by the number of the break; None: of all named tests, with nothing broken."""
    command = [sys.executable, "-m", "tests.breaks", str(tmp_path_factory.mktemp("copy"))]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return {each["number"]: each for each in map(json.loads, done.stdout.splitlines())}


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
def test_the_named_tests_pass(runs: dict[int | None, dict]) -> None:
    assert runs[None]["status"] == 0, runs[None]["output"]


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("number", range(len(BREAKS)), ids=lambda n: f"{BREAKS[n].part} in {BREAKS[n].file}")
def test_without_a_part_its_test_fails(number: int, runs: dict[int | None, dict]) -> None:
    output = runs[number]["output"]
    assert runs[number]["status"] == 1, output
    assert re.search(rf"^FAILED {re.escape(BREAKS[number].test)}", output, re.M), output
