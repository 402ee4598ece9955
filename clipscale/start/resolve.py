"""Finds the stage of a run that starts, and completes the settings by its checkpoint and its weights."""

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path

from clipscale import checkpoint
from clipscale.checkpoint import CheckpointDescription
from clipscale.common.cpu import cpu_has_bf16
from clipscale.common.errors import UserError
from clipscale.config.checks import check_captioner, check_divisible
from clipscale.config.config_file import to_yaml
from clipscale.config.model import ModelConfig
from clipscale.config.stages import OptimizerPolicy, Stage
from clipscale.config.train_config import TrainConfig, samples_of
from clipscale.data.order import BatchShare
from clipscale.distributed.agreement import run_on_rank0_with_heartbeat
from clipscale.distributed.world import World
from clipscale.models.encoders import describe_model
from clipscale.models.weights.load_weights import completed_by_weights
from clipscale.run_folder.paths import checkpoints_of
from clipscale.step.chunk_sizes import check_sizes


@dataclass(frozen=True)
class ResolvedRun:
    """The final settings of a run, and the checkpoint that it resumes, if any. Nothing is built yet."""

    # The settings of this stage. Architecture and image preprocessing are completed from the weights.
    config: TrainConfig
    stages: tuple[Stage, ...]
    stage: Stage
    # The checkpoint to resume; None for a new run.
    checkpoint_path: Path | None
    # The description of that checkpoint.
    resumed: CheckpointDescription | None
    # Whether the checkpoint is the end of the previous stage.
    is_stage_start: bool
    # The settings of the whole run, as config.yaml has them.
    config_yaml: str
    # Lines for the user about the settings.
    notices: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        """Completed steps."""
        return self.resumed.step if self.resumed else 0

    @property
    def loss(self) -> float:
        """The last completed step's loss; NaN before the first step."""
        return self.resumed.loss if self.resumed else math.nan

    @property
    def run_dir(self) -> Path:
        return Path(self.config.run)

    @property
    def continues_own_folder(self) -> bool:
        """Whether the checkpoint is one of the run's own folder."""
        own_checkpoints = (self.run_dir / "checkpoints").resolve()
        return self.checkpoint_path is not None and self.checkpoint_path.resolve().parent == own_checkpoints

    def limit_streams(self, num_streams: int) -> int:
        """The largest divisor of `num_streams` that divides the batches of all stages.

        If all stages have one batch, this is `num_streams` itself, as for a run without stages.
        """
        batches = {stage.global_batch for stage in self.stages}
        return math.gcd(num_streams, *batches) if len(batches) > 1 else num_streams


def resolve(config: TrainConfig, path: Path | None, world: World) -> ResolvedRun:
    """Find the run's current stage, and complete its settings. Changes nothing in the run's folder. A collective.

    `path`: the checkpoint to resume; as `find_checkpoint` finds it. Raises UserError.

    The weights come from the first of these that exists:

    1. The newest undamaged checkpoint in the run's own folder: with `resume=auto`, the default, and after a restart by
       the launcher with any `resume`.
    2. `resume=PATH`: that checkpoint, or the newest one of that run folder.
    3. The initial weights of the model (`model.weights`) and of each tower.
    4. Random weights, by `seed`.
    """
    resumed = checkpoint.read_description(path) if path else None
    if not config.model.name:  # the weights name it, before the stages replace parts of the model
        config = replace(
            config, model=run_on_rank0_with_heartbeat(world, lambda: completed_by_weights(config.model, resumed))
        )
    stages, index, is_stage_start = find_stage(config, resumed)
    stage_configs = config.stage_configs
    for each in stage_configs:
        check_machine(each, world)
    stage_config = stage_configs[index]
    model = run_on_rank0_with_heartbeat(world, lambda: completed_by_weights(stage_config.model, resumed))
    if is_stage_start:
        given = stage_config.model
        model = replace(model, image_size=given.image_size, context_length=given.context_length)
    completed = replace(stage_config, model=model)
    check_captioner(completed)
    return ResolvedRun(
        config=completed,
        stages=tuple(stages),
        stage=stages[index],
        checkpoint_path=path,
        resumed=resumed,
        is_stage_start=is_stage_start,
        config_yaml=to_yaml(config if config.stages else completed),
        notices=(*pixel_notices(stage_config.model, model), *precision_notices(completed, world.device.type)),
    )


