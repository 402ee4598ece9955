"""The settings of every verb as plain dataclasses, with help, choices and least values in their fields. Needs no torch."""

from clipscale.config.tools import PlanConfig
from clipscale.config.train import TrainConfig

__all__ = ["PlanConfig", "TrainConfig"]
