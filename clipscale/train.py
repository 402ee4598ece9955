"""The story of a run: begin or resume, step after step, evaluate, save.

This is one process's part; the command line starts the processes.
"""

import math
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path

from clipscale import checkpoint
from clipscale.common import files
from clipscale.common.errors import StoppedError, UserError
from clipscale.common.record import Record, Results
from clipscale.common.rng import RandomState
from clipscale.common.terminal import doing, tell
from clipscale.config.train import RESULT, RESUMES, TrainConfig, changes_since, samples_of, to_yaml
from clipscale.data.loader.stream import TrainStream, merge_positions
from clipscale.distributed.fsdp import reshard
from clipscale.distributed.world import World, destroy_world, init_world
from clipscale.eval.run import ResultsFile, evaluate
from clipscale.eval.run import check as check_sets
from clipscale.launch.run_lock import RunLock
from clipscale.launch.stopping import SignalError, Stop, stopped
from clipscale.log.metrics import MetricLog
from clipscale.log.records import whole_lines
from clipscale.log.step_record import StepRecords
from clipscale.log.table import print_results, with_start
from clipscale.models.flops import Flops
from clipscale.models.towers import ClipModel
from clipscale.state.shared import check_shared
from clipscale.state.start import Resolved, build, resolve
from clipscale.state.train_state import least_saved_bytes, saved_values
from clipscale.step.compiled import compile_towers, no_compilation, try_compiled, worth_compiling
from clipscale.step.optim import Schedule
from clipscale.step.pass_contexts import snapshot_batch_norm
from clipscale.step.train_step import Agreement, TrainStep

# Seconds to wait for a copy after a signal: well below `launch.local.SHUTDOWN_S`, which also covers the save.
AFTER_SIGNAL_S = 60.0


def train(config: TrainConfig) -> Record:
    """Train as configured, from the start or from the newest checkpoint, and evaluate at the end.

    Returns {"run": folder, "step": steps done, "loss": last loss, "eval": results by set}, the same on every rank.
    Raises UserError for every mistake that the user can fix, and StoppedError after a signal.
    """
    world = init_world(config.device, config.launch.timeout_s)
    lock = RunLock(Path(config.run))
    copies = None
    try:
        world.on_main(lock.acquire)
        check_shared(lock.folder, world)
        while True:
            run = start_run(config, world, lock, copies)
            results = run.go()
            copies = run.saver.copies
            if run.resolved.stage.last:
                if world.is_rank0:
                    copies.close(config.launch.timeout_s, results)
                return results
            del run  # frees its model before the next stage's is built
            config = replace(config, resume="auto")
    finally:
        lock.release()
        destroy_world()


def start_run(
    config: TrainConfig, world: World, lock: RunLock | None = None, copies: checkpoint.Copies | None = None
) -> "Run":
    """Begin or resume a run or its next stage. A collective. Raises UserError, and leaves no process behind then.

    `lock`: the lock of the run's folder, held by rank 0; None: nobody else uses the folder.
    `copies`: those of the run's earlier stages.
    """
    if config.eval.has_sets:
        doing("reading the evaluation sets")
    check_sets(config.eval, world)
    resolved = resolve(config, world, fetches=copies is None)
    with ExitStack() as undo:
        trainer, stream = build(resolved, world)
        undo.callback(stream.close)
        if world.size > 1:
            stream.defer_failures()
        schedule = schedule_of(resolved, stream)
        if 0 < resolved.step < schedule.end:
            world.on_main(lambda: checkpoint.check_room(resolved.folder, least_saved_bytes(resolved.config)))
        flops = Flops(resolved.config.model, trainer.model, world.device)
        is_compiled = compile_if_worth(trainer, flops, schedule.end - resolved.step, world)
        log = open_log(resolved, schedule, world) if world.is_rank0 else None
        if log:
            tell(stream.memory)
        records = StepRecords(log, world.size, flops, stream)
        undo.callback(records.close)
        saver = checkpoint.Saver(resolved.folder, world, resolved.config.checkpoint, copies)
        if config.resume in RESUMES:  # the step is another run's otherwise
            saver.last_step = resolved.step
        run = Run(
            resolved, world, lock, trainer, stream, schedule, records, saver, is_compiled, resolved.step, resolved.loss
        )
        undo.pop_all()
    return run