def find_stage(config: TrainConfig, resumed: CheckpointDescription | None) -> tuple[list[Stage], int, bool]:
    """All stages of a run, the index of the one that trains next, and whether it is at its start.

    `resumed`: the checkpoint's description; None for a new run. Raises UserError where the run cannot go on from it.
    """
    stages = make_stages(config)
    step = resumed.step if resumed else 0
    index = max(i for i, stage in enumerate(stages) if stage.steps_before <= step)
    is_stage_start = index > 0 and step == stages[index].steps_before
    last_trained = stages[index - 1] if is_stage_start else stages[index]
    check_fits(resumed, config, last_trained)
    return stages, index, is_stage_start


def make_stages(config: TrainConfig) -> list[Stage]:
    """The stages of a run; a run without stages has one. Raises UserError for a model that cannot be built."""
    stage_configs = config.stage_configs
    stages: list[Stage] = []
    step = samples = 0
    for index, stage_config in enumerate(stage_configs):
        policy = config.stages[index].policy if config.stages else OptimizerPolicy.TAKE_FITTING
        is_last = index == len(stage_configs) - 1
        stage = Stage(
            global_batch=stage_config.batch,
            steps_before=step,
            samples_before=samples,
            is_last=is_last,
            optimizer_policy=policy,
        )
        stages.append(stage)
        if config.stages:
            describe_model(stage_config.model)
            step += samples_of(stage_config, None) // stage_config.batch
            samples = stage.samples_after(step)
    return stages


def check_machine(config: TrainConfig, world: World) -> None:
    """Raise UserError for settings that cannot work on this machine, before a model is built."""
    check_divisible(config.batch, world.size, f"{world.size} processes")
    local_batch = BatchShare(config.batch, world.rank, world.size).local_batch
    check_sizes(config.cache.sizes, local_batch, config.data.text_layout.texts_per_sample)
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if config.loss.backend == "triton" and world.device.type == "cpu" and not interpreted:
        raise UserError("loss.backend=triton needs a GPU, and the device is the CPU; take loss.backend=tiled, or auto")


def check_fits(resumed: CheckpointDescription | None, config: TrainConfig, last_trained: Stage) -> None:
    """Raise UserError where a run with these settings cannot go on from a checkpoint.

    `resumed`: the checkpoint's description; None for a new run. `last_trained`: the stage of its last step.
    """
    if resumed is None:
        if checkpoints_of(Path(config.run)):
            raise UserError(
                f"run={config.run} already holds checkpoints; continue with resume=auto, or choose another run=NAME"
            )
        return
    model = resumed.model_config
    for setting, then, now in (
        ("batch", resumed.batch, last_trained.global_batch),
        ("model.name", model["name"], config.model.name),
        ("model.architecture", model["architecture"], config.model.architecture),
        ("model.lora", model.get("lora", 0), config.model.lora),
        ("optim.name", resumed.optimizer_name, config.optim.name),
    ):
        if then != now:
            raise UserError(f"{setting}={now!r}: the checkpoint was trained with {then!r}; take it, or another run")
    if resumed.samples != last_trained.samples_after(resumed.step):
        raise UserError(
            f"resume: the checkpoint has seen {resumed.samples} samples in {resumed.step} steps, which these "
            "stages do not make; give those that it was trained with"
        )


def pixel_notices(requested: ModelConfig, completed: ModelConfig) -> list[str]:
    """A line for the user if the weights normalise pixels in another way than the settings had it."""
    pixels = completed.pixels
    if pixels == requested.pixels:
        return []
    return [f"pixels are normalised as for the weights: mean {[*pixels.mean]}, deviation {[*pixels.std]}"]


def precision_notices(config: TrainConfig, device_type: str) -> list[str]:
    """A line for the user if the run computes in bf16 on a CPU that has no instructions for it."""
    if config.precision != "bf16" or device_type != "cpu" or cpu_has_bf16():
        return []
    return ["precision=bf16: this CPU has no instructions for it and is several times slower; give precision=fp32"]
