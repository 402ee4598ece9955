"""The loop of a run: step after step, evaluate, save.

`train.py` calls it for each stage of a run. `start/start_run.py` makes it.
"""

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path

from clipscale.checkpoint import CheckpointDescription, Saver
from clipscale.common.record import Results
from clipscale.common.signals import Poll
from clipscale.common.terminal import show_task
from clipscale.config.stages import Stage
from clipscale.data.loader.host_batch import HostBatch
from clipscale.data.loader.stream import TrainStream
from clipscale.distributed.world import World
from clipscale.eval.run import Evaluation, ResultsFile, evaluate
from clipscale.run.early_end import saving_on_early_end, stop_if_folder_removed
from clipscale.run.run_lock import RunLock
from clipscale.run.signal_poller import SignalPoller
from clipscale.run.step_records import StepRecords
from clipscale.run.stopping import COPY_WITHIN_S
from clipscale.run_folder.records import RunResult, StepRecord
from clipscale.step.checkpoint_state import gather_checkpoint_state
from clipscale.step.compiled import eager_for_new_shapes
from clipscale.step.optim import Schedule
from clipscale.step.train_step import StepResult, TrainStep


@dataclass(frozen=True)
class Intervals:
    """When a run evaluates and saves before its end. 0: never."""

    # Whether the weights are evaluated before the first step.
    evaluates_at_start: bool = False
    # Steps between evaluations.
    eval_steps: int = 0
    # Steps between checkpoints.
    save_steps: int = 0
    # Seconds between checkpoints.
    save_seconds: float = 0.0

    def evaluates_after(self, step: int) -> bool:
        return self.eval_steps > 0 and step % self.eval_steps == 0

    def saves_after(self, step: int) -> bool:
        return self.save_steps > 0 and step % self.save_steps == 0

    def is_overdue(self, seconds: float) -> bool:
        """Whether a checkpoint is due `seconds` after the last one."""
        return 0 < self.save_seconds < seconds


@dataclass
class TrainLoop:
    """The loop of a run, or of one stage, on one rank. `start_run` makes it."""

    world: World
    # The lock of the run's folder, which rank 0 holds; None if nobody else uses the folder.
    lock: RunLock | None
    run_dir: Path
    stage: Stage
    # Completed steps, and the loss of the last one. A resumed run has them from its checkpoint, a new one 0 and NaN.
    step: int
    loss: float

    # What is trained, on which data, and by which learning rates.
    train_step: TrainStep
    # Whether the towers run compiled code.
    is_compiled: bool
    stream: TrainStream
    schedule: Schedule

    # When it is evaluated and saved, on which sets, and what writes the records and the checkpoints.
    intervals: Intervals
    evaluation: Evaluation
    records: StepRecords
    saver: Saver
    # What the descriptions of all checkpoints have in common: batch, model and optimizer.
    checkpoint_template: CheckpointDescription
    # Prints the last lines of the run.
    print_summary: Callable[[RunResult], None]

    # The completed steps at this start.
    step_at_start: int = field(init=False)
    # When the last save began, by `time.monotonic()`; before the first save, when the loop was built.
    saved_at: float = field(init=False)
    signal_poller: SignalPoller = field(init=False)

    def __post_init__(self) -> None:
        self.step_at_start = self.step
        self.saved_at = time.monotonic()
        self.signal_poller = SignalPoller(self.world)

    def run(self) -> RunResult:
        """Run the remaining steps and the final evaluation. Returns the run's result, as `train` does."""
        results: Results = {}
        end = self.schedule.end  # the last step of the run, or of the stage
        self.stream.set_poll(self.signal_poller.poll_while_waiting)
        with (
            closing(self.records),
            self.signal_poller,
            closing(self.saver),
            closing(self.stream),
            saving_on_early_end(self),
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
        result: RunResult = {"run": str(self.run_dir), "step": self.step, "loss": self.loss, "eval": results}
        if self.world.is_rank0 and self.stage.is_last:
            self.print_summary(result)
        return result

    def run_step(self) -> StepResult:
        """One exact optimizer step over the global batch; see `TrainStep.run`. A collective."""
        step = self.step + 1
        train_step = self.train_step
        lr = self.schedule.lr(step)
        with train_step.rollback_on_error(self.stream):
            batch = self.stream.next_batch()  # its samples may still be arriving
            if self.step == self.step_at_start:
                self.show_first_step(batch)
            is_overdue = self.world.is_rank0 and self.intervals.is_overdue(time.monotonic() - self.saved_at)
            result = train_step.run(
                batch,
                self.stream,
                step,
                lr=lr,
                wants_save=is_overdue,
                before_chunk=self.make_before_chunk(len(batch)),
            )
        self.step = step  # the step is complete: an error from here on does not roll it back
        self.loss = result.scalars.loss
        record: StepRecord = {
            "step": step,
            "samples": self.stage.samples_after(step),
            "batch": self.stage.global_batch,
            "lr": lr,
        }
        self.records.add(record, result, train_step.logit_scale)
        if not result.scalars.overflows:  # else the optimizer may have no state yet, which also takes memory
            train_step.size_graph_budget(result.timer)
        return result

    def show_first_step(self, batch: HostBatch) -> None:
        """Show what the first step of this start is doing."""
        if self.world.is_rank0 and self.step == 0:
            show_task("waiting for the first samples")
            batch.tokens(0, 16)  # waits here, so that the first step does not seem slow
        show_task(f"step {self.step + 1}, the first of this start")

    def make_before_chunk(self, local_batch: int) -> Poll:
        """The function that a step calls before each chunk. It never waits for the device.

        It ends the step at a signal (a collective; see `SignalPoller.poll`), shows progress, and logs the previous
        step as soon as the device has finished it.
        """
        passes = count()

        def before_chunk() -> None:
            self.signal_poller.poll()
            self.records.log_if_ready()
            total = self.train_step.num_chunk_passes(local_batch)
            self.records.show_progress(f"step {self.step + 1}", next(passes), total)

        return before_chunk

    def evaluate(self) -> Results:
        """The results of the current model, which are also written to RUN/eval/step_N.json. A collective."""
        train_step = self.train_step
        self.records.flush()
        uses_ema = self.evaluation.uses_ema
        with train_step.weights_for_evaluation(uses_ema=uses_ema), eager_for_new_shapes(self.is_compiled):
            results = evaluate(
                train_step.model,
                self.evaluation,
                self.world,
                autocast=train_step.precision.autocast,
                file=ResultsFile(self.run_dir, self.step, self.evaluation.facts),
                poll=partial(self.signal_poller.poll, every_call=True),
                poll_while_waiting=self.signal_poller.poll_while_waiting,
                progress=self.records.show_progress,
            )
        self.records.log_evaluation(self.step, results)
        return results

    def save(self, *, wait: bool) -> None:
        """Begin to write a checkpoint; see `checkpoint.Saver`. A collective. `wait`: wait until it is complete."""
        self.records.flush()
        if wait:
            show_task(f"saving step {self.step}")
        samples = self.stage.samples_after(self.step)
        description = replace(self.checkpoint_template, step=self.step, samples=samples, loss=self.loss)
        with stop_if_folder_removed(self.lock, self.world, self.saver.wait_for_save, self.step):
            self.saver.save(gather_checkpoint_state(description, self.train_step, self.stream.position), wait=wait)
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
