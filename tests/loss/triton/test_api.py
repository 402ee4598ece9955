"""The public function on the Triton backend against the oracle, on ranks in Triton's interpreter (test_interpreter.py)."""

import multiprocessing
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from clipscale import contrastive_loss
from clipscale.config.sections import OBJECTIVES
from clipscale.loss.reference import dense_contrastive_loss
from tests.loss.cases import errors, features, keys, oracle, results
from tests.loss.workers import Workers, check, stacked, stacked_again, workers

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("test_interpreter.py runs these", allow_module_level=True)

EXTRAS = ("plain", "keys", "smoothing")
ORDINARY = {
    ("softmax", "plain", "ring"),
    ("softmax", "plain", "gather"),
    ("softmax", "smoothing", "ring"),
    ("softmax_image", "keys", "ring"),
    ("softmax_text", "plain", "ring"),
    ("sigmoid", "keys", "ring"),
}
"""Every objective, extra and way of exchange that has its own code; their combinations are slow in the interpreter."""
CASES = [(o, e, "ring") for o in OBJECTIVES for e in EXTRAS if (o, e) != ("sigmoid", "smoothing")]
CASES += [("softmax", "plain", x) for x in ("replicated", "local", "gather")]
MARKED = [pytest.param(*case, marks=[] if case in ORDINARY else pytest.mark.slow) for case in CASES]


pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Workers]:
    """Forks of this process: Triton chooses the interpreter when it is imported."""
    with workers(2, multiprocessing.get_context("fork")) as started:
        yield started


@pytest.mark.parametrize(("objective", "extra", "exchange"), MARKED)
def test_float32_is_exact(ranks: Workers, objective: str, extra: str, exchange: str) -> None:
    alone = [(1, 17, 33)] if (extra, exchange) == ("plain", "ring") else []
    for world, n, m in (*alone, (2, 18, 21)):
        u, v = (x.float() for x in stacked(world, n, m, 24))
        options: dict[str, Any] = {"objective": objective, "exchange": exchange, "backend": "triton"}
        per_image, per_text = {}, {}
        if extra == "keys":
            drawn = keys(world * n, world * m)
            per_image["image_keys"] = drawn["image_keys"].view(world, n)
            per_text["text_keys"] = stacked_again(drawn["text_keys"], world, n)
        if extra == "smoothing":
            options["label_smoothing"] = 0.1
        for scale in (1.0, 100.0) if objective == "softmax" else (100.0,):
            check(ranks, world, u, v, scale, options, per_image, per_text, bar=1e-5)


@pytest.mark.slow  # whole tiles in the interpreter
def test_kept_exponentials_are_exact_on_ranks(ranks: Workers) -> None:
    """Whole tiles on two visits: the budget is for the first and a part of the second."""
    u, v = (x.float() for x in stacked(2, 33, 65, 24))
    check(ranks, 2, u, v, 100.0, {"exchange": "ring", "backend": "triton", "keep": str(5 * 16 * 96 * 4)}, bar=1e-5)


def on_triton(group: dist.ProcessGroup, rank: int, objective: str, *args: Any) -> list[Tensor]:
    return results(contrastive_loss, *args, objective=objective, backend="triton", group=group)


@pytest.mark.parametrize(
    ("objective", "dtype"),
    [
        ("softmax", torch.bfloat16),
        ("sigmoid", torch.float16),
        pytest.param("softmax", torch.float16, marks=pytest.mark.slow),
        pytest.param("sigmoid", torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_half_precision_is_no_further_from_the_truth_than_twice_plain_torch(
    ranks: Workers, objective: str, dtype: torch.dtype
) -> None:
    for scale in (14.3, 100.0):
        u, v = (x.to(dtype) for x in features(40, 49, 48, "aligned"))
        true = oracle(u, v, scale, objective=objective)
        plain = errors(results(dense_contrastive_loss, u, v, scale, objective=objective), true, scale)
        (answer,) = ranks.run(on_triton, 1, objective, u, v, scale)
        for name, ours in errors(answer, true, scale).items():
            assert ours <= 2 * plain[name] + 1e-6, f"{name} at scale {scale}: {ours:.1e} against {plain[name]:.1e}"


def frozen(group: dist.ProcessGroup, rank: int, wanted: str, u: Tensor, v: Tensor) -> dict[str, Tensor]:
    """The gradients that exist when only `wanted` asks for one."""
    given = {"u": u, "v": v, "scale": torch.tensor(10.0)}
    given = {name: x.clone().requires_grad_(name == wanted) for name, x in given.items()}
    contrastive_loss(*given.values(), backend="triton", group=group).backward()
    return {name: x.grad for name, x in given.items() if x.grad is not None}


@pytest.mark.parametrize("wanted", ["u", "v", "scale"])
def test_a_frozen_side_gets_no_gradient(ranks: Workers, wanted: str) -> None:
    u, v = (x.float() for x in features(20, 24, 16))
    true = dict(zip(("u", "v", "scale"), oracle(u, v, 10.0)[1:4]))
    (grads,) = ranks.run(frozen, 1, wanted, u, v)
    assert list(grads) == [wanted]
    worst = float((grads[wanted] - true[wanted]).abs().max() / true[wanted].abs().max())
    assert worst < 1e-5, f"{wanted}: {worst:.1e}"
