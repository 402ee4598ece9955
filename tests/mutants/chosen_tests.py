"""Chooses the tests of a break for `make mutants`: by its file's path, and by the lines that each test runs."""

import json
import os
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.mutants import line_notes
from tests.mutants.breaks_of_code import CHECKOUT, Mutant

# Further tests of a file, beside its own folder's, by the start of its path.
MORE = {
    "step": ("step", "test_exactness.py", "start", "distributed", "test_train.py"),
    "distributed": (
        "test_exactness.py",
        "checkpoint/test_ranks.py",
        "launch",
        "run",
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
    """A run without a break: the seconds of each test, and the tests that run each line (line 0: any line)."""

    seconds: Mapping[str, float]
    running: Mapping[tuple[str, int], set[str]]

    def tests(self, mutant: Mutant) -> list[str]:
        """The tests in the test files of the mutant's file that run its statement.

        If none does, or if the statement also runs outside of tests, as on import: the tests that run anything of the
        file. Its mirror comes first, then the files whose tests are quicker.
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
