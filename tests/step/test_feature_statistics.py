"""Statistics of features equal closed forms, and they are in the records of the steps that compute them."""

import math
from pathlib import Path
from threading import Event

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from clipscale.step import feature_statistics as feature_statistics_module
from clipscale.step import train_step
from clipscale.step.feature_statistics import PendingStatistics, start_statistics
from clipscale.step.optim import Schedule
from clipscale.train import train
from tests.support.runs import four_step_config, records

AXES = torch.eye(8)
SAMPLE = 200
ALIKE = F.normalize(torch.ones(8, 8), dim=-1)
HALVES = AXES[[0, 0, 0, 0, 1, 1, 1, 1]]
POLES = torch.tensor([[1.0, 0.0], [-1.0, 0.0]]).repeat_interleave(4, 0)


@pytest.mark.parametrize(
    ("images", "texts", "expected"),
    [
        (AXES, AXES, {"modality_gap": 0, "uniformity_image": -4, "uniformity_text": -4, "rank_image": 8, "nearest": 1}),
        (ALIKE, -ALIKE, {"modality_gap": 2, "uniformity_image": 0, "rank_image": 1, "rank_text": 1}),
        # 3 of 7 others are the same, 4 at a right angle
        (HALVES, AXES, {"uniformity_image": math.log((3 + 4 * math.exp(-4)) / 7), "rank_image": 2, "nearest": 0.125}),
        (POLES, POLES, {"uniformity_text": math.log((3 + 4 * math.exp(-8)) / 7), "rank_text": 1}),
    ],
    ids=["axes", "alike", "halves", "poles"],
)
def test_statistics_have_closed_forms(images: Tensor, texts: Tensor, expected: dict[str, float]) -> None:
    values = start_statistics(images, torch.cat([texts, -texts])).read()  # hard negatives after the pairs' texts
    assert {name: values[name] for name in expected} == pytest.approx(expected, abs=1e-5)


def test_of_many_rows_a_sample_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_statistics_module, "MAX_PAIRS", SAMPLE)
    u, v = (F.normalize(torch.randn(SAMPLE + 5, 16), dim=-1) for _ in range(2))
    whole, sample = (start_statistics(u[:size], v[:size]).read() for size in (None, SAMPLE))
    assert whole == sample
    distances = torch.cdist(u[:SAMPLE].double(), u[:SAMPLE].double()).square()[~torch.eye(SAMPLE, dtype=torch.bool)]
    assert sample["uniformity_image"] == pytest.approx((-2 * distances).exp().mean().log().item(), abs=1e-5)


def test_a_run_logs_them_at_its_first_step_and_then_now_and_then(
    shards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_step, "STATISTICS_INTERVAL", 3)
    features = []

    def start(images: Tensor, texts: Tensor) -> PendingStatistics:
        features.append((images.detach().double(), texts.detach().double()))
        return start_statistics(images, texts)

    monkeypatch.setattr(train_step, "start_statistics", start)
    train(four_step_config(shards, tmp_path / "run"))
    rows = [row for row in records(tmp_path / "run") if "nearest" in row]
    assert [row["step"] for row in rows] == [1, 3]
    for row, (images, texts) in zip(rows, features, strict=True):
        assert row["modality_gap"] == pytest.approx((images.mean(0) - texts.mean(0)).norm().item(), abs=1e-5)
        for name, side in (("rank_image", images), ("rank_text", texts)):
            shares = F.normalize(torch.linalg.svdvals(side), p=1, dim=0)
            assert row[name] == pytest.approx(math.exp(-(shares * shares.log()).sum().item()), rel=1e-4), name


def test_a_step_does_not_wait_for_the_eigenvalues(shards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They arrive when the next step has begun, and belong to the record of their own step."""
    begun: list[int] = []
    second = Event()
    lr, eigvalsh = Schedule.lr, torch.linalg.eigvalsh

    def note(schedule: Schedule, step: int) -> float:
        begun.append(step)
        if len(begun) == 2:
            second.set()
        return lr(schedule, step)

    def in_the_second(product: Tensor) -> Tensor:
        assert second.wait(60), f"the run waited; steps begun: {begun}"
        return eigvalsh(product)

    monkeypatch.setattr(Schedule, "lr", note)
    monkeypatch.setattr(torch.linalg, "eigvalsh", in_the_second)
    train(four_step_config(shards, tmp_path / "run"))
    assert [row["step"] for row in records(tmp_path / "run") if row.get("rank_image", 0) >= 1] == [1]


def test_features_that_are_not_finite_have_no_rank() -> None:
    values = start_statistics(torch.full((4, 8), math.nan), AXES[:4]).read()
    assert math.isnan(values["rank_image"]) and values["rank_text"] == pytest.approx(4)
