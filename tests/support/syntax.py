"""Python files as syntax trees. Each of pytest's workers parses a file once."""

import ast
from functools import cache
from pathlib import Path


@cache
def tree_of(path: Path) -> ast.Module:
    """The file's tree. All tests share it, and change nothing of it."""
    return ast.parse(path.read_text(encoding="utf-8"))
