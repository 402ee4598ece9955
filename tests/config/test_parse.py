"""Plain values in, dataclasses out; and only the command line knows Hydra."""

import ast
from dataclasses import is_dataclass
from typing import Any

import pytest

from clipscale.common.errors import UserError
from clipscale.config.parse import typed
from clipscale.config.presets import PACKAGE
from clipscale.config.train import TrainConfig


@pytest.mark.parametrize(
    ("values", "read"),
    [
        ({"batch": "1M"}, 2**20),
        ({"samples": 1e6}, 1_000_000),
        ({"cache": {"text_chunk": "1k"}}, 1024),
        ({"model": {"compile": "yes"}}, True),
        ({"model": {"compile": 0}}, False),
        ({"optim": {"lr": "1e-3"}}, 1e-3),
        ({"optim": {"clip_norm": 1}}, 1.0),
        ({"optim": {"eps": None}}, None),
        ({"run": 3}, "3"),
        ({"eval": {"sets": "a"}}, ["a"]),
        ({"data": {"weights": [1, "0.5"]}}, [1.0, 0.5]),
        ({"optim": {"betas": [0.8, 0.9]}}, (0.8, 0.9)),
        ({"optim": {"options": {"foreach": True}}}, {"foreach": True}),
        ({"data": {"cache_bytes": "500G"}}, 500 * 2**30),
    ],
)
def test_a_value_becomes_the_type_of_its_setting(values: dict[str, Any], read: Any) -> None:
    found: Any = typed(TrainConfig, values)
    while is_dataclass(found):
        (name, values), *_ = values.items()
        found = getattr(found, name)
    assert (found, type(found)) == (read, type(read))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"seed": None}, "seed=null: give a value"),
        ({"batch": "1.5k5"}, "batch=1.5k5: '1.5k5' is not a count such as 100000, 768k or 1.5M"),
        ({"batch": True}, "batch=True: give a whole number"),
        ({"batch": [1, 2]}, "batch=[1, 2]: give a whole number"),
        ({"run": ["a"]}, "run=['a']: give one text"),
        ({"optim": {"lr": "fast"}}, "optim.lr=fast: give a number"),
        ({"optim": {"lrr": 1}}, "unknown key 'optim.lrr'; did you mean 'optim.lr'?"),
        ({"model": {"compile": "perhaps"}}, "model.compile=perhaps: give true or false"),
        ({"eval": 3}, "eval is a section of settings; give one of its keys: eval.every, eval.sets, eval.batch, ..."),
        ({"data": {"weights": ["a"]}}, "data.weights[0]=a: give a number"),
        ({"optim": {"betas": [0.9]}}, "optim.betas=[0.9]: give 2 numbers, optim.betas=[...]"),
        ({"optim": {"options": 3}}, "optim.options: give names and values, optim.options.NAME=VALUE"),
    ],
)
def test_a_value_of_another_type_is_refused_in_one_line(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        typed(TrainConfig, values)
    assert str(caught.value) == message


def test_only_the_command_line_knows_hydra() -> None:
    """The modules that import Hydra or OmegaConf, or a module that does, anywhere in a file."""
    imports: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        found = imports.setdefault(".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts), set())
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}

    def importers(*names: str) -> set[str]:
        return {m for m, found in imports.items() if any(f == n or f.startswith(n + ".") for f in found for n in names)}

    above = {"clipscale.cli.compose", "clipscale.cli.sweep"}
    limits = {"clipscale.cli.received"}  # what Hydra may start
    assert importers("hydra") == above | limits
    assert importers("omegaconf") - limits == above
    assert importers(*above) == {"clipscale.cli.main", "clipscale.cli.sweep"}
    assert importers("clipscale.cli.main") == {"clipscale.__main__"}
