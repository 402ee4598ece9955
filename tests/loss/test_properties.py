"""What has to hold for any batch, without an oracle."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clipscale import contrastive_loss
from clipscale.config.sections import OBJECTIVES
from tests.loss.cases import error, features, results

BATCH = {
    "n": st.integers(1, 9),
    "extra": st.integers(0, 4),
    "width": st.integers(1, 12),
    "tile": st.integers(1, 8),
    "scale": st.sampled_from([0.3, 14.3, 100.0]),
    "objective": st.sampled_from(OBJECTIVES),
    "seed": st.integers(0, 9999),
}
ordinary = settings(max_examples=40, deadline=None, derandomize=True)


@ordinary
@given(**BATCH)
def test_permuting_pairs_permutes_gradients(
    n: int, extra: int, width: int, tile: int, scale: float, objective: str, seed: int
) -> None:
    u, v = features(n, n + extra, width, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    pairs, negatives = torch.randperm(n, generator=generator), n + torch.randperm(extra, generator=generator)
    order = torch.cat([pairs, negatives])
    before = results(contrastive_loss, u, v, scale, objective=objective, tile=tile)
    after = results(contrastive_loss, u[pairs], v[order], scale, objective=objective, tile=tile)
    expected = [before[0], before[1][pairs], before[2][order], *before[3:]]
    for name, a, b in zip(("value", "images", "texts", "scale", "bias"), after, expected):
        assert error(a, b, scale / n) < 1e-12, f"{name} differs by {error(a, b, scale / n):.1e}"


@ordinary
@given(**BATCH)
def test_swapping_the_sides_swaps_their_gradients(
    n: int, extra: int, width: int, tile: int, scale: float, objective: str, seed: int
) -> None:
    u, v = features(n, n, width, seed=seed)
    other = {"softmax_image": "softmax_text", "softmax_text": "softmax_image"}.get(objective, objective)
    one = results(contrastive_loss, u, v, scale, objective=objective, tile=tile)
    two = results(contrastive_loss, v, u, scale, objective=other, tile=tile)
    for name, a, b in zip(("value", "images", "texts", "scale", "bias"), one, [two[0], two[2], two[1], *two[3:]]):
        assert error(a, b, scale / n) < 1e-12, f"{name} differs by {error(a, b, scale / n):.1e}"


@ordinary
@given(**BATCH)
def test_adding_a_far_column_changes_nothing(
    n: int, extra: int, width: int, tile: int, scale: float, objective: str, seed: int
) -> None:
    """A hard negative some hundred nats below every other score has no part in any sum, and no gradient."""
    u, v = features(n, n + extra, width, seed=seed)
    u, v = (torch.cat([x, torch.full((len(x), 1), value).double()], 1) for x, value in ((u, 1.0), (v, 0.0)))
    far = torch.zeros(1, width + 1).double()
    far[0, -1] = -400.0 / scale  # <u_i, far> * scale = -400 for every image
    before = results(contrastive_loss, u, v, scale, objective=objective, tile=tile)
    after = results(contrastive_loss, u, torch.cat([v, far]), scale, objective=objective, tile=tile)
    assert float(after[2][-1].abs().max()) < 1e-100, f"the far column has gradient {float(after[2][-1].abs().max())}"
    after[2] = after[2][:-1]
    for name, a, b in zip(("value", "images", "texts", "scale", "bias"), after, before):
        assert error(a, b, scale / n) < 1e-12, f"{name} differs by {error(a, b, scale / n):.1e}"


@ordinary
@given(**BATCH)
def test_a_common_rotation_changes_nothing_but_turns_the_gradients(
    n: int, extra: int, width: int, tile: int, scale: float, objective: str, seed: int
) -> None:
    u, v = features(n, n + extra, width, seed=seed)
    turn, _ = torch.linalg.qr(torch.randn(width, width, generator=torch.Generator().manual_seed(seed)).double())
    before = results(contrastive_loss, u, v, scale, objective=objective, tile=tile)
    after = results(contrastive_loss, u @ turn, v @ turn, scale, objective=objective, tile=tile)
    expected = [before[0], before[1] @ turn, before[2] @ turn, *before[3:]]
    for name, a, b in zip(("value", "images", "texts", "scale", "bias"), after, expected):
        assert error(a, b, scale / n) < 1e-12, f"{name} differs by {error(a, b, scale / n):.1e}"


@ordinary
@given(**BATCH)
def test_a_pair_left_out_by_its_keys_is_as_good_as_absent(
    n: int, extra: int, width: int, tile: int, scale: float, objective: str, seed: int
) -> None:
    """Hard negatives whose key every image shares are left out of all sums; so is any image's gradient through them."""
    u, v = features(n, n + extra, width, seed=seed)
    ids = torch.arange(n)
    keys = {"image_keys": ids * 0, "text_keys": torch.cat([1 + ids, torch.zeros(extra).long()])}
    found = results(contrastive_loss, u, v, scale, objective=objective, tile=tile, **keys)
    absent = results(contrastive_loss, u, v[:n], scale, objective=objective, tile=tile)
    assert float(found[2][n:].abs().sum()) == 0, "a text that is left out has a gradient"
    found[2] = found[2][:n]
    for name, a, b in zip(("value", "images", "texts", "scale", "bias"), found, absent):
        assert error(a, b, scale / n) < 1e-12, f"{name} differs by {error(a, b, scale / n):.1e}"
