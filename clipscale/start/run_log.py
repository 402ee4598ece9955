"""Opens the log of a run that starts, and writes its settings into the run's folder."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.distributed.world import World
from clipscale.log.metrics import MetricLog, open_log
from clipscale.run_folder.paths import CONFIG
from clipscale.start.resolve import ResolvedRun
from clipscale.step.optim import Schedule


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
    """Replace two settings in a run's config.yaml, if it has one: the evaluation, and the address of the copy.

    `settings`: the present settings, as YAML.
    """
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
