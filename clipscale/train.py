"""The story of a run: build, resume, loop, evaluate, save. This is one process's part; the command line starts the processes."""

import logging
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from clipscale import checkpoint
from clipscale.common.errors import StoppedError, UserError, lost_rank
from clipscale.common.phases import Phases, Readback
from clipscale.common.rng import RandomState
from clipscale.common.terminal import say
from clipscale.config.checks import shared
from clipscale.config.sections import LR_SCALING
from clipscale.config.train import TrainConfig, changes_since, to_yaml
from clipscale.data.loader.host_batch import HostBatch
from clipscale.data.loader.ramp import BatchSizes
from clipscale.data.loader.stream import merge_positions
from clipscale.data.loader.to_device import ChunkLoader
from clipscale.distributed import world as distributed
from clipscale.distributed.fsdp import reshard
from clipscale.distributed.world import World
from clipscale.eval.run import check as check_sets
from clipscale.eval.run import evaluate
from clipscale.launch import run_lock
from clipscale.launch.run_lock import RunLock
from clipscale.launch.stopping import AbandonedError, Stop
from clipscale.models.flops import Flops
from clipscale.report.metrics import MetricLog
from clipscale.report.page import write_report
from clipscale.report.profile import Profiler
from clipscale.report.step_record import StepRecords
from clipscale.report.table import print_results
from clipscale.state.start import start
from clipscale.step.chunk_sizes import CHUNKS
from clipscale.step.kept_graphs import KeepBudget
from clipscale.step.optim import Schedule

log = logging.getLogger(__name__)


def train(config: TrainConfig) -> dict[str, Any]:
    """Train as configured, from the start or from the newest checkpoint, and evaluate at the end.

    Returns {"run": folder, "step": steps done, "loss": last loss, "eval": results by set}, the same on every rank.
    Raises UserError for every mistake that the user can fix, LostRankError where another rank hangs or has died.
    """
    begun = time.monotonic()
    world = distributed.start(config.device, config.launch.timeout_s)
    folder = Path(config.run)
    # A sweep makes its jobs' folders, and keeps them. The folder of an unnamed run holds no more than its lock.
    new = world.main and (not folder.exists() or [path.name for path in folder.iterdir()] == [run_lock.FILE])
    lock, lost = RunLock(folder), False
    try:
        world.on_main(lock.enter)
        return Run(config, world, begun).go()
    except UserError:
        if new:
            checkpoint.remove_empty_run(folder, CHUNKS, run_lock.FILE)
        raise
    except Exception as error:
        lost = lost_rank(error)
        raise
    finally:
        lock.release()
        if not lost:  # the group would wait for the lost rank
            distributed.stop()


