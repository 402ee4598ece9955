"""The folder of a run whose settings name none."""

import re
from dataclasses import replace

from clipscale.cli.train_verb import with_defaults
from clipscale.config.data import DataConfig
from clipscale.config.train_config import TrainConfig

TRAIN = TrainConfig(samples=1000, data=DataConfig(train=["x.tar"]))


def test_a_run_is_named_after_the_time_the_model_and_the_batch() -> None:
    assert re.fullmatch(r"runs/\d{8}-\d{6}-vit-b-32-1M", with_defaults(replace(TRAIN, batch=2**20)).run)
    assert with_defaults(replace(TRAIN, run="mine")).run == "runs/mine"
    assert with_defaults(replace(TRAIN, run="/scratch/mine")).run == "/scratch/mine"
