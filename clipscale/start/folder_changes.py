"""How a run starts: what it changes in the run's folder.

`start_run` calls `prepare_checkpoint_to_resume` before `resolve`, and `open_run_log` after `build`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from clipscale import checkpoint
from clipscale.common import files, ranks
from clipscale.common.errors import UserError
from clipscale.config.train_config import TrainConfig
from clipscale.distributed.world import World
from clipscale.log.metrics import MetricLog, open_log
from clipscale.run_folder.paths import CONFIG
from clipscale.start.resolve import ResolvedRun
from clipscale.step.optim import Schedule


def prepare_checkpoint_to_resume(config: TrainConfig, world: World, *, fetch_copy: bool) -> Path | None:
    """The checkpoint to resume, as `checkpoint.prepare_checkpoint` finds it; None for a new run. A collective.

    Damaged checkpoints of the run are renamed. After a restart by torchrun or Slurm the run's own newest checkpoint
    comes first, whatever `resume` says.

    `fetch_copy`: fetch the checkpoint of `checkpoint.copy` if it is newer than all in the run's folder.

    Raises UserError.
    """
    folder = Path(config.run)
    copy = config.checkpoint.copy if fetch_copy else ""
    # torchrun's agent does not count a restart that another node has caused, so one rank with a count is enough.
    restarted = any(world.all_gather_object(ranks.is_restarted()))
    newest = checkpoint.prepare_checkpoint(folder, "auto", world, copy) if restarted else None
    return newest or checkpoint.prepare_checkpoint(folder, config.resume, world, copy)


@contextmanager
def writing_records(run_dir: Path) -> Iterator[None]:
    """Context of code that writes a run's records: turns an OSError into a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"run={run_dir}: {error.filename or 'a record'} cannot be written ({error.strerror or error}); "
            "repair that, and give the command again"
        ) from error


def note_evaluation_and_copy(file: Path, settings: str) -> None:
    """Put the evaluation and the copy's address of `settings` (as YAML) into a run's config.yaml, if it has one."""
    trained = files.read_record(file)
    present = files.parse_yaml(settings)
    changes = {"eval": present["eval"]}
    copy = present["checkpoint"]["copy"]
    if copy:
        changes["checkpoint"] = {**trained.get("checkpoint", {}), "copy": copy}
    noted = {**trained, **changes}
    if trained and noted != trained:
        files.write_text(file, yaml.safe_dump(noted, sort_keys=False, allow_unicode=True))


def open_run_log(resolved: ResolvedRun, schedule: Schedule, world: World) -> MetricLog:
    """Write config.yaml and env.json, drop the later lines of metrics.jsonl, and open it with the other sinks.

    In a complete run's config.yaml only the evaluation and the address of the copy change. The other settings stay as
    they were in training.
    """
    if resolved.step >= schedule.end:
        note_evaluation_and_copy(resolved.run_dir / CONFIG, resolved.config_yaml)
    sinks = resolved.config.log
    return open_log(
        resolved.run_dir,
        wandb=sinks.wandb_mode,
        tensorboard=sinks.tensorboard,
        every=sinks.every,
        settings=resolved.config_yaml,
        resume_step=resolved.step,
        world_size=world.size,
        total=schedule.end,
    )