def compile_if_worth(step: TrainStep, flops: Flops, steps: int, world: World) -> bool:
    """Compile the towers if the settings ask for it, or if the remaining `steps` are worth the time. Whether it has."""
    config = step.config
    left = steps * config.batch / world.size * flops.per_sample()
    if not worth_compiling(config.model.compile, left, flops.peak):
        return False
    doing("compiling the towers")
    towers = compile_towers(step.model, lengths_vary=step.sort_captions)
    chunks = step.chunks.image, step.chunks.text
    problem = try_compiled(step.model, towers, chunks, config.batch // world.size, step.precision, world)
    if problem and world.is_rank0:
        tell(f"warning: model.compile={config.model.compile}: the towers run without compiled code ({problem})")
    return not problem


def schedule_of(resolved: Resolved, stream: TrainStream) -> Schedule:
    """The learning rates of the run's present stage. Raises UserError."""
    config, stage, epoch = resolved.config, resolved.stage, stream.samples_per_epoch
    samples = samples_of(stage.config, epoch)
    return Schedule.build(config.schedule, config.optim, config.batch, samples, epoch, stage.first)


def open_log(resolved: Resolved, schedule: Schedule, world: World) -> MetricLog:
    """The log of this start, on rank 0. First prints how the start differs from the run so far."""
    config, step, folder = resolved.config_to_save, resolved.step, resolved.folder
    if not (resolved.checkpoint and resolved.checkpoint.resolve().parent == (folder / "checkpoints").resolve()):
        checkpoint.set_records_aside(folder)
    files.read_or_set_aside(folder / RESULT, files.read_record)
    (folder / RESULT).unlink(missing_ok=True)
    if step:
        checkpoint.set_later_aside(folder, step)
        changes = files.read_or_set_aside(folder / "config.yaml", partial(changes_since, config=config)) or []
        records, _ = whole_lines(folder / "metrics.jsonl")
        rates = [r["lr"] for r in records if r["step"] == step and isinstance(r.get("lr"), float)]
        rate = schedule.lr(step - 1)
        if rates and step > schedule.first and not math.isclose(rates[0], rate, rel_tol=0.05):
            changes.append(f"the learning rate of this step {rates[0]:.1e} -> {rate:.1e}")
        changed = "; changed: " + ", ".join(changes) if changes else ""
        found = " is complete at" if step >= schedule.end else ": going on after"
        tell(f"run={config.run}{found} step {step} of {schedule.end}{changed}")
    if step >= schedule.end:
        tell("nothing is left to train; more samples= go on with it")
    elif 0 < schedule.total <= schedule.warmup:
        tell(
            f"warning: schedule.warmup={config.schedule.warmup} covers all {schedule.total} steps of the run; "
            "give a share, as in schedule.warmup=5%",
            error=True,
        )
    return MetricLog(
        folder,
        config.log,
        resolved_config=to_yaml(config),
        resume_step=step,
        world=world.size,
        total=schedule.end,
        is_training=step < schedule.end,
    )


@dataclass
class Run:
    """The loop of a run, or of one stage, on one rank. `start_run` makes it."""

    resolved: Resolved
    world: World
    lock: RunLock | None
    trainer: TrainStep
    stream: TrainStream
    schedule: Schedule
    records: StepRecords
    saver: checkpoint.Saver
    is_compiled: bool
    # Completed steps.
    step: int
    # The last completed step's loss.
    loss: float

    def __post_init__(self) -> None:
        self.config = self.resolved.config
        self.total = self.schedule.end
        self.stop = Stop(self.world)
        self.stream.while_waiting(self.stop.check_alone)
        self.saved_at = time.monotonic()

    def go(self) -> Record:
        """Run the remaining steps and the final evaluation."""
        config, results = self.config, {}
        # also during the last save: schedulers and launchers send their signals more than once
        with self.stop:
            try:
                if self.step == 0 < self.total and config.model.weights and config.eval.has_sets:
                    self.evaluate()  # the baseline: the pretrained weights before training
                while self.step < self.total:
                    agreement = self.train_step()
                    if config.eval.every and self.step % config.eval.every == 0 and self.step < self.total:
                        results = self.evaluate()
                    if self.save_due(agreement):
                        self.save(last=self.step == self.total)
                if config.eval.has_sets:
                    results = self.evaluate()
            except SignalError as signal:  # on all ranks
                self.save_at_once()
                raise StoppedError(stopped_after(signal.number, self.step), signal.number) from None
            except (UserError, OSError) as error:
                saves = getattr(error, "saves", None)
                if saves or (saves is None and self.world.size == 1):
                    self.save_at_once()
                raise
            finally:
                self.stream.close()
                self.saver.close()
                self.records.close()
        if self.world.is_rank0:
            folder = self.resolved.folder
            print_results(with_start(results, at_start(folder)), f"{folder.name}, step {self.step}, {config.precision}")
            tell(f"done: {folder} (step {self.step}, loss {self.loss:.4f})")
            tell(f"clipscale report {shlex.quote(config.run)} shows it")
        return {"run": str(self.resolved.folder), "step": self.step, "loss": self.loss, "eval": results}

    def train_step(self) -> Agreement:
        """One exact optimizer step over the global batch; see `TrainStep.run`. Returns what the ranks agreed on."""
        number = self.step + 1
        step = self.trainer
        lr = self.schedule.apply(step.optimizer, self.step)
        with rollback_on_error(step.model, self.stream, self.world):
            batch = self.stream.next_batch()  # its samples may still be arriving
            if self.world.is_rank0 and self.step == 0:
                doing("waiting for the first samples")
                batch.tokens(0, 16)  # waits for them here, so that step 1 does not seem slow
            if self.step == self.resolved.step:
                doing(f"step {number}, the first of this start")
            self.stream.waited_s()  # resets the count: the record has the waiting of this step alone
            _, seconds = self.config.checkpoint.interval
            overdue = self.world.is_rank0 and 0 < seconds < time.monotonic() - self.saved_at
            done = step.run(batch, self.stream, number, save=overdue, before_chunk=self.before_chunk())
        self.step, self.loss = number, done.loss  # what fails from here on undoes nothing
        record = {
            "step": number,
            "samples": self.resolved.stage.samples_before(number),
            "batch": self.config.batch,
            "loss": done.loss,
            "lr": lr,
            "grad_norm": done.grad_norm,
            "skipped": done.grad_norm is None,
        }
        scalars = {"logit_scale": step.model.logit_scale.exp(), **done.statistics}
        self.records.add(record, done.phases, scalars, done.widths)
        step.set_keep_budget(done.phases)
        return done.agreement

    def before_chunk(self) -> Callable[[], None]:
        """The callback of a step before each chunk: ends the step at a signal, shows progress, and logs the previous
        step as soon as the device has finished it. Never waits for the device."""
        chunks = count()
        cache = self.trainer.cache
        rows = self.config.batch // self.world.size

        def call() -> None:
            self.stop.check()
            self.records.poll()
            if self.records.log:
                self.records.log.progress(f"step {self.step + 1}", next(chunks), cache.num_chunks(rows))

        return call

    def evaluate(self) -> Record:
        """Evaluate the current model, and write the results to RUN/eval/step_N.json."""
        step = self.trainer
        config = self.config
        self.records.finish()
        self.stop.restart()
        averaged = step.average.swapped_in() if step.average and config.eval.weights == "ema" else nullcontext()
        with averaged, no_compilation(self.is_compiled):
            results = evaluate(
                step.model,
                config.eval,
                self.world,
                autocast=step.precision.autocast,
                loss=config.loss,
                file=ResultsFile(self.resolved.folder, self.step, {"precision": config.precision}),
                before_batch=self.stop.check,
                progress=self.records.log.progress if self.records.log else lambda *_: None,
            )
        reshard(step.model)
        if self.records.log:
            self.records.log.eval(self.step, results)
        return results

    def save_due(self, agreement: Agreement) -> bool:
        """Whether to save after this step: at the steps or seconds of `checkpoint.every`, and after the last step. All
        ranks agree."""
        steps, _ = self.config.checkpoint.interval
        due = self.step == self.total or (steps > 0 and self.step % steps == 0)
        return due or agreement.save

    def save(self, *, last: bool) -> None:
        """Begin to write a checkpoint; see `checkpoint.Saver`. Waits for the `last` one.

        Raises UserError on every rank if somebody has removed the run's folder. The checkpoint is then written to a new
        folder, unless another run has begun there.
        """
        self.records.finish()
        if last:
            doing(f"saving step {self.step}")
        removed = self.lock is not None and self.world.on_main(self.lock.renew)
        position = self.world.on_all(self.stream.position)
        now = RandomState.now(self.world.device)
        saved = checkpoint.Saved(
            step=self.step,
            samples=self.resolved.stage.samples_before(self.step),
            batch=self.config.batch,
            loss=self.loss,
            random=self.world.all_gather_object({"cpu": now.cpu, "cuda": now.cuda}),
            position=merge_positions(self.world.all_gather_object(position)),
            **saved_values(self.trainer),
        )
        self.saver.save(saved, last=last or removed)
        self.saved_at = time.monotonic()
        if removed:
            raise UserError(
                f"run={self.config.run}: its folder was removed while it trained, with its records; a new one holds "
                f"step {self.step}: go on with resume=auto"
            )

    def save_at_once(self) -> None:
        """Save the completed steps, wait until the checkpoint is complete, and a minute for its copy."""
        if self.step != self.saver.last_step:
            self.save(last=True)
        self.saver.wait()
        if self.config.checkpoint.copy:
            self.world.on_main(lambda: self.saver.copies.close(AFTER_SIGNAL_S))


@contextmanager
def rollback_on_error(model: ClipModel, stream: TrainStream, world: World) -> Iterator[None]:
    """Around a step: if a signal or an error ends it before the update, restores random states and statistics.

    A resumed run then repeats the step bit for bit.
    """
    random = RandomState.now(world.device)
    restore_statistics = snapshot_batch_norm(model)
    try:
        yield
    except (UserError, OSError):
        random.restore()
        restore_statistics()
        stream.give_back()
        reshard(model)  # the error may have left FSDP2's weights gathered
        raise


def stopped_after(number: int, step: int) -> str:
    """The message of a run that a signal has ended."""
    return stopped(number) + (f" after step {step} and saved" if step else " in the first step: nothing is saved")


def at_start(folder: Path) -> Results:
    """The results of the weights that a run began with; empty if it began with random ones."""
    return ResultsFile(folder, 0).record()["results"]
