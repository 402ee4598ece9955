"""How a run starts, on one page: resolve, build, announce, open the log. `run/train_loop.py` has what follows."""

from contextlib import ExitStack
from dataclasses import asdict
from functools import partial

from clipscale import checkpoint
from clipscale.config.train_config import TrainConfig
from clipscale.distributed.agreement import run_on_all_ranks
from clipscale.distributed.world import World
from clipscale.eval.published import parse_bands
from clipscale.eval.summary import print_summary
from clipscale.log.metrics import MetricLog
from clipscale.run.run_lock import RunLock
from clipscale.run.step_records import StepRecords
from clipscale.run.train_loop import TrainLoop
from clipscale.run_folder.set_aside import set_aside_for_resume
from clipscale.start.announce import announce
from clipscale.start.build import BuiltRun, build
from clipscale.start.evaluation import intervals_of, load_evaluation
from clipscale.start.resolve import ResolvedRun, resolve
from clipscale.start.resume import find_checkpoint
from clipscale.start.run_log import open_run_log, writing_records
from clipscale.start.saver import build_saver


def start_run(
    config: TrainConfig,
    world: World,
    lock: RunLock | None = None,
    uploader: checkpoint.CheckpointUploader | None = None,
) -> TrainLoop:
    """Start or resume the run, or start its next stage. Returns its loop, before the next step. A collective.

    `lock`: the lock of the run's folder; None if nobody else can use the folder. `uploader`: the one of the earlier
    stages; None in the first stage of this process, and if the run has no copy.

    If it raises UserError, it has ended the data workers that it had started.
    """
    # What it is evaluated on. This comes first, so that a mistyped path ends the start in its first minute.
    evaluation = load_evaluation(config, world)

    # Which checkpoint, and which settings.
    path = find_checkpoint(config, world, fetch_copy=uploader is None)
    resolved = resolve(config, path, world)
    config = resolved.config

    # When it evaluates and saves. An unusable setting of these ends the start before anything is built.
    intervals = intervals_of(config, evaluation)
    parse_bands(config.expected)

    with ExitStack() as undo:
        # Data, model, chunk sizes, loss, passes, optimizer, average; then the checkpoint's state, and compiling.
        built = build(resolved, world)
        undo.callback(built.stream.close)

        # Change the run's folder only now: a start that fails in `build` then leaves the records as they are.
        log = run_on_all_ranks(world, lambda: announce_and_open_log(resolved, built, world) if world.is_rank0 else None)
        records = StepRecords(log, world.size, built.flops, built.stream)
        undo.callback(records.close)

        # Checkpoints and their copies.
        saver = build_saver(resolved, uploader, world)

        loop = TrainLoop(
            world=world,
            lock=lock,
            run_dir=resolved.run_dir,
            stage=resolved.stage,
            step=resolved.step,
            loss=resolved.loss,
            train_step=built.train_step,
            is_compiled=built.is_compiled,
            stream=built.stream,
            schedule=built.schedule,
            intervals=intervals,
            evaluation=evaluation,
            records=records,
            saver=saver,
            checkpoint_template=checkpoint.CheckpointDescription(
                batch=config.batch, model_config=asdict(config.model), optimizer_name=config.optim.name
            ),
            print_summary=partial(
                print_summary, precision=config.precision, expected=config.expected, best=saver.retention.best
            ),
        )
        undo.pop_all()
    return loop


def announce_and_open_log(resolved: ResolvedRun, built: BuiltRun, world: World) -> MetricLog:
    """Set aside what the run does not use in its folder, print what the user should know, and open the log.

    Raises UserError if a file of the folder cannot be written.
    """
    with writing_records(resolved.run_dir):
        set_aside_for_resume(
            resolved.run_dir, resolved.step, starts_from_other_folder=not resolved.continues_own_folder
        )
        announce(resolved, built)
        return open_run_log(resolved, built.schedule, world)
