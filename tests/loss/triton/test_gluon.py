"""The warp-specialised kernels: on a Hopper or Blackwell device at real sizes; elsewhere their source in the emulator (emulator.py).

Compared with float64 and with the plain kernels, whose formulas they share. test_interpreter.py runs this file without a device.
"""

import multiprocessing
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

CUDA = torch.cuda.is_available()
if not CUDA and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("no CUDA device; test_interpreter.py runs these", allow_module_level=True)

from clipscale.config.sections import LossConfig  # noqa: E402
from clipscale.loss.api import configured_loss  # noqa: E402
from clipscale.loss.machine import Machine  # noqa: E402
from clipscale.loss.triton import panels  # noqa: E402
from clipscale.loss.triton.softmax import OWN  # noqa: E402
from clipscale.loss.triton.tuning import GLUON, Tiles, Tuning, capability_of, gluon_tiles, tiles_for  # noqa: E402
from tests.loss.cases import results  # noqa: E402
from tests.loss.triton import emulator  # noqa: E402
from tests.loss.triton.truth import Problem, distance, error_of, features, scale_error_of  # noqa: E402
from tests.loss.workers import Workers, stacked, workers  # noqa: E402
from tests.loss.workers import check as check_on_ranks  # noqa: E402

DEVICE = "cuda" if CUDA else "cpu"
HERE = capability_of(torch.device("cuda")) if CUDA else None
pytestmark = [pytest.mark.gpu] if CUDA else []
CAPABILITIES = [HERE] if CUDA else [90, 100]
USED: list[str] = []
LOST: list[bool] = []  # did the sums lose terms, so that the plain kernels computed them again
PLAIN, GLUONS = Tuning(), Tuning(gluon=True)


class Emulated(Machine):
    """Runs Gluon's kernels in the emulator, the others in Triton's interpreter."""

    capability = 90

    def compute_capability(self, device: torch.device) -> int:
        return HERE or self.capability

    def tiles(self, device: torch.device, kernel_pass: str, arithmetic: str) -> Tiles:
        return tiles_for(self.compute_capability(device), kernel_pass, arithmetic)

    def launch(self, kernel: Any, grid: int, device: torch.device, tiles: Tiles, *given: Any, **constants: Any) -> None:
        if constants.get("FIND") is OWN:
            LOST.append(bool(given[6]))
        if "gluon" in kernel.__name__:
            USED.append(kernel.__name__)
        if CUDA or "gluon" not in kernel.__name__:
            super().launch(kernel, grid, device, tiles, *given, **constants)
        else:
            emulator.run(kernel, grid, *given, **constants)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    USED.clear()
    LOST.clear()
    capability = request.node.callspec.params.get("capability") if hasattr(request.node, "callspec") else None
    if capability is not None and capability not in GLUON:
        pytest.skip(f"no warp-specialised kernels for compute capability {capability}")
    monkeypatch.setattr(Emulated, "capability", capability or 90)
    monkeypatch.setattr("tests.loss.triton.truth.Machine", Emulated)


def problem(n: int, m: int, width: int, scale: float, kind: str = "random", positive: int | None = 0) -> Problem:
    if CUDA:
        n, m, width = 16 * n + 3, 16 * m, max(width, 512)
    u, v = features(kind, n, m, width, torch.float16, DEVICE)
    return Problem(u, v, torch.tensor(scale, device=DEVICE), positive)


def weights(p: Problem) -> tuple[Tensor, Tensor]:
    a, b = (torch.linspace(0.5, 1.5, len(x), device=DEVICE) for x in (p.u, p.v))
    b[len(p.u) :] = 0
    return a, b


def check(p: Problem, smoothing: float = 0.0, lost: bool = False) -> None:
    """Log-sum-exps and gradients against float64, and beside the plain kernels'."""
    a, b = weights(p)
    lse = p.computed_lse((a, b), tuning=GLUONS)
    assert set(LOST) == {lost}, "the plain kernels computed the sums again, or did not where they should have"
    for name, got, truth in zip("rc", lse, p.log_sum_exps()):
        assert got is not None
        error = float((got - truth).abs().amax())
        assert error <= 1e-6 + (5e-7 + 5e-9 * p.u.shape[1]) * float(p.scale), f"{name} is off by {error:.2e}"
    truth = p.softmax_gradients(a, b, smoothing)
    got, plain = (p.computed_softmax((a, b), lse, smoothing, tuning=x) for x in (GLUONS, PLAIN))
    for name, ours, theirs, exact in zip(("images", "texts"), got, plain, truth):
        errors = error_of(p, ours, exact, a, b), error_of(p, theirs, exact, a, b)
        assert errors[0] <= 1.1 * errors[1] + 1e-6, f"{name}: {errors[0]:.2e}, the plain kernels {errors[1]:.2e}"
    error = scale_error_of(got[2], truth[2], a, b)
    assert error <= 1e-5 + 2.5e-7 * float(p.scale), f"the scale's gradient is off by {error:.2e}"
    assert set(USED) == {"gluon_lse_kernel", "gluon_softmax_gradient_kernel"}


