"""The loop of a run: step after step, evaluate, save.

This is one process's part; the command line starts the processes. `start/begin.py` has the start of a run on one page.
"""

import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

from clipscale.checkpoint import CheckpointUploader, waiting_for_copy_if_start_fails
from clipscale.common import files
from clipscale.common.poll import Poll
from clipscale.common.record import Results, RunResult
from clipscale.common.terminal import show_task
from clipscale.config.train_config import TrainConfig
from clipscale.distributed.agreement import run_long_on_rank0, run_on_rank0
from clipscale.distributed.fsdp import reshard
from clipscale.distributed.join import destroy_world, init_world
from clipscale.distributed.world import World
from clipscale.eval.run import ResultsFile, evaluate
from clipscale.lifecycle.early_end import closing_all, ending_if_removed, saving_completed_steps
from clipscale.lifecycle.run_lock import RunLock
from clipscale.lifecycle.stopping import SignalPoller
from clipscale.log.records import StepRecord
from clipscale.loss.runtime import LossRuntime, running_on
from clipscale.run_folder.names import RESULT
from clipscale.start.begin import StartedRun, begin
from clipscale.start.shared_storage import check_shared
from clipscale.step.checkpoint_state import gather_checkpoint_state
from clipscale.step.compiled import eager_for_new_shapes
from clipscale.step.train_step import StepResult

# After a signal the run saves, and then waits about this many seconds at most for the checkpoint's copy. The launcher
# kills its workers `launch.local.SHUTDOWN_S` (150 s) after the signal, so a copy has all of its time only if the save
# takes less than 90 s. With torch 2.11 workers are killed after 30 s.
COPY_WITHIN_S = 60.0


def train(config: TrainConfig) -> RunResult:
    """Train as configured, from the start or from the newest checkpoint, and evaluate at the end.

    Returns {"run": folder, "step": steps done, "loss": last loss, "eval": results by set}, the same on every rank.
    Raises UserError for every mistake that the user can fix, and StoppedError after a signal.
    """
    world = init_world(config.device, config.launch.timeout_s)
    lock = RunLock(Path(config.run))
    try:
        run_on_rank0(world, lock.acquire)
        check_shared(lock.folder, world)
        with running_on(LossRuntime(timeout=world.timeout)):
            return train_stages(config, world, lock)
    finally:
        lock.release()
        destroy_world()


def train_stages(config: TrainConfig, world: World, lock: RunLock) -> RunResult:
    """Train one stage after another; a run without stages has one. Returns the last one's result."""
    uploader = None
    while True:
        with waiting_for_copy_if_start_fails(uploader, world, COPY_WITHIN_S):
            loop = TrainLoop(begin(config, world, uploader), world, lock)
        result = loop.run()
        uploader = loop.saver.uploader
        if loop.stage.is_last:
            # All ranks stay: Slurm would end rank 0 two minutes after the others.
            run_long_on_rank0(world, partial(end_uploads, uploader, loop.folder, config.launch.timeout_s, result))
            return result
        del loop  # frees its model before the next stage's is built
        config = replace(config, resume="auto")


