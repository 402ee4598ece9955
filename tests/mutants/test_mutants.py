"""What `make mutants` breaks, and which tests it runs for it."""

import importlib.util
import json
import sys
import threading
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("mutmut")


@pytest.fixture
def mutmut() -> None:
    """It takes half a second to load: only tests that use it load it, and not each of pytest's workers."""
    pytest.importorskip("mutmut", reason="mutmut is not installed (clipscale[dev])")


SOURCE = '''
"""A docstring, 1."""
from a import b

LIMIT = 300
FEW: Literal["few"] = 3


@cache(size=1)
def f(x: int = 1) -> "T":
    """Another, 2."""
    if device == "cuda":
        return 2
    if not x:
        raise ValueError("refused", 3)
    log.warning("words, 4")
    assert x > 0
    free = torch.cuda.mem_get_info()[0] + 1
    place(x, device="cuda")
    move(x, "cpu")
    return g(x, 5)
'''


def changes(folder: Path) -> list[str]:
    from tests.mutants import breaks_of_code

    (folder / "a.py").write_text(SOURCE)
    return sorted(mutant.change for line in breaks_of_code.lines_of(str(folder / "a.py")) for mutant in line.mutants())


def test_code_is_broken_and_what_is_said_of_it_is_not(tmp_path: Path) -> None:
    """Messages stay, and limits, which somebody chose, and code that only a GPU runs, and where tensors lie."""
    assert changes(tmp_path) == [
        'FEW: Literal["few"] = 3 -> FEW: Literal["few"] = 4',
        'def f(x: int = 1) -> "T": -> def f(x: int = 2) -> "T":',
        "if not x: -> if x:",
        'move(x, "cpu") -> move("cpu")',
        'place(x, device="cuda") -> place(device="cuda")',
        "return g(x, 5) -> return g(5)",
        "return g(x, 5) -> return g(x, )",
        "return g(x, 5) -> return g(x, 6)",
    ]


@pytest.mark.slow  # it parses a part of the package three times
def test_a_draw_is_a_function_of_its_seed() -> None:
    from tests.mutants import breaks_of_code

    first, again, other = (breaks_of_code.drawn(5, seed, ["clipscale/loss/block.py"]) for seed in (1, 1, 2))
    assert first == again != other and len({(each.file, each.line) for each in first}) == 5


def test_the_tests_of_a_file_begin_with_its_mirror() -> None:
    from tests.mutants import breaks_of_code, chosen_tests

    assert chosen_tests.tests_of("clipscale/step/optim.py")[0] == "tests/step/test_optim.py"
    assert chosen_tests.tests_of("clipscale/loss/softmax/kernel.py")[0] == "tests/loss/triton/test_interpreter.py"
    for file in breaks_of_code.target_files():
        assert len(chosen_tests.tests_of(file)) > 2, file


RUN = """
LIMIT = 3
def f(x=1,
      y=2):
    if x:
        return [x,
                LIMIT]
    return y
"""


def test_a_break_is_run_by_what_runs_its_statement(tmp_path: Path) -> None:
    from tests.mutants import breaks_of_code

    (tmp_path / "a.py").write_text(RUN)
    lines = {line: [*breaks_of_code.Mutant(str(tmp_path / "a.py"), line, "", "").lines] for line in (2, 4, 5, 7, 8)}
    assert lines == {2: [2], 4: [3, 4, 5, 6, 7, 8], 5: [5], 7: [6, 7], 8: [8]}


def test_lines_are_noted_with_the_test_that_runs_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are noted in any thread, and not on import."""
    from tests.mutants import line_notes

    path, before = tmp_path / "a.py", sys.gettrace()
    path.write_text(RUN)
    line_notes.note_lines({str(path): {2, 6, 8}}, tmp_path / "notes")
    try:
        spec = importlib.util.spec_from_file_location("a", path)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for test, x in (("one", 0), ("two", 1), ("two", 1)):
            monkeypatch.setenv(line_notes.TEST, test)
            thread = threading.Thread(target=module.f, args=(x,))
            thread.start()
            thread.join()
    finally:
        sys.settrace(before)
        threading.settrace(before)
    notes = [json.loads(line) for line in (tmp_path / "notes").read_text().splitlines()]
    assert notes == [[test, str(path), line] for test, line in (("one", 0), ("one", 8), ("two", 0), ("two", 6))]


def test_its_tests_are_those_that_run_it_the_quick_ones_first() -> None:
    """A line that runs on import has the tests that run anything of the file. Those of its mirror come first."""
    from tests.mutants import breaks_of_code, chosen_tests

    names = ["step/test_optim.py::slow", "step/test_optim.py::quick", "step/test_ema.py::other", "test_train.py::long"]
    slow, quick, other, long = (f"tests/{name}" for name in names)
    file = "clipscale/step/optim.py"
    running = {(file, 1): {""}, (file, 2): {slow, long, other, "tests/eval/test_run.py::far"}, (file, 0): {quick, slow}}
    record = chosen_tests.Record({slow: 9, quick: 1, other: 2, long: 30, "tests/eval/test_run.py::far": 1}, running)

    class At(breaks_of_code.Mutant):
        @property
        def lines(self) -> range:
            return range(self.line, self.line + 1)

    assert [record.tests(At(file, line, "", "")) for line in (1, 2)] == [[quick, slow], [slow, other, long]]
