"""A run's batch beside the published one for about as many samples."""

import pytest

from clipscale.config.batches import published_batch
from clipscale.config.sections import ModelConfig
from clipscale.config.train import TrainConfig


@pytest.mark.parametrize(("samples", "batch", "published"), [(40_000_000, 4096, "4k"), (128_000_000, 32768, "8k")])
def test_the_batch_of_about_as_many_samples_is_named(samples: int, batch: int, published: str) -> None:
    line = published_batch(TrainConfig(samples=samples, batch=batch))
    assert line.startswith(f"published for about as many samples: batch {published} at ")


@pytest.mark.parametrize(("samples", "batch", "times"), [(1_280_000_000, 2**20, 64), (100_000, 2**15, 16)])
def test_a_batch_beyond_four_times_that_is_warned_of(samples: int, batch: int, times: int) -> None:
    line = published_batch(TrainConfig(samples=samples, batch=batch))
    assert line.startswith("warning: batch=") and f"is {times} times what was published" in line


@pytest.mark.parametrize(
    "config",
    [
        TrainConfig(batch=2**20),
        TrainConfig(batch=2**20, samples=12_800_000, model=ModelConfig(weights="openai")),
        TrainConfig(batch=128, samples=70_000),
    ],
    ids=["of unknown length", "from weights", "shorter than any that was published"],
)
def test_nothing_is_said_where_nothing_was_published(config: TrainConfig) -> None:
    assert published_batch(config) == ""