class TrainLoop:
    """The loop of a run, or of one stage, on one rank."""

    def __init__(self, started: StartedRun, world: World, lock: RunLock | None = None) -> None:
        """`lock`: the lock of the run's folder, which rank 0 holds; None if nobody else uses the folder."""
        self.world = world
        self.lock = lock
        self.folder = started.folder
        self.stage = started.stage
        # What is trained, on which data, and how its rate changes.
        self.train_step = started.train_step
        self.stream = started.stream
        self.schedule = started.schedule
        self.is_compiled = started.is_compiled
        # When it is evaluated and saved, on which sets, and where that is written.
        self.intervals = started.intervals
        self.evaluation = started.evaluation
        self.records = started.records
        self.saver = started.saver
        self.checkpoint_template = started.checkpoint_template
        self.print_summary = started.print_summary
        # Completed steps, now and at this start; and the loss of the last one.
        self.step = self.step_at_start = started.step
        self.loss = started.loss
        self.signal_poller = SignalPoller(world)
        self.saved_at = time.monotonic()

    def run(self) -> RunResult:
        """Run the remaining steps and the final evaluation. Returns the run's result, as `train` does."""
        results: Results = {}
        end = self.schedule.end  # the step with which the run, or the stage, ends
        self.stream.set_poll(self.signal_poller.poll_while_waiting)
        with (
            closing_all(self.records),
            self.signal_poller,
            closing_all(self.stream, self.saver),
            saving_completed_steps(self),
        ):
            if self.step == 0 < end and self.intervals.evaluates_at_start:
                self.evaluate()
            while self.step < end:
                step_result = self.run_step()
                is_last = self.step == end
                is_best = False
                if self.intervals.evaluates_after(self.step) and not is_last:
                    results = self.evaluate()
                    is_best = self.saver.is_best_so_far(self.step)
                if is_best or is_last or step_result.wants_save or self.intervals.saves_after(self.step):
                    self.save(wait=is_last)
            if self.evaluation.sets:
                results = self.evaluate()
        result: RunResult = {"run": str(self.folder), "step": self.step, "loss": self.loss, "eval": results}
        if self.world.is_rank0 and self.stage.is_last:
            self.print_summary(result)
        return result

    def run_step(self) -> StepResult:
        """One exact optimizer step over the global batch; see `TrainStep.run`. A collective."""
        step = self.step + 1
        train_step = self.train_step
        lr = self.schedule.apply(train_step.optimizer, self.step)
        with train_step.rollback_on_error(self.stream):
            batch = self.stream.next_batch()  # its samples may still be arriving
            if self.world.is_rank0 and self.step == 0:
                show_task("waiting for the first samples")
                batch.tokens(0, 16)  # waits here, so that the first step does not seem slow
            if self.step == self.step_at_start:
                show_task(f"step {step}, the first of this start")
            is_overdue = self.world.is_rank0 and self.intervals.is_overdue(time.monotonic() - self.saved_at)
            result = train_step.run(
                batch,
                self.stream,
                step,
                wants_save=is_overdue,
                before_chunk=self.make_before_chunk(len(batch)),
            )
        self.step = step  # the step is complete: an error from here on does not roll it back
        self.loss = result.numbers.loss
        record: StepRecord = {
            "step": step,
            "samples": self.stage.samples_before(step),
            "batch": self.stage.global_batch,
            "lr": lr,
        }
        self.records.add(record, result, train_step.model.logit_scale.exp())
        if not result.numbers.overflows:  # else the optimizer may have no state yet, which also takes memory
            train_step.set_keep_bytes_if_unknown(result.timer)
        return result

    def make_before_chunk(self, local_batch: int) -> Poll:
        """The function that a step calls before each chunk. It never waits for the device.

        It ends the step at a signal (a collective; see `SignalPoller.poll`), shows progress, and logs the previous
        step as soon as the device has finished it.
        """
        passes = count()

        def before_chunk() -> None:
            self.signal_poller.poll()
            self.records.log_if_ready()
            total = self.train_step.cache.num_chunk_passes(local_batch)
            self.records.show_progress(f"step {self.step + 1}", next(passes), total)

        return before_chunk

    def evaluate(self) -> Results:
        """The results of the current model, which are also written to RUN/eval/step_N.json. A collective."""
        train_step = self.train_step
        self.records.flush()
        ema = train_step.ema if self.evaluation.uses_ema else None
        try:
            with ema.swapped_in() if ema else nullcontext(), eager_for_new_shapes(self.is_compiled):
                results = evaluate(
                    train_step.model,
                    self.evaluation,
                    self.world,
                    autocast=train_step.precision.autocast,
                    file=ResultsFile(self.folder, self.step, self.evaluation.facts),
                    poll=partial(self.signal_poller.poll, every_call=True),
                    poll_while_waiting=self.signal_poller.poll_while_waiting,
                    progress=self.records.show_progress,
                )
        finally:
            reshard(train_step.model)
        self.records.log_evaluation(self.step, results)
        return results

    def save(self, *, wait: bool) -> None:
        """Begin to write a checkpoint; see `checkpoint.Saver`. A collective. `wait`: wait until it is complete."""
        self.records.flush()
        if wait:
            show_task(f"saving step {self.step}")
        samples = self.stage.samples_before(self.step)
        description = replace(self.checkpoint_template, step=self.step, samples=samples, loss=self.loss)
        with ending_if_removed(self.lock, self.world, self.saver.wait_for_save, self.step):
            self.saver.save(gather_checkpoint_state(description, self.train_step, self.stream), wait=wait)
        self.saved_at = time.monotonic()

    def save_at_once(self) -> None:
        """Save the completed steps. A collective. Waits for the whole checkpoint, then COPY_WITHIN_S for its copy."""
        if self.step != self.saver.last_begun_step:
            self.save(wait=True)
        self.saver.wait_for_copy(COPY_WITHIN_S)

    @property
    def is_updating(self) -> bool:
        """Whether an update of the weights has begun and not ended."""
        return self.train_step.is_updating


def end_uploads(uploader: CheckpointUploader | None, folder: Path, limit_s: float, result: RunResult) -> None:
    """Wait for the last copy, if there is one, and then write result.json into the run's folder. With it the same
    command prints the results, and trains no more."""
    if uploader is None or uploader.close(limit_s, result):
        files.write_json(folder / RESULT, result)
