"""What `make mutants` breaks, and which tests it runs for a file."""

from pathlib import Path

import pytest

pytest.importorskip("mutmut", reason="mutmut is not installed (clipscale[dev])")

from tests import mutants

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
    return g(x, 5)
'''


def changes(folder: Path) -> list[str]:
    (folder / "a.py").write_text(SOURCE)
    return sorted(mutants.change for line in mutants.lines_of(str(folder / "a.py")) for mutants in line.mutants())


def test_code_is_broken_and_what_is_said_of_it_is_not(tmp_path: Path) -> None:
    """Nor limits, which somebody chose, nor what only a GPU computes."""
    assert changes(tmp_path) == [
        'FEW: Literal["few"] = 3 -> FEW: Literal["few"] = 4',
        'def f(x: int = 1) -> "T": -> def f(x: int = 2) -> "T":',
        "if not x: -> if x:",
        "return g(x, 5) -> return g(5)",
        "return g(x, 5) -> return g(x, )",
        "return g(x, 5) -> return g(x, 6)",
    ]


def test_a_draw_is_a_function_of_its_seed() -> None:
    first, again, other = (mutants.drawn(5, seed, ["clipscale/loss/block.py"]) for seed in (1, 1, 2))
    assert first == again != other and len({(each.file, each.line) for each in first}) == 5


def test_the_tests_of_a_file_begin_with_its_mirror() -> None:
    assert mutants.tests_of("clipscale/step/optim.py")[0] == "tests/step/test_optim.py"
    assert mutants.tests_of("clipscale/loss/softmax/kernel.py")[0] == "tests/loss/triton/test_interpreter.py"
    for file in mutants.target_files():
        assert len(mutants.tests_of(file)) > 2, file
