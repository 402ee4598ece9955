"""The folder of a run whose settings name none, and what a run imports."""

import re
from dataclasses import replace

from clipscale.cli.train_verb import with_defaults
from clipscale.config.data import DataConfig
from clipscale.config.train_config import TrainConfig
from tests.support.interpreter import interpreted

TRAIN = TrainConfig(samples=1000, data=DataConfig(train=["x.tar"]))


def test_a_run_is_named_after_the_time_the_model_and_the_batch() -> None:
    assert re.fullmatch(r"runs/\d{8}-\d{6}-vit-b-32-1M", with_defaults(replace(TRAIN, batch=2**20)).run)
    assert with_defaults(replace(TRAIN, run="mine")).run == "runs/mine"
    assert with_defaults(replace(TRAIN, run="/scratch/mine")).run == "/scratch/mine"


IMPORTS = """
import sys
from clipscale.cli.train_verb import import_train
from clipscale.config.data import DataConfig
from clipscale.config.model import ModelConfig
from clipscale.config.train_config import TrainConfig

import_train(TrainConfig(model=ModelConfig(name="ViT-B-32"), data=DataConfig(workers=0)))
print("clipscale.train" in sys.modules, "transformers" in sys.modules)
"""


def test_training_is_imported_without_packages_that_its_model_does_not_need() -> None:
    done = interpreted(IMPORTS)
    assert done.stdout == "True False\n", done.stderr
