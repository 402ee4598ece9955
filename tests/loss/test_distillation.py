"""Teachers' probabilities as targets, against the dense oracle, open_clip's loss, and what must come out by itself.

Letters: N pairs, D feature width.
"""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from open_clip.loss import DistillClipLoss
from torch import Tensor

from clipscale import distillation_loss
from clipscale.loss.distillation.distillation_objective import add_teachers
from clipscale.loss.inputs import make_inputs
from clipscale.loss.precision import takes_half_precision
from clipscale.loss.reference import dense_contrastive_loss
from clipscale.tools.plan.memory_tracker import MemoryTracker
from tests.loss.cases import LossFunction, Phi, assert_exact, features, keys, results, tiles_of
from tests.loss.dense_distillation import dense_distillation_loss
from tests.loss.workers import Workers, stacked, whole
from tests.support.cases import slow_except

Teachers = list[tuple[Tensor, Tensor, float]]


def taught(teachers: Teachers, **fixed: Any) -> LossFunction:
    """`distillation_loss` in the form that `results` takes."""
    return lambda u, v, scale, logit_bias, **options: distillation_loss(u, v, scale, teachers, **fixed, **options)


def dense(teachers: Teachers, weights: tuple[float, float], **fixed: Any) -> LossFunction:
    """The same loss of a whole batch in one graph."""
    first, second = weights

    def loss(u: Tensor, v: Tensor, scale: Tensor, logit_bias: Tensor, **options: Any) -> Tensor:
        pairs = dense_contrastive_loss(u, v, scale, **fixed, **options)
        return first * pairs + second * dense_distillation_loss(u, v, scale, teachers, **fixed, **options)

    return loss


def three_teachers(n: int, seed: int = 0) -> Teachers:
    return [(*features(n, n, width, "aligned", seed + width), t) for width, t in ((5, 20.0), (9, 70.0), (8, 3.0))]


@pytest.mark.parametrize("weights", [(0.0, 1.0), (0.7, 0.3), (1.0, 0.0)])
@pytest.mark.parametrize("scale", [1.0, 14.3, 100.0])
def test_it_is_exact_in_tiles(scale: float, weights: tuple[float, float]) -> None:
    u, v = features(23, 23, 12)
    teachers = three_teachers(23)
    true = results(dense(teachers, weights), u, v, scale)
    for backend in ("dense", "tiled"):
        ours = taught(teachers, weights=weights, backend=backend)
        assert_exact(results(ours, u, v, scale, tile=7), true, scale, 1e-10, backend)
    single = results(taught(teachers, weights=weights), u.float(), v.float(), scale, tile=7)
    assert_exact(single, true, scale, 1e-5, "float32")


def test_pairs_of_equal_keys_are_in_nobodys_targets() -> None:
    u, v = features(23, 23, 12)
    teachers = three_teachers(23)
    same = keys(23)
    true = results(dense(teachers, (0.4, 0.6), keys=same), u, v, 14.3)
    assert_exact(
        results(taught(teachers, weights=(0.4, 0.6), keys=same), u, v, 14.3, tile=7), true, 14.3, 1e-10, "keys"
    )


def test_the_student_may_have_a_similarity_of_its_own() -> None:
    u, v = features(11, 11, 6)
    teachers = three_teachers(11)
    module = Phi(6).double()
    true = results(dense(teachers, (0.4, 0.6)), u, v, 14.3, similarity=module)
    assert_exact(
        results(taught(teachers, weights=(0.4, 0.6)), u, v, 14.3, tile=4, similarity=module), true, 14.3, 1e-10, ""
    )


def on_a_rank(
    group: dist.ProcessGroup, rank: int, u: Tensor, v: Tensor, teachers: list[Any], same: Tensor, exchange: str
) -> list[Tensor]:
    mine = [(a[rank], b[rank], t) for a, b, t in teachers]
    loss = taught(mine, weights=(0.5, 1.0), group=group, exchange=exchange, keys=same[rank])
    return results(loss, u[rank], v[rank], 14.3, tile=3)


@pytest.mark.parametrize("exchange", ["ring", "gather", "local", "replicated"])
@pytest.mark.parametrize("world_size", slow_except([3], [1, 2, 3]))
def test_it_is_exact_on_ranks(ranks: Workers, world_size: int, exchange: str) -> None:
    n = 5
    u, v = stacked(world_size, n, n, 12)
    teachers = three_teachers(world_size * n)
    same = keys(world_size * n)
    split = [(a.unflatten(0, (world_size, n)), b.unflatten(0, (world_size, n)), t) for a, b, t in teachers]
    actual = whole(ranks.run(on_a_rank, world_size, u, v, split, same.view(world_size, n), exchange))
    actual[1:3] = [x.flatten(0, 1) for x in actual[1:3]]
    true = results(dense(teachers, (0.5, 1.0), keys=same), u.flatten(0, 1), v.flatten(0, 1), 14.3)
    assert_exact(actual, true, 14.3, 1e-10, (world_size, exchange))


