"""Draws breaks of the package's code, which mutmut makes, for `make mutants`.

It leaves out what no test could see, and breaks that say nothing.
"""

import ast
import difflib
import random
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators

CHECKOUT = Path(__file__).parents[2]
# What is broken, below clipscale/.
TARGETS = ("loss", "step", "data/order.py", "data/loader", "checkpoint", "distributed")
# A larger number is a limit, which somebody chose: one more is as good.
LARGE = 16
# Functions whose arguments are words for people, or for a type checker.
WORDS = {
    "log_line",
    "log_warning",
    "print_line",
    "print_failure",
    "warning",
    "info",
    "filterwarnings",
    "record_function",
    "cast",
    "TypeVar",
}
# Conditions of branches that only a GPU takes (make gpu-right tests these).
ON_GPU = re.compile(r"cuda|gpu|TMA|HIDES_DOTS|torch\.__version__|TYPE_CHECKING")
# Statements that ask a GPU, and arguments that say where a tensor lies: without a GPU there is one place.
ASKS_GPU = re.compile(r"torch\.cuda\.(?!is_available)")
PLACE = re.compile(r"device\s*=|\"(cpu|cuda)\"$")


@dataclass(frozen=True)
class Mutant:
    """A file with one break."""

    file: str
    line: int
    change: str
    source: str

    @cached_property
    def lines(self) -> range:
        """The lines of the broken statement, up to its body if it has one. A function's head has all its lines."""
        nodes = ast.walk(ast.parse((CHECKOUT / self.file).read_text()))
        statements = (node for node in nodes if isinstance(node, ast.stmt))
        around = [node for node in statements if node.lineno <= self.line <= (node.end_lineno or 0)]
        inner = max(around, key=lambda node: node.lineno)
        body = getattr(inner, "body", None)
        if body and not isinstance(inner, ast.FunctionDef):
            return range(inner.lineno, max(body[0].lineno, inner.lineno + 1))
        return range(inner.lineno, (inner.end_lineno or 0) + 1)


class Places(cst.CSTVisitor):
    """Collects all breaks of a file by their line, of code that does something a test could see."""

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self, module: cst.Module) -> None:
        super().__init__()
        self.module = module
        self.by_line: dict[int, list[tuple[cst.CSTNode, cst.CSTNode]]] = defaultdict(list)

    def on_visit(self, node: cst.CSTNode) -> bool:
        if self._is_noise(node):
            return False
        if isinstance(node, cst.If | cst.IfExp) and ON_GPU.search(self.module.code_for_node(node.test)):
            if node.orelse:
                node.orelse.visit(self)
            return False
        position: Any = self.get_metadata(PositionProvider, node, None)
        if position:
            for kind, operator in mutation_operators:
                if isinstance(node, kind):
                    self.by_line[position.start.line] += [(node, other) for other in operator(node)]
        return True

    def _is_noise(self, node: cst.CSTNode) -> bool:
        """Whether it is an annotation, docstring, decorator, import, error, assertion, or a text for people."""
        if isinstance(node, cst.Annotation | cst.Decorator | cst.Raise | cst.Assert | cst.Import | cst.ImportFrom):
            return True
        if isinstance(node, cst.Assign) and self.module.code_for_node(node).startswith("__all__"):
            return True
        if isinstance(node, cst.SimpleStatementLine) and ASKS_GPU.search(self.module.code_for_node(node)):
            return True
        if isinstance(node, cst.Arg) and PLACE.match(self.module.code_for_node(node)):
            return True
        if isinstance(node, cst.Expr) and isinstance(node.value, cst.BaseString):
            return True
        if isinstance(node, cst.Call):
            name = node.func.attr if isinstance(node.func, cst.Attribute) else node.func
            return isinstance(name, cst.Name) and name.value in WORDS
        return False


@dataclass(frozen=True)
class Line:
    """A line of a file, and the breaks that mutmut knows for it, except for crude ones."""

    file: str
    number: int
    module: cst.Module
    changes: tuple[tuple[cst.CSTNode, cst.CSTNode], ...]

    def mutants(self, draw: random.Random | None = None) -> Iterator[Mutant]:
        """The breaks that are Python and another program, in a random order if `draw` is given."""
        source = self.module.code
        for node, other in draw.sample(self.changes, len(self.changes)) if draw else self.changes:
            broken = self.module.deep_replace(node, other)
            assert isinstance(broken, cst.Module)
            with suppress(SyntaxError):
                if ast.dump(ast.parse(broken.code)) != ast.dump(ast.parse(source)):
                    yield Mutant(self.file, self.number, changed(source, broken.code), broken.code)


def lines_of(file: str) -> list[Line]:
    """The lines of a file that can be broken."""
    wrapper = MetadataWrapper(cst.parse_module((CHECKOUT / file).read_text()))
    places = Places(wrapper.module)
    wrapper.visit(places)
    changes = {number: [pair for pair in pairs if not crude(*pair)] for number, pairs in places.by_line.items()}
    return [Line(file, number, wrapper.module, tuple(pairs)) for number, pairs in sorted(changes.items()) if pairs]


def crude(node: cst.CSTNode, other: cst.CSTNode) -> bool:
    """Whether a break says nothing.

    That is None in the place of a value, which ends the program anywhere; the loss of an argument that says where a
    tensor lies; another case of letters in a string; or a limit that is moved by a little.
    """
    if isinstance(node, cst.Call) and isinstance(other, cst.Call):
        if len(other.args) == len(node.args):
            return other.func is node.func
        left_out = [arg for arg in node.args if not any(arg.value is each.value for each in other.args)]
        return any(PLACE.match(cst.Module([]).code_for_node(arg)) for arg in left_out)
    if isinstance(other, cst.SimpleString):
        return "XX" not in other.value
    if isinstance(node, cst.Integer | cst.Float):
        return node.evaluated_value > LARGE
    return isinstance(node, cst.Assign | cst.AnnAssign | cst.Lambda)


def changed(before: str, after: str) -> str:
    """The lines that differ, as `old -> new`."""
    lines = [*difflib.unified_diff(before.splitlines(), after.splitlines(), n=0)][3:]
    old, new = (" ".join(line[1:].strip() for line in lines if line.startswith(mark)) for mark in "-+")
    return f"{old} -> {new}"


def drawn(number: int, seed: int, files: Sequence[str]) -> list[Mutant]:
    """Draw `number` lines, all equally likely, and one break of each, all equally likely."""
    draw = random.Random(seed)
    lines = [line for file in files for line in lines_of(file)]
    firsts = (next(line.mutants(draw), None) for line in draw.sample(lines, len(lines)))
    return [*islice(filter(None, firsts), number)]


def target_files() -> list[str]:
    paths = [CHECKOUT / "clipscale" / name for name in TARGETS]
    files = [file for path in paths for file in ([path] if path.is_file() else path.rglob("*.py"))]
    return sorted(str(file.relative_to(CHECKOUT)) for file in files if file.stat().st_size)