def check_sigmoid(p: Problem, bias: float, at_once: bool = True) -> None:
    """The loss and the gradients against float64, and beside the plain kernels'."""
    truth = p.sigmoid(bias)
    got, plain = (p.computed_sigmoid(bias, at_once=at_once, tuning=tuning) for tuning in (GLUONS, PLAIN))
    for i, name in (
        (0, "loss"),
        (3, "bias"),
        (4, "scale"),
    ):  # where derivatives cancel, an error counts against a hundredth of the rows
        error = float((got[i] - truth[i]).abs() / truth[i].abs().clamp_min(len(p.u) / 100))
        assert error <= 1e-5 + 2.5e-7 * float(p.scale), f"{name} is off by {error:.2e}"
    for ours, theirs, exact in zip(got[1:3], plain[1:3], truth[1:3]):
        errors = distance(ours, exact), distance(theirs, exact)
        assert errors[0] <= 1.1 * errors[1] + 1e-6, f"{errors[0]:.2e}, the plain kernels {errors[1]:.2e}"
    assert set(USED) == {"gluon_sigmoid_kernel"}


# Ragged rows and columns, tiles with positives and without, more than one tile of a strip; all hostile inputs.
SLOW = [] if CUDA else [pytest.mark.slow]
CASES = [
    (260, 130, 64, 14.3, "random", 0, False),
    pytest.param(600, 400, 100, 14.3, "random", 0, False, marks=SLOW),
    pytest.param(300, 384, 64, 14.3, "random", -100, False, marks=SLOW),
    pytest.param(300, 384, 64, 14.3, "pairs", 150, False, marks=SLOW),
    pytest.param(300, 384, 64, 14.3, "pairs", None, False, marks=SLOW),
    pytest.param(300, 400, 64, 100.0, "low", 0, False, marks=SLOW),
    pytest.param(300, 400, 130, 100.0, "pairs", 0, False, marks=SLOW),
    pytest.param(300, 300, 64, 100.0, "equal", 0, False, marks=SLOW),
    pytest.param(300, 512, 64, 100.0, "far row", 40, False, marks=SLOW),
    pytest.param(300, 512, 64, 100.0, "extreme", 0, True, marks=SLOW),
]


@pytest.mark.parametrize(("n", "m", "width", "scale", "kind", "positive", "lost"), CASES)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_softmax_equals_float64(
    capability: int, n: int, m: int, width: int, scale: float, kind: str, positive: int | None, lost: bool
) -> None:
    check(problem(n, m, width, scale, kind, positive), lost=lost)


@pytest.mark.parametrize(("n", "m", "width", "scale", "kind", "positive", "lost"), CASES)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_sigmoid_equals_float64(
    capability: int, n: int, m: int, width: int, scale: float, kind: str, positive: int | None, lost: bool
) -> None:
    check_sigmoid(problem(n, m, width, scale, kind, positive), bias=-10.0)


