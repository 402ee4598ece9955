"""What a measuring process finds: matmuls, errors, memory and bytes, against numbers worked out by hand."""

import mmap
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from clipscale.bench import loss_work
from clipscale.bench.harness import RETURNING_MALLOC, Job, measure
from clipscale.bench.loss_methods import Case, Method, cross_entropy
from clipscale.bench.loss_work import PAIR_COSINE, LossWorker, unit_flops, unit_pairs
from clipscale.bench.worker import HostMemory, is_out_of_memory
from tests.support.ranks import run_ranks

CASE = Case(96, 32, "fp32", "cpu", 1, 100.0)


@pytest.fixture(autouse=True)
def small_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clipscale.bench.loss_work.GEMM_SIDE", {"cpu": 64})
    monkeypatch.setattr("clipscale.bench.worker.gc.collect", lambda: 0)  # slow in a process as large as this one


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Rows, inner side and columns of every matrix product that the yardstick makes."""
    made: list[tuple[int, ...]] = []
    multiply = torch.mm

    def mm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        made.append((*a.shape, b.shape[1]))
        return multiply(a, b, out=out)

    monkeypatch.setattr(torch, "mm", mm)
    return made


def job(
    probed: Sequence[str] = (), timed: Sequence[str] = (), case: Case = CASE, reference: int = 0, **more: Any
) -> Job:
    about = {"case": asdict(case), "reference": reference}
    return Job(about, "cpu", [(name, case.n) for name in probed], timed, ranks=case.ranks, **more)


def worked(given: Job, **more: Method) -> LossWorker:
    """The job done in this process, with further methods."""
    with pytest.MonkeyPatch.context() as patch:
        known = loss_work.find
        patch.setattr(loss_work, "find", lambda names: [more.get(name) or known([name])[0] for name in names])
        worker = LossWorker(given)
    assert worker.work()["complete"]
    return worker


def test_a_unit_is_a_multiplication_and_an_addition_for_each_score_and_feature() -> None:
    assert unit_flops(replace(CASE, n=4, d=2)) == 4 * 4 * 2 * 2


def test_matmuls_are_counted_as_each_method_does_them() -> None:
    # One matrix kept: scores, and two gradients. Tiles: the scores once more; the sigmoid loss needs no sums first: one sweep.
    # ClipLoss: all of it twice. Locked images: one gradient less.
    units = {"torch": 3, "dense": 3, "infcl": 4, "open_clip": 6, "siglip": 3, "lit": 3}
    found = worked(job(list(units))).found
    assert {name: record["units"] for name, record in found.items()} == units


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_error_against_the_oracle_is_that_of_the_precision(dtype: str) -> None:
    names = ["infcl", "dense", "openclip", "siglip", "lit", "open_clip", "torch"]
    found = worked(job(names, case=replace(CASE, dtype=dtype), reference=96)).found
    bound = {"fp32": 1e-5, "bf16": 0.3}[dtype]
    for name, record in found.items():
        assert record["status"] == "ok", record
        assert 0 < record["error"] < bound, f"{name}: {record['errors']}"
        assert record["error"] == max(record["errors"].values())
    assert "images" not in found["lit"]["errors"]


def test_an_error_of_one_per_cent_is_seen_as_such() -> None:
    wrong = Method("wrong", "", lambda *_: lambda u, v, scale: 1.01 * cross_entropy(u, v, scale))
    errors = worked(job(["wrong"], reference=96), wrong=wrong).found["wrong"]["errors"]
    # The scale's error is relative to a sum without signs, hence smaller.
    assert all(0.0099 < errors[name] < 0.0101 for name in ("value", "images", "texts")), errors
    assert 0 < errors["scale"] < 0.0101, errors


def test_an_oracle_that_does_not_fit_is_no_failure_of_the_method(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    monkeypatch.setattr("clipscale.bench.loss_work.dense_contrastive_loss", full)
    for reference, errors in ((96, {}), (95, None)):  # above the reference size none is asked for
        record = worked(job(["torch"], reference=reference)).found["torch"]
        assert (record["status"], record["error"], record["errors"]) == ("ok", None, errors)


def test_methods_are_interleaved_and_warm_ups_are_not_kept() -> None:
    order: list[str] = []

    def noting(name: str) -> Method:
        def loss(u: torch.Tensor, v: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            order.append(name)
            return cross_entropy(u, v, scale)

        return Method(name, "", lambda *_: loss)

    worker = worked(job(timed=["a", "b"], repeats=3), a=noting("a"), b=noting("b"))
    assert "".join(order) == "aabb" + "ba" + "ab", "a whole step warms each up"
    for record in worker.found.values():
        assert len(record["steps"]) == 3
        assert all(step["forward"] > 0 and step["backward"] > 0 for step in record["steps"])


def test_the_yardstick_is_bursts_of_products_after_every_step_that_is_timed(
    products: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clipscale.bench.loss_work.PRODUCTS", {"cpu": 5})
    events: list[str] = []

    def loss(u: torch.Tensor, v: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        events.append(f"{len(products)} products before")
        return cross_entropy(u, v, scale)

    worker = worked(job(timed=["a", "b"], repeats=2), **{n: Method(n, "", lambda *_: loss) for n in "ab"})
    assert products == [(64, 64, 64)] * 25, "a warm-up, and a burst after two methods in two rounds"
    assert events == [f"{count} products before" for count in (0, 0, 10, 10, 15, 20)], events
    gemm = worker.answer()["gemm"]
    assert (gemm["products"], len(gemm["seconds"])) == (5, 4) and min(gemm["seconds"]) > 0


def test_a_method_that_fails_is_a_record_with_the_reason_and_the_others_go_on() -> None:
    def fails(u: torch.Tensor, v: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("kernel\ndoes not build")

    def full(u: torch.Tensor, v: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    more = {name: Method(name, "", lambda *_, loss=loss: loss) for name, loss in (("fails", fails), ("full", full))}
    work = worked(job(["fails", "torch"], ["full", "fails", "torch"], repeats=2), **more)
    assert work.found["fails"]["status"] == "failed"
    assert work.found["fails"]["reason"] == "RuntimeError: kernel does not build"
    assert work.found["full"]["status"] == "out of memory"
    assert len(work.found["torch"]["steps"]) == 2


def test_pairs_are_unit_rows_alike_as_said_and_the_same_each_time() -> None:
    u, v = unit_pairs(512, 64, torch.device("cpu"))
    again, _ = unit_pairs(512, 64, torch.device("cpu"))
    assert torch.equal(u, again)
    assert torch.allclose(u.norm(dim=1), torch.ones(512)) and torch.allclose(v.norm(dim=1), torch.ones(512))
    cosines = u @ v.T
    assert abs(float(cosines.diagonal().mean()) - PAIR_COSINE) < 0.02
    assert abs(float((cosines.sum() - cosines.trace()) / (512 * 511))) < 0.01


# ---- memory ----


def test_the_peak_of_the_host_is_seen_after_it_has_passed() -> None:
    size = 64 << 20
    memory = HostMemory()
    held = memory.reset()
    with mmap.mmap(-1, size) as block:  # not from the heap, which may hold free memory already
        for page in range(0, size, mmap.PAGESIZE):
            block[page] = 1
    first, second = memory.peak() - held, -memory.reset() + memory.peak()
    # The kernel's own count is off by up to 64 pages a thread.
    assert abs(first - size) < 4 << 20, f"{first / 2**20:.1f} MiB for a block of 64"
    assert second < 4 << 20, f"{second / 2**20:.1f} MiB for nothing"


@pytest.mark.slow
def test_a_method_that_does_not_fit_is_not_taken_for_one_that_fails() -> None:
    # The scores alone are 64 MiB; tiles take two.
    case = Case(4096, 16, "fp32", "cpu", 1, 100.0)
    given = job(["torch", "infcl"], case=case, memory=96 << 20)
    (answer,) = measure("clipscale.bench.loss_work:LossWorker", replace(given, variables=RETURNING_MALLOC))
    assert answer["cases"]["torch"]["status"] == "out of memory", answer
    record = answer["cases"]["infcl"]
    assert record["status"] == "ok", record
    assert 0 < record["extra_bytes"] < 48 << 20, record


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("x"), True),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
            True,
        ),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("shapes do not fit"), False),
    ],
)
def test_failed_allocations_are_recognised(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


# ---- several ranks ----


def answered(rank: int, world: int, given: Job) -> dict[str, Any]:
    return LossWorker(given, rank).work()


def test_ranks_count_their_bytes_and_share_the_work() -> None:
    case = Case(64, 64, "fp32", "cpu", 2, 100.0)
    for answer in run_ranks(answered, 2, job(["infcl", "clip"], case=case, reference=64)):
        infcl, clip = (answer["cases"][name] for name in ("infcl", "clip"))
        assert infcl["status"] == clip["status"] == "ok", answer
        # Half of all float32 features forward, half backward, and every gradient all the way round: 2 + 2 + 4 bytes for a feature.
        assert 8.0 <= infcl["sent_bytes"] / (64 * 64) < 8.8, infcl
        assert (infcl["units"], clip["units"]) == (2.0, 3.0), "of two ranks each does half, and for clip the whole"
        assert max(infcl["error"], clip["error"]) < 1e-5, answer
