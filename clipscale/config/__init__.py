"""The settings of every verb as plain dataclasses, with help, choices and least values in their fields. Needs no torch."""

from clipscale.config.data import AugmentConfig, DataConfig, FilterConfig, TableConfig
from clipscale.config.sections import (
    CacheConfig,
    CheckpointConfig,
    EvalConfig,
    LaunchConfig,
    LogConfig,
    LossConfig,
    ModelConfig,
    OptimConfig,
    PrecisionConfig,
    RampConfig,
    ScheduleConfig,
)
from clipscale.config.tools import EvalRunConfig, FeaturesConfig, PlanConfig
from clipscale.config.train import TrainConfig

__all__ = [
    "AugmentConfig",
    "CacheConfig",
    "CheckpointConfig",
    "DataConfig",
    "EvalConfig",
    "EvalRunConfig",
    "FeaturesConfig",
    "FilterConfig",
    "LaunchConfig",
    "LogConfig",
    "LossConfig",
    "ModelConfig",
    "OptimConfig",
    "PlanConfig",
    "PrecisionConfig",
    "RampConfig",
    "ScheduleConfig",
    "TableConfig",
    "TrainConfig",
]