@pytest.mark.parametrize("capability", [pytest.param(x, marks=SLOW) for x in CAPABILITIES])
def test_columns_that_do_not_all_stay_in_shared_memory(capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two strips of several tiles each, with a resident step and two that are loaded with every tile."""
    monkeypatch.setattr(panels, "SLOTS", 4 + (6 if capability == 90 else 3) + 2)
    tiles = GLUON[capability]
    monkeypatch.setitem(GLUON, capability, Tiles(tiles.rows, 128, 64, 4, 3, group=2, gluon=True))
    p = problem(900, 128, 64 * (8 if CUDA else 7), 14.3, positive=None)
    check(p, smoothing=0.1)
    USED.clear()
    check_sigmoid(p, -5.0, at_once=False)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Workers]:
    """Forks of this process: Triton chooses the interpreter when it is imported."""
    with workers(2, multiprocessing.get_context("fork")) as started:
        yield started


def on_a_rank(
    capability: int, group: dist.ProcessGroup, rank: int, u: Tensor, v: Tensor, scale: float, _: Any, options: Any
) -> list[Tensor]:
    Emulated.capability = capability

    def loss(u: Tensor, v: Tensor, scale: Tensor, logit_bias: Tensor) -> Tensor:
        return configured_loss(u, v, scale, logit_bias, LossConfig(**options), group=group, machine=Emulated())

    USED.clear()
    found = results(loss, u[rank], v[rank], scale)
    assert USED, "the plain kernels computed everything"
    return found


@pytest.mark.skipif(CUDA, reason="of gloo ranks")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize(
    ("objective", "exchange", "capability"),
    [
        ("sigmoid", "ring", 90),
        *(pytest.param(*case, marks=SLOW) for case in (("softmax", "ring", 90), ("softmax", "gather", 100))),
        pytest.param("sigmoid", "gather", 100, marks=SLOW),
    ],
)
def test_two_ranks_equal_the_oracle(ranks: Workers, objective: str, exchange: str, capability: int) -> None:
    """In a ring the second block has no positives; in a gathered one the second rank's are off the diagonal."""
    u, v = (x.half() for x in stacked(2, 100, 130, 64, "aligned"))
    options = {"objective": objective, "exchange": exchange, "backend": "gluon"}
    check_on_ranks(ranks, 2, u, v, 20.0, options, bar=2e-3, local=partial(on_a_rank, capability))


@pytest.mark.parametrize("side", [pytest.param(x, marks=SLOW) for x in (0, 1)])
@pytest.mark.parametrize("capability", CAPABILITIES[:1])
def test_one_direction_alone(capability: int, side: int) -> None:
    p = problem(300, 300, 64, 100.0, "pairs")
    weight = weights(p)[side]
    one_sided = (weight, None) if side == 0 else (None, weight)
    found = p.computed_lse(one_sided, tuning=GLUONS)[side]
    assert found is not None
    assert float((found - p.log_sum_exps()[side]).abs().amax()) <= 1e-4
    got, truth = p.computed_softmax(one_sided, tuning=GLUONS), p.softmax_gradients(*one_sided)
    assert max(error_of(p, *pair, weight) for pair in list(zip(got, truth))[:2]) <= 5e-3


@pytest.mark.parametrize("capability", [pytest.param(x, marks=SLOW) for x in CAPABILITIES])
def test_the_same_inputs_give_the_same_bits(capability: int) -> None:
    p = problem(300, 256, 64, 50.0)
    first, second = (
        [*p.computed_lse(weights(p), tuning=GLUONS), *p.computed_softmax(weights(p), tuning=GLUONS)] for _ in range(2)
    )
    for x, y in zip(first, second, strict=True):
        assert x is not None and y is not None and torch.equal(x, y)


def test_what_has_no_such_kernel_is_computed_by_the_plain_ones() -> None:
    """Keys, float32 and frozen features."""
    p = problem(20, 30, 32, 10.0)
    keys = torch.arange(20, device=DEVICE) // 2, torch.arange(30, device=DEVICE) // 2
    if CUDA:
        keys = torch.arange(len(p.u), device=DEVICE) // 2, torch.arange(len(p.v), device=DEVICE) // 2
    for other in (Problem(p.u, p.v, p.scale, 0, *keys), Problem(p.u.float(), p.v.float(), p.scale, 0)):
        got, truth = other.computed_softmax(weights(p), tuning=GLUONS), other.softmax_gradients(*weights(p))
        assert max(distance(*pair) for pair in list(zip(got, truth))[:2]) <= 2e-3
        assert distance(other.computed_sigmoid(-3.0, tuning=GLUONS)[1], other.sigmoid(-3.0)[1]) <= 2e-3
    assert not USED
    p.computed_softmax(weights(p), needed=(False, False), tuning=GLUONS)
    p.computed_sigmoid(-3.0, needed=(False, False), tuning=GLUONS)
    assert set(USED) <= {"gluon_lse_kernel"}


@pytest.mark.skipif(CUDA, reason="of the emulator")
@pytest.mark.parametrize(
    "fault",
    [
        "a stage is never freed",
        pytest.param("a stage is freed while it is read", marks=SLOW),
        pytest.param("a phase is wrong", marks=SLOW),
    ],
)
def test_the_emulator_finds_wrong_synchronisation(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulator, "PATIENCE", 0.5)
    barriers, finish = dict(vars(emulator.NAMES["mbarrier"])), emulator.warpgroup_mma_wait
    if fault == "a stage is never freed":
        barriers["arrive"] = lambda barrier, pred=True: None
    elif fault == "a phase is wrong":
        barriers["wait"] = lambda barrier, parity: emulator.Barrier.wait(barrier, 1)
    else:
        late = lambda outstanding, deps: deps[0] if outstanding else finish(0, deps)  # noqa: E731
        monkeypatch.setitem(emulator.NAMES, "warpgroup_mma_wait", late)
    monkeypatch.setitem(emulator.NAMES, "mbarrier", emulator.SimpleNamespace(**barriers))
    p = problem(300, 128, 64 * 6, 10.0)
    try:
        rows, _ = p.computed_lse(weights(p), tuning=GLUONS)
    except emulator.SynchronisationError:
        return
    assert fault != "a stage is never freed" and rows is not None
    wrong = float((rows - p.log_sum_exps()[0]).abs().amax()) > 1e-3
    assert wrong or LOST == [True], "neither sums of NaN nor of other stages"


def test_kernels_are_chosen_by_capability_and_arithmetic() -> None:
    for kernel_pass in ("forward", "backward", "sigmoid"):
        assert gluon_tiles(90, kernel_pass, "half") and gluon_tiles(100, kernel_pass, "half")
    others = [
        (80, "forward", "half"),
        (120, "backward", "half"),
        (90, "forward", "tf32"),
        (90, "sigmoid with keys", "half"),
    ]
    assert not any(gluon_tiles(*case) for case in others)