def test_one_teacher_at_one_to_one_is_open_clips_loss() -> None:
    u, v = features(15, 15, 12)
    a, b, t = three_teachers(15)[0]

    def original(u: Tensor, v: Tensor, scale: Tensor, logit_bias: Tensor) -> Tensor:
        contrastive, distilled = DistillClipLoss()(u, v, scale, a, b, torch.tensor(t))
        return contrastive + distilled

    ours = results(taught([(a, b, t)], weights=(1.0, 1.0)), u, v, 14.3)
    assert_exact(ours, results(original, u, v, 14.3), 14.3, 1e-10, "DistillClipLoss")


def test_a_student_like_its_teacher_has_no_gradient() -> None:
    u, v = features(15, 15, 12)
    grads = results(taught([(u, v, 14.3)]), u, v, 14.3)[1:]
    assert all(float(grad.abs().max()) < 1e-12 for grad in grads)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"teachers": []}, "0 teachers"),
        ({"weights": (0.0, 0.0)}, "weights of 0 or more"),
        ({"weights": (-1.0, 2.0)}, "weights of 0 or more"),
        ({"weights": (1.0,)}, "two weights of 0 or more"),
        ({"teachers": [torch.ones(2, 4, 3)]}, "a teacher is its image features, its text features and its logit scale"),
        ({"teachers": [(torch.ones(4, 3), torch.ones(5, 3), 1.0)]}, "a teacher's features"),
        ({"captions": 2}, "one caption"),
        ({"backend": "triton"}, "no Triton kernels"),
        ({"exchange": "rings"}, "exchange='rings'"),
    ],
)
def test_what_does_not_fit_is_refused(given: dict[str, Any], message: str) -> None:
    u, v = features(5, 5, 12)
    with pytest.raises(ValueError, match=message):
        distillation_loss(u, v, 1.0, **{"teachers": three_teachers(5), **given})
    with pytest.raises(TypeError, match="label_smoothing"):
        distillation_loss(u, v, 1.0, three_teachers(5), label_smoothing=0.1)


def test_a_loss_that_is_not_finite_is_not_called_a_contrastive_one() -> None:
    u, v = features(5, 5, 12)
    with pytest.raises(ValueError, match=r"^the distillation loss is nan: logit_scale has 1 non-finite numbers$"):
        distillation_loss(u, v, math.nan, three_teachers(5))


@pytest.mark.parametrize("at", ["image features", "text features", "scale"])
def test_a_teacher_that_is_not_finite_is_named(at: str) -> None:
    u, v = features(5, 5, 12)
    first, (a, b, t), third = three_teachers(5)
    if at == "scale":
        t = math.nan
    else:
        {"image features": a, "text features": b}[at][2, 1] = math.nan
    with pytest.raises(ValueError, match=rf"is nan: teachers\[1\]'s {at} has 1 non-finite numbers$"):
        distillation_loss(u, v, 1.0, [first, (a, b, t), third])


def test_of_one_process_no_other_rank_is_blamed() -> None:
    u, v = features(5, 5, 12)
    with pytest.raises(ValueError, match=r": the inputs are finite: the scores overflow$"):
        distillation_loss(u.float() * 1e30, v.float() * 1e30, 1.0, three_teachers(5))


def test_its_memory_is_linear_in_the_batch() -> None:
    peaks = []
    for n in (64, 128, 256):
        u, v = (x.float().requires_grad_() for x in features(n, n, 12))
        teachers = [(a.float(), b.float(), t) for a, b, t in three_teachers(n)]
        with tiles_of(32), MemoryTracker() as memory:
            taught(teachers)(u, v, torch.tensor(14.3, requires_grad=True), None).backward()
        peaks.append(memory.peak)
    assert peaks[2] - peaks[1] < 2.2 * (peaks[1] - peaks[0]), f"{peaks} bytes at N = 64, 128, 256"


@pytest.mark.parametrize("student", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("teacher", [torch.float16, torch.float32])
def test_products_may_round_to_tf32_only_if_no_features_are_float32(student: torch.dtype, teacher: torch.dtype) -> None:
    """Products of two numbers in half precision are exact in TF32."""
    u, v = (x.to(student) for x in features(4, 4, 8))
    inputs = make_inputs(u, v, 1.0, None, None, captions_per_image=1, has_module=False, check=False)
    taught = add_teachers(inputs, [(u.to(teacher), v.to(teacher), 1.0)])
    assert takes_half_precision(inputs) == (student == torch.bfloat16)
    assert takes_half_precision(taught) == (student == torch.bfloat16 and teacher == torch.float16)


def test_a_bf16_run_takes_teachers_in_float16() -> None:
    u, v, a, b = (torch.nn.functional.normalize(torch.randn(6, 8), dim=-1) for _ in range(4))
    teachers = [(a.half(), b.half(), 20.0)]
    with torch.autocast("cpu", torch.bfloat16):
        mixed = distillation_loss(u, v, 10.0, teachers)
    assert float(mixed) == pytest.approx(float(distillation_loss(u, v, 10.0, teachers)), rel=0.05)
