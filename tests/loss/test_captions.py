"""Several captions of an image are all its positives."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clipscale import contrastive_loss
from clipscale.loss.objective import OBJECTIVES
from tests.loss.cases import assert_exact, features, keys, oracle, results
from tests.loss.workers import check
from tests.support.ranks import Workers


@settings(max_examples=40, derandomize=True, deadline=None)
@given(
    size=st.integers(1, 9),
    captions=st.integers(1, 4),
    negatives=st.integers(0, 3),
    scale=st.sampled_from([1.0, 14.3, 100.0]),
    objective=st.sampled_from(sorted(OBJECTIVES)),
    seed=st.integers(0, 99),
)
def test_any_captions_are_exact(
    size: int, captions: int, negatives: int, scale: float, objective: str, seed: int
) -> None:
    u, v = features(size, captions * size + negatives, 7, seed=seed)
    options = {"objective": objective, "captions": captions}
    if not negatives:
        options["keys"] = keys(size, seed)
    for dtype, bar in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        u, v = u.to(dtype), v.to(dtype)
        actual = results(contrastive_loss, u, v, scale, tile=4, **options)
        assert_exact(actual, oracle(u, v, scale, **options), scale, bar, options)


@pytest.mark.parametrize("exchange", ["replicated", "local", "gather", "ring"])
@pytest.mark.parametrize("objective", ["softmax", "sigmoid"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_captions_are_exact_on_ranks(ranks: Workers, world_size: int, exchange: str, objective: str) -> None:
    u, v = (x.view(world_size, -1, 7) for x in features(4 * world_size, 12 * world_size, 7))
    options = {"exchange": exchange, "objective": objective, "captions": 3}
    check(ranks, world_size, u, v, 14.3, options, keys=keys(4 * world_size).view(world_size, 4))


def test_the_mean_over_captions_is_what_the_formula_says() -> None:
    """Two images, two captions each, by hand: an image's mean over its captions, a caption among all images."""
    u, v = features(2, 4, 5)
    x = 3.0 * u @ v.T
    own = torch.tensor([[x[0, 0], x[0, 1]], [x[1, 2], x[1, 3]]])
    images = (x.logsumexp(1) - own.mean(1)).mean()
    texts = (x.logsumexp(0) - own.flatten()).mean()
    assert torch.allclose(contrastive_loss(u, v, 3.0, captions=2), (images + texts) / 2, rtol=1e-12)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"simlarity": None}, "'simlarity'; did you mean 'similarity'"),
        ({"label_smoothing": 0.1}, "unexpected keyword argument 'label_smoothing'"),
        ({"shared": "mask"}, "shared= was removed in 0.2.0: pairs of equal keys are left out"),
    ],
)
def test_an_unknown_keyword_is_refused(options: dict, words: str) -> None:
    u, v = features(2, 2, 5)
    with pytest.raises(TypeError, match=words):
        contrastive_loss(u, v, 3.0, **options)


def test_too_few_captions_are_refused() -> None:
    u, v = features(3, 5, 5)
    with pytest.raises(ValueError, match=r"fewer texts than images.*captions=2"):
        contrastive_loss(u, v, 3.0, captions=2)
    with pytest.raises(ValueError, match="captions=0"):
        contrastive_loss(u, v, 3.0, captions=0)
