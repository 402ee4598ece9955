"""make mutants: breaks the core in a hundred places, one at a time, and says which breaks no test notices.

mutmut makes the breaks. This script draws them by a seed. It chooses the tests of each by its file's path, and of these
the ones that ran its line when there was no break. It runs them, the quick ones first, in a fork of one process that
has loaded all other packages, in a copy of the checkout.
"""

import argparse
import ast
import difflib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import libcst as cst
import pytest
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators

from tests.support import line_notes

CHECKOUT = Path(__file__).parents[1]
# What is broken, below clipscale/.
TARGETS = ("loss", "step", "data/order.py", "data/loader", "checkpoint", "distributed")
# Further tests of a file, beside its own folder's, by the start of its path.
MORE = {
    "step": ("step", "test_exactness.py", "start", "distributed", "test_train.py"),
    "distributed": (
        "test_exactness.py",
        "checkpoint/test_ranks.py",
        "launch",
        "lifecycle",
        "test_train.py",
        "test_faults.py",
    ),
    "data/order.py": ("data/loader", "data/shards/test_subset.py"),
    "data/loader": ("data/shards/test_subset.py", "data/shards/test_index.py", "test_train.py", "test_faults.py"),
    "checkpoint": ("start", "test_train.py", "test_faults.py"),
    "loss": ("step/cache/test_grad_cache.py", "test_exactness.py", "start/test_texts.py"),
}
# Kernels run in a process of its own (Triton's interpreter), which is the first of their tests.
KERNELS = re.compile(r"/kernel\.py$|^loss/triton/")
INTERPRETER = "loss/triton/test_interpreter.py"
# What every interpreter of the tests runs first, to note the lines.
NOTES = """
import json
from pathlib import Path
from tests.support.line_notes import note_lines
folder = Path(__file__).parent
note_lines(json.loads((folder / "wanted.json").read_text()), folder / "notes.jsonl")
"""
# A copy's broken file, as it was.
WHOLE = "whole.py"
# A larger number is a limit, which somebody chose: one more is as good.
LARGE = 16
# Functions whose arguments are words for people, or for a type checker.
WORDS = {
    "log_line",
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
        """Its statement's lines, up to the body if it has one; all lines of a function whose head is broken."""
        nodes = ast.walk(ast.parse((CHECKOUT / self.file).read_text()))
        statements = (node for node in nodes if isinstance(node, ast.stmt))
        around = [node for node in statements if node.lineno <= self.line <= (node.end_lineno or 0)]
        inner = max(around, key=lambda node: node.lineno)
        body = getattr(inner, "body", None)
        if body and not isinstance(inner, ast.FunctionDef):
            return range(inner.lineno, max(body[0].lineno, inner.lineno + 1))
        return range(inner.lineno, (inner.end_lineno or 0) + 1)


class Places(cst.CSTVisitor):
    """All breaks of a file by their line: those of code that does something a test could see."""

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
        """Annotations, docstrings, decorators, imports, errors, assertions, and what is written for people."""
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
    """None in the place of a value, which ends the program wherever it comes by; an argument that says where a tensor
    lies, left out; changes of case in a string; a limit moved by a little."""
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
    """Draws `number` lines, all equally likely, and one break of each, all equally likely."""
    draw = random.Random(seed)
    lines = [line for file in files for line in lines_of(file)]
    firsts = (next(line.mutants(draw), None) for line in draw.sample(lines, len(lines)))
    return [*islice(filter(None, firsts), number)]


def target_files() -> list[str]:
    paths = [CHECKOUT / "clipscale" / name for name in TARGETS]
    files = [file for path in paths for file in ([path] if path.is_file() else path.rglob("*.py"))]
    return sorted(str(file.relative_to(CHECKOUT)) for file in files if file.stat().st_size)


def tests_of(file: str) -> list[str]:
    """The test files of a file of the package, in the order in which they run: its mirror, its folder, and MORE."""
    below = Path(file).relative_to("clipscale")
    names = [f"{below.parent}/test_{below.name}"]
    if KERNELS.search(str(below)):
        names.append(INTERPRETER)
    names.append(str(below.parent))
    if below.parts[0] == "loss":
        names.append("loss")
    names += [name for start, more in MORE.items() if str(below).startswith(start) for name in more]
    paths = [CHECKOUT / "tests" / name for name in names]
    files = [path for name in paths for path in (sorted(name.rglob("test_*.py")) if name.is_dir() else [name])]
    return list(dict.fromkeys(str(path.relative_to(CHECKOUT)) for path in files if path.is_file()))


# ---- running ----


class Noting:
    """A plugin of pytest: the environment names the test that runs, or the fixture that several tests share."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.sharing: dict[str, list[str]] = defaultdict(list)
        self.failed: list[str] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Function) -> Iterator[None]:
        began = time.monotonic()
        for name in item.fixturenames:
            self.sharing[f"fixture {name}"].append(item.nodeid)
        os.environ[line_notes.TEST] = item.nodeid
        try:
            return (yield)
        finally:
            del os.environ[line_notes.TEST]
            self.seconds[item.nodeid] = time.monotonic() - began

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and report.nodeid not in self.failed:
            self.failed.append(report.nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef) -> Iterator[None]:
        before = os.environ[line_notes.TEST]
        if fixturedef.scope != "function":
            os.environ[line_notes.TEST] = f"fixture {fixturedef.argname}"
        try:
            return (yield)
        finally:
            os.environ[line_notes.TEST] = before

    def pytest_sessionfinish(self) -> None:
        Path("noted.json").write_text(json.dumps(vars(self)))


class Choice:
    """A plugin of pytest: it runs these tests alone, in this order."""

    def __init__(self, tests: Sequence[str]) -> None:
        self.places = {test: place for place, test in enumerate(tests)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        chosen = [item for item in items if item.nodeid in self.places]
        items[:] = sorted(chosen, key=lambda item: self.places[item.nodeid])


@dataclass(frozen=True)
class Record:
    """A run without a break: the seconds of each test, and the tests that run a line (line 0: any line of the file)."""

    seconds: Mapping[str, float]
    running: Mapping[tuple[str, int], set[str]]

    def tests(self, mutant: Mutant) -> list[str]:
        """Returns the tests in its file's test files that run its statement. If none does or it runs outside of tests,
        as on import, those that run anything of the file.

        Its mirror is first, then those files whose tests are quicker.
        """
        found = set[str]().union(*(self.running.get((mutant.file, line), ()) for line in mutant.lines))
        if not found or "" in found:
            found = self.running.get((mutant.file, 0), set())
        files = tests_of(mutant.file)
        tests: dict[str, list[str]] = defaultdict(list)
        for test in sorted(found & self.seconds.keys(), key=lambda test: self.seconds[test]):
            file = test.partition("::")[0]
            if file in files:
                tests[file].append(test)
        cost = {file: sum(self.seconds[test] for test in chosen) for file, chosen in tests.items() if file != files[0]}
        return [test for file in sorted(tests, key=lambda file: cost.get(file, 0)) for test in tests[file]]


def become_pytest(folder: Path, words: Sequence[str], plugins: Sequence[object]) -> NoReturn:
    """Run pytest in a copy of the checkout, and end this process, which is a fork."""
    status = 3
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background, or of nohup, ignores them
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with (folder / "output.txt").open("w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        os.chdir(folder)
        # The kernels' tests are a pytest of their own, which is to stop at its first failure too.
        os.environ |= {"PYTHONPATH": str(folder), "PYTEST_ADDOPTS": "-x"}
        elsewhere = [path for path in sys.path if Path(path).resolve() not in (CHECKOUT, CHECKOUT / "tests")]
        sys.path[:] = [str(folder), *elsewhere]
        for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
            del sys.modules[name]
        if (folder / "sitecustomize.py").exists():
            import_module("sitecustomize")
        options = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--show-capture=no", "--tb=line")
        status = int(pytest.main([*options, f"--basetemp={folder}/tmp", *words], plugins=plugins))
        sys.stdout.flush()
    finally:
        os._exit(status)


def start(folder: Path, words: Sequence[str], *plugins: object) -> int:
    """The process that runs these tests in this copy."""
    for name in ("tmp", ".hypothesis"):
        shutil.rmtree(folder / name, ignore_errors=True)
    process = os.fork()
    if process == 0:
        become_pytest(folder, words, plugins)
    return process


def recorded(mutants: Sequence[Mutant], folders: Sequence[Path], files: Sequence[str]) -> Record:
    """Run the test files once without a break, some in each copy. Tests that fail are left out."""
    seconds: dict[str, float] = {}
    running: dict[tuple[str, int], set[str]] = defaultdict(set)
    processes = []
    for place, folder in enumerate(folders):
        wanted: dict[str, list[int]] = defaultdict(list)
        for each in mutants:
            wanted[str(folder / each.file)] += each.lines
        (folder / "wanted.json").write_text(json.dumps(wanted))
        (folder / "sitecustomize.py").write_text(NOTES)
        processes.append(start(folder, files[place :: len(folders)], Noting()))
    for folder, process in zip(folders, processes, strict=True):
        os.waitpid(process, 0)
        output = (folder / "output.txt").read_text()
        if not (folder / "noted.json").exists():
            raise SystemExit(output)
        noted = json.loads((folder / "noted.json").read_text())
        if noted["failed"]:
            print(f"{output[-3000:]}\nleft out, as they fail without a break: {' '.join(noted['failed'])}", flush=True)
        seconds |= {test: spent for test, spent in noted["seconds"].items() if test not in noted["failed"]}
        for note in (folder / "notes.jsonl").read_text().splitlines():
            test, path, line = json.loads(note)
            running[str(Path(path).relative_to(folder)), line].update(noted["sharing"].get(test, [test]))
        (folder / "sitecustomize.py").unlink()
    return Record(seconds, running)


def load_other_packages(folder: Path, tests: Sequence[str]) -> None:
    """Import here what the tests import, except for the package and the tests themselves."""
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    listed = folder / "modules.json"
    (folder / "list_modules.py").write_text(
        "import json, sys\ndef pytest_collection_finish():\n"
        f"    json.dump([*sys.modules], open({str(listed)!r}, 'w'))\n"
    )
    process = start(folder, ["--collect-only", "-p", "list_modules", *tests])
    _, status = os.waitpid(process, 0)
    if status:
        raise SystemExit((folder / "output.txt").read_text())
    for name in json.loads(listed.read_text()):
        if name.partition(".")[0] not in ("clipscale", "tests", "list_modules", "wandb", "__main__"):
            with suppress(Exception):
                import_module(name)


def copy_of_checkout(folder: Path) -> Path:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(command, cwd=CHECKOUT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (CHECKOUT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(CHECKOUT / name, folder / name)
    return folder


@dataclass
class Running:
    """A mutant whose tests run now, in a copy of the checkout."""

    mutant: Mutant
    folder: Path
    process: int
    began: float
    tests: int
    limit_s: float

    def status(self) -> int | None:
        """pytest's exit status; -1: it took too long; None: not yet known."""
        process, status = os.waitpid(self.process, os.WNOHANG)
        late = time.monotonic() - self.began > self.limit_s
        if not process and not late:
            return None
        with suppress(ProcessLookupError):
            os.killpg(self.process, signal.SIGKILL)  # and what the tests have left
        if not process:
            os.waitpid(self.process, 0)
            return -1
        return os.waitstatus_to_exitcode(status)

    def result(self, status: int) -> dict[str, Any]:
        """`by`: the test that failed, or that the tests took too long. None: the mutant lives."""
        text = (self.folder / "output.txt").read_text(errors="replace")
        named = re.search(r"^(?:FAILED|ERROR) (\S+)", text, re.M)
        by = named[1] if named else text[-300:]
        if status == -1 or "Timeout" in text:
            by = "time"
        shutil.copy2(self.folder / WHOLE, self.folder / self.mutant.file)
        fields = asdict(self.mutant)
        del fields["source"]
        seconds = round(time.monotonic() - self.began, 1)
        return {**fields, "by": by if status else None, "tests": self.tests, "seconds": seconds}


def tested(mutants: Sequence[Mutant], folders: Sequence[Path], record: Record) -> Iterator[dict[str, Any]]:
    """The mutants' results as they come, one mutant at a time in each copy. One that takes far longer than its tests
    take without it has been noticed."""
    waiting, free, running = list(enumerate(mutants)), list(folders), list[Running]()
    while waiting or running:
        while waiting and free:
            number, mutant = waiting.pop(0)
            folder = free.pop()
            broken = folder / mutant.file
            shutil.copy2(broken, folder / WHOLE)
            broken.write_text(mutant.source)
            os.utime(broken, (10**9 + number,) * 2)  # no compiled module is taken for another's
            tests = record.tests(mutant)
            seconds = [record.seconds[test] for test in tests]
            files = list(dict.fromkeys(test.partition("::")[0] for test in tests)) or tests_of(mutant.file)
            process = start(folder, ["-x", f"--timeout={60 + 4 * max(seconds, default=60)}", *files], Choice(tests))
            running.append(Running(mutant, folder, process, time.monotonic(), len(tests), 120 + 4 * sum(seconds)))
        time.sleep(0.1)
        for each in list(running):
            status = each.status()
            if status is not None:
                running.remove(each)
                free.append(each.folder)
                yield each.result(status)


def ending(result: dict[str, Any]) -> str:
    return {None: "lives", "time": "late"}.get(result["by"], "dead")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    parser.add_argument("--only", default="", help="a pattern of paths and changes: these of the drawn ones")
    parser.add_argument("--list", action="store_true", help="show what is drawn, and run nothing")
    parser.add_argument("--out", type=Path, default=CHECKOUT / "build/mutants.jsonl", help="one result a line")
    parser.add_argument("--resume", action="store_true", help="keep the results that --out has, and go on")
    words = parser.parse_args()
    began = time.monotonic()
    mutants = drawn(words.number, words.seed, target_files())
    mutants = [each for each in mutants if re.search(words.only, f"{each.file}:{each.line} {each.change}")]
    if words.list:
        for each in mutants:
            print(f"{each.file}:{each.line}  {each.change}")
        return 0
    earlier = [json.loads(line) for line in words.out.read_text().splitlines()] if words.resume else []
    known = {(result["file"], result["line"], result["change"]) for result in earlier}
    mutants = [each for each in mutants if (each.file, each.line, each.change) not in known]
    tests = list(dict.fromkeys(test for each in mutants for test in tests_of(each.file)))
    counts = Counter(ending(result) for result in earlier)
    words.out.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as home,
        words.out.open("a" if words.resume else "w") as out,
    ):
        folders = [copy_of_checkout(Path(home) / str(number)) for number in range(words.jobs)]
        load_other_packages(folders[0], tests)
        record = recorded(mutants, folders, tests)
        minutes = (time.monotonic() - began) / 60
        print(
            f"{len(record.seconds)} tests pass, after {minutes:.0f} minutes; {len(mutants)} mutants follow", flush=True
        )
        for result in tested(mutants, folders, record):
            out.write(json.dumps(result) + "\n")
            out.flush()
            end = ending(result)
            counts[end] += 1
            place = f"{result['file']}:{result['line']}"
            print(f"{end} {result['seconds']:.0f}s {place}  {result['change']}  {result['by'] or ''}", flush=True)
    noticed, minutes = counts["dead"] + counts["late"], (time.monotonic() - began) / 60
    print(f"{noticed} of {counts.total()} are noticed, {counts['late']} of them by the time they take")
    print(f"{minutes:.0f} minutes, {words.jobs} at a time, load {os.getloadavg()[2]:.1f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