class Run:
    """Everything one training process holds."""

    def __init__(self, config: TrainConfig, world: World, begun: float | None = None) -> None:
        """`begun`: when this start of the run began, by the monotonic clock."""
        self.config, self.world = config, world
        self.begun = begun or time.monotonic()
        shared(config.batch, world.size, f"{world.size} processes")
        self.sizes = BatchSizes(config.batch, config.ramp)
        self.folder = Path(config.run)
        world.on_main(lambda: checkpoint.make_folder(self.folder))
        check_sets(config.eval, world)
        self.budget = KeepBudget(config.cache.keep, world)
        started = start(config, world, self.folder, self.sizes)
        self.state, self.stream = started.state, started.stream
        self.step, self.last_loss, resumed = started.step, started.loss, started.resumed
        flops = Flops(config.model, world.device, stored_images=self.state.stored is not None)
        epoch = self.stream.samples_per_epoch
        samples = self.sizes.samples(config.samples, config.epochs, epoch)
        self.total = self.sizes.steps(samples)
        self.schedule = Schedule.of_run(
            config.schedule, config.optim, batch=config.batch, samples=samples, epoch=epoch, announce=world.main
        )
        self.metrics = None
        if world.main:
            if resumed:
                checkpoint.set_aside(self.folder, self.step)
                found = changes_since(self.folder / "config.yaml", self.state.config)
                changed = "; changed: " + ", ".join(found) if found else ""
                say(f"run={config.run}: going on after step {self.step} of {self.total}{changed}")
            self.metrics = MetricLog(
                self.folder,
                config.log,
                resolved_config=to_yaml(self.state.config),
                resume_step=self.step,
                world=world.size,
            )
            for line in (self.stream.memory, *self.state.notes):
                self.metrics.message(line)
        self.records = StepRecords(self.metrics.step if self.metrics else None, world.size, flops, self.stream)
        self.saved_at = time.monotonic()
        self.stop = Stop(world, config.launch.grace_s)  # signals that this rank has received
        self.saver = checkpoint.Saver(self.folder, world, config.checkpoint)
        self.saver.last_step, self.saved_step = (self.step, self.step) if resumed else (None, 0)
        self.profiler = Profiler(self.folder, config.log.profile, world.rank, world.device)
        self.step_s = self.eval_s = 0.0  # what the last of each took
        self.first: dict[str, float] = {}  # of this start's first record
        self.busy = False  # whether the device has work of the present step
        self.stopping = 0  # the signal at which all ranks have agreed to stop; 0: none

    def go(self) -> dict[str, Any]:
        """All steps that are left, and the evaluation at the end."""
        config = self.config
        results: dict[str, Any] = {}
        if self.step >= self.total and self.world.main:
            say(
                f"run={config.run} is complete at step {self.step}: nothing is left to train; more samples= go on with it"
            )
        try:
            with self.stop:
                self.first = {"start_s": time.monotonic() - self.begun}
                while self.step < self.total:
                    self.optimizer_step()
                    self.step += 1
                    if config.eval.every and self.step % config.eval.every == 0 and self.step < self.total:
                        results = self.evaluate()
                    if self.save_due():
                        self.save()
                    if self.stopping:
                        raise self.stopped()
                if config.eval.wanted:
                    results = self.evaluate()
        except AbandonedError:
            (self.stopping,) = self.world.highest(self.stop.number)
            if self.step > self.saved_step:
                self.save()
            raise self.stopped() from None
        except Exception as error:
            if lost_rank(error):
                self.saver.forget()
            raise
        finally:
            self.stream.close()
            self.saver.close()
            self.records.finish()
            if self.metrics:
                self.metrics.close()
        if self.world.main:
            print_results(results, f"{self.folder.name}, step {self.step}")
            try:
                if config.log.report:
                    write_report(self.folder)
            except (OSError, UserError) as error:
                log.warning("%s/report.html could not be written (%s)", self.folder, error)
        return {"run": str(self.folder), "step": self.step, "loss": self.last_loss, "eval": results}

    def stopped(self) -> StoppedError:
        """The end of the run at a signal. A checkpoint holds everything up to here."""
        return StoppedError(
            f"stopped by a signal after step {self.step}; go on with run={self.config.run} resume=auto", self.stopping
        )

    def optimizer_step(self) -> dict[str, Any]:
        """One exact step over the global batch; returns its record for `metrics.jsonl`.

        Raises AbandonedError, with everything as it was before the step, where a signal leaves no time for the rest of it.
        """
        before, started = RandomState.now(self.world.device), time.monotonic()
        statistics = [buffer.clone() for buffer in self.state.statistics()]
        self.stop.begin(self.step_s)
        self.stop.save_s = self.saver.save_s
        try:
            with self.profiler(self.step + 1):
                record = self.whole_step()
        except AbandonedError:
            before.restore()
            for buffer, value in zip(self.state.statistics(), statistics, strict=True):
                buffer.copy_(value)
            self.state.optimizer.zero_grad()
            self.stream.give_back()
            raise
        self.step_s = time.monotonic() - started
        return record

    def whole_step(self) -> dict[str, Any]:
        """The step itself."""
        state, cache, size = self.state, self.state.cache, self.sizes.at(self.step)
        measured = self.config.log.noise_scale > 0 and (self.step + 1) % self.config.log.noise_scale == 0
        phases = Phases(self.world.device)
        lr = self.set_learning_rate(size)
        batch, images, texts = self.inputs(size, measured=measured)
        with phases("encode"):
            features = cache.encode(images, texts)
        with phases("loss"):
            value = state.loss(*features)
            state.backward(value)
            del features
        with phases("replay"), state.noise.measure(cache) if measured else nullcontext():
            cache.replay()
        with phases("optim"):
            norm = state.gradient_norm()
            noise = state.noise_scale(size) if measured else {}
            loss, grad_norm = Readback(value, norm).read()  # the only place where the host waits for the device
            finite = state.check_finite(self.step, loss, grad_norm, batch.ids)
            if finite or state.precision.scaler:  # after an overflow the scaler skips the step and lowers its scale
                state.update(norm)
        self.budget.after_step(phases)
        self.last_loss = loss
        return self.record(
            size, phases, texts, lr=lr, grad_norm=grad_norm if finite else None, skipped=not finite, **noise
        )

    def inputs(self, size: int, *, measured: bool) -> tuple[HostBatch, ChunkLoader, Any]:
        """Begin a step of `size` samples; returns its batch, which may still be arriving, and the towers' inputs.

        `measured`: the step measures the noise scale.
        """
        state, self.busy = self.state, False
        state.cache.keep_bytes = self.budget.of_step(size)
        state.optimizer.zero_grad()
        batch = self.stream.next_batch()
        images = ChunkLoader(batch.pixels, len(batch), self.world.device, resident=state.captions.resident)
        texts = state.captions.input(batch, sort=not measured)  # the noise scale wants chunks of random samples
        batch.expect(state.cache.ranges(0, len(batch)))
        state.cache.before_chunk = self.before_chunk
        return batch, images, texts

    def record(self, size: int, phases: Phases, texts: Any, **values: Any) -> dict[str, Any]:
        """The record of a step that has ended; it is completed while the device works on the next one."""
        step = self.step + 1
        begun = {"step": step, "samples": self.sizes.before(step), "batch": size, "loss": self.last_loss}
        record = begun | values | self.first
        self.first = {}
        self.records.add(record, phases, self.state.model.logit_scale.exp(), self.state.captions.widths(texts))
        return record

    def before_chunk(self) -> None:
        """Leave the step at a signal."""
        if self.busy:
            self.records.finish()
        self.busy = True
        self.before_batch()

    def before_batch(self) -> None:
        """Leave an evaluation at a signal."""
        self.stop.check()

    def set_learning_rate(self, size: int) -> float:
        """Set and return the learning rate of the next step, of `size` samples. A scaled peak follows `size`."""
        samples = self.sizes.before(self.step + 1)
        factor = (size / self.config.batch) ** LR_SCALING[self.config.optim.lr_scaling]
        return self.schedule.apply(self.state.optimizer, samples / self.config.batch - 1, factor)

    def evaluate(self) -> dict[str, Any]:
        """Zero-shot and retrieval metrics of the model as it is now, also written to RUN/eval/step_N.json."""
        state = self.state
        self.records.finish()
        state.model.image.to(self.world.device)
        averaged = state.average if self.config.eval.weights == "ema" else None
        started = time.monotonic()
        self.stop.begin(self.eval_s)
        with averaged.in_place(state.model) if averaged else nullcontext():
            results = evaluate(
                state.model,
                self.config.eval,
                self.world,
                autocast=state.precision.autocast,
                run_dir=self.folder,
                step=self.step,
                before_batch=self.before_batch,
                about={"precision": self.config.precision.name},
            )
        reshard(state.model)
        self.eval_s = time.monotonic() - started
        if state.stored:
            state.model.image.cpu()
        if self.metrics:
            self.metrics.eval(self.step, results)
        return dict(results)

    def save_due(self) -> bool:
        """Whether this step ends with a checkpoint: by steps, by minutes, at a signal to any rank and at the end. All ranks agree."""
        c = self.config.checkpoint
        due = self.step == self.total or (c.every > 0 and self.step % c.every == 0)
        late = self.world.main and c.minutes > 0 and time.monotonic() - self.saved_at > 60 * c.minutes
        due_by_time, self.stopping = self.world.highest(int(late), self.stop.number)
        return due or bool(due_by_time or self.stopping)

    def save(self) -> None:
        """Begin to write a checkpoint; see `checkpoint.Saver`. A run that ends here waits for it.

        Raises UserError, on every rank, where it cannot be written.
        """
        self.records.finish()
        now = RandomState.now(self.world.device)
        state = self.state.state_dict() | {
            "random": self.world.gather({"cpu": now.cpu, "cuda": now.cuda}),
            "position": merge_positions(self.world.gather(self.stream.position())),
            "batch": self.config.batch,
            "samples": self.sizes.before(self.step),
            "loss": self.last_loss,
        }
        self.saver.save(self.step, state, last=bool(self.stopping) or self.step == self.total)
        self.saved_at, self.saved_step = time.monotonic(), self.step
