"""The story of a run: begin or resume, step after step, evaluate, save.

This is one process's part; the command line starts the processes.
"""

import gc
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from signal import SIGINT, Signals
from typing import Any

import torch

from clipscale import checkpoint
from clipscale.common import files
from clipscale.common.errors import DataError, StoppedError, UserError, first_line
from clipscale.common.phases import Phases, Readback
from clipscale.common.record import Record, Results
from clipscale.common.rng import RandomState
from clipscale.common.terminal import doing, tell
from clipscale.config.train import RESULT, RESUMES, TrainConfig, changes_since, samples_of, to_yaml
from clipscale.data.loader.captions import SortedCaptions
from clipscale.data.loader.host_batch import HostBatch
from clipscale.data.loader.stream import merge_positions
from clipscale.data.loader.to_device import ChunkLoader
from clipscale.distributed.fsdp import reshard
from clipscale.distributed.world import Later, World, join, leave
from clipscale.eval.run import ResultsFile, evaluate
from clipscale.eval.run import check as check_sets
from clipscale.launch.run_lock import RunLock
from clipscale.launch.stopping import SignalError, Stop
from clipscale.log.metrics import MetricLog
from clipscale.log.records import read_metrics
from clipscale.log.step_record import StepRecords
from clipscale.log.table import print_results, with_start
from clipscale.models.flops import Flops
from clipscale.state.start import begin, resolve
from clipscale.step.compiled import compile_towers, try_compiled, worth_compiling
from clipscale.step.optim import Schedule
from clipscale.step.pass_contexts import note_statistics

LEAST_LIMIT_S = 120.0
STEPS = 10
"""From the second step on ranks wait for each other as long as so many of the slowest step take."""


def train(config: TrainConfig) -> Record:
    """Train as configured, from the start or from the newest checkpoint, and evaluate at the end.

    Returns {"run": folder, "step": steps done, "loss": last loss, "eval": results by set}, the same on every rank.
    Raises UserError for every mistake that the user can fix, and StoppedError after a signal.
    """
    world = join(config.device, config.launch.timeout_s)
    lock = RunLock(Path(config.run))
    try:
        world.on_main(lock.acquire)
        while True:
            run = Run(config, world, lock)
            results = run.go()
            if run.resolved.stage.last:
                if world.main:
                    files.write_json(run.resolved.folder / RESULT, results)
                return results
            del run
            gc.collect()  # before the next stage's model is built
            config = replace(config, resume="auto")
    finally:
        lock.release()
        leave()


class Run:
    """One process's part of a run, or of its stage: all it holds, and its loop."""

    def __init__(self, config: TrainConfig, world: World, lock: RunLock | None = None) -> None:
        """`lock`: the folder's, held by rank 0; None: nobody else uses the folder."""
        self.lock = lock
        if config.eval.has_sets:
            doing("reading the evaluation sets")
        check_sets(config.eval, world)
        self.world = world
        self.resolved = resolve(config, world)
        self.config = self.resolved.config
        self.step = self.resolved.step
        self.loss = self.resolved.loss
        self.state, self.stream = begin(self.resolved, world)
        self.stream.defer_failures()
        stage = self.resolved.stage
        epoch = self.stream.samples_per_epoch
        self.schedule = Schedule.build(
            self.config.schedule,
            self.config.optim,
            self.config.batch,
            samples_of(stage.config, epoch),
            epoch,
            stage.first,
        )
        self.total = self.schedule.first + self.schedule.total
        if self.step < self.total:
            world.on_main(lambda: checkpoint.check_room(self.resolved.folder, self.state.saved_bytes()))
        flops = Flops(self.config.model, self.state.model, world.device, self.config.data.texts_per_step)
        self.compile(flops)
        self.records = StepRecords(self.open_log() if world.main else None, world.size, flops, self.stream)
        self.saver = checkpoint.Saver(self.resolved.folder, world, self.config.checkpoint)
        if config.resume in RESUMES:  # the step is another run's otherwise
            self.saver.last_step = self.step
        self.saved_at = time.monotonic()
        self.slowest_s = 0.0
        """Of the steps since this start."""
        self.stop = Stop(world)
        self.chunks = 0
        """Chunks of this step that are begun."""
        self.agreement = Later(torch.tensor([0, 0]))
        """What all ranks agree on in a step: the chunks of captions, and whether it is time for a checkpoint."""
        self.state.cache.before_chunk = self.between_chunks

    def compile(self, flops: Flops) -> None:
        """Compile the towers where the settings say so, or where the rest of the run repays it."""
        config, state, world = self.config, self.state, self.world
        left = (self.total - self.step) * self.config.batch / world.size * flops.per_sample()
        if not worth_compiling(config.model.compile, left, flops.peak):
            return
        doing("compiling the towers")
        towers = compile_towers(state.model, lengths_vary=state.captions.pad is not None)
        chunks = state.chunks["image"], state.chunks["text"]
        problem = try_compiled(state.model, towers, chunks, state.precision, world)
        if problem and world.main:
            tell(f"warning: model.compile={config.model.compile}: the towers run without compiled code ({problem})")

    def open_log(self) -> MetricLog:
        """The log of this start, on rank 0, and what the user should know of it."""
        config, step, folder = self.resolved.written, self.step, self.resolved.folder
        (folder / RESULT).unlink(missing_ok=True)
        if step:
            checkpoint.set_aside(folder, step)
            changes = changes_since(folder / "config.yaml", config)
            rates = [record["lr"] for record in read_metrics(folder / "metrics.jsonl") if record["step"] == step]
            rate = self.schedule.lr(step - 1)
            if rates and step > self.schedule.first and not math.isclose(rates[0], rate, rel_tol=0.05):
                changes.append(f"the learning rate of this step {rates[0]:.1e} -> {rate:.1e}")
            changed = "; changed: " + ", ".join(changes) if changes else ""
            tell(f"run={config.run}: going on after step {step} of {self.total}{changed}")
        if step >= self.total:
            tell(f"run={config.run} is complete at step {step}: nothing is left to train; more samples= go on with it")
        elif 0 < self.schedule.total <= self.schedule.warmup:
            tell(
                f"warning: schedule.warmup={config.schedule.warmup} covers all {self.schedule.total} steps of the run; "
                "give a share, as in schedule.warmup=5%",
                error=True,
            )
        log = MetricLog(
            folder,
            config.log,
            resolved_config=to_yaml(config),
            resume_step=step,
            world=self.world.size,
            total=self.total,
            trains=step < self.total,
        )
        tell(self.stream.memory)
        return log

    def go(self) -> Record:
        """All steps that are left, and the evaluation at the end."""
        config, results = self.config, {}
        # to the end of the last save: schedulers and launchers send their signals more than once
        with self.stop, self.world.limited(config.launch.timeout_s):
            try:
                if self.step == 0 < self.total and config.model.weights and config.eval.has_sets:
                    self.evaluate()  # what the weights can do before they are trained
                while self.step < self.total:
                    started = time.monotonic()
                    with self.world.limited(self.limit_s()), self.thrown_away_at_a_signal():
                        self.train_step()
                    self.slowest_s = max(self.slowest_s, time.monotonic() - started)
                    self.step += 1
                    if config.eval.every and self.step % config.eval.every == 0 and self.step < self.total:
                        results = self.evaluate()
                    if self.save_due():
                        self.save(last=self.step == self.total)
                if config.eval.has_sets:
                    results = self.evaluate()
            except DataError:  # on all ranks
                self.save_at_once()
                raise
            except SignalError as signal:  # on all ranks
                self.save_at_once()
                raise StoppedError(self.stopped(signal.number), signal.number) from None
            finally:
                self.stream.close()
                self.saver.close()
                self.records.close()
        if self.world.main:
            folder = self.resolved.folder
            print_results(with_start(results, self.at_start()), f"{folder.name}, step {self.step}, {config.precision}")
            tell(f"done: {folder} (step {self.step}, loss {self.loss:.4f}); clipscale report {config.run} shows it")
        return {"run": str(self.resolved.folder), "step": self.step, "loss": self.loss, "eval": results}

    def stopped(self, number: int) -> str:
        """What a signal has ended."""
        what = "stopped" if number == SIGINT else f"stopped by {Signals(number).name}"
        if not self.step:
            return f"{what} in the first step: nothing is saved"
        return f"{what} after step {self.step} and saved"

    def save_at_once(self) -> None:
        """A checkpoint of what is trained, complete at the end of this call."""
        if self.step != self.saver.last_step:
            self.save(last=True)
        self.saver.wait()

    def limit_s(self) -> float:
        """Seconds that ranks wait for each other in a step. The first one may compile; data workers have their own."""
        longest = self.config.launch.timeout_s
        if not self.slowest_s:
            return longest
        return min(longest, max(LEAST_LIMIT_S, STEPS * self.slowest_s, 2 * self.config.data.timeout_s))

    def train_step(self) -> None:
        """One exact optimizer step over the global batch."""
        state, cache = self.state, self.state.cache
        phases = Phases(self.world.device)
        lr = self.schedule.apply(state.optimizer, self.step)
        state.optimizer.zero_grad()
        cache.keep_bytes = state.keep.bytes
        self.chunks = 0
        batch = self.stream.next_batch()  # its samples may still be arriving
        images, texts = self.inputs(batch)
        self.texts = texts
        if not self.slowest_s:
            doing(f"step {self.step + 1}, the first of this start")
        self.stream.waited_s()  # before the parts of the step, of which waiting is a share
        with self.phase(phases, "encode"):
            features = cache.encode(state.past_trunk("image", images), state.past_trunk("text", texts))
        with self.phase(phases, "loss"):
            value = state.loss(*features, targets=batch.targets(self.world.device))
            cache.backward(value)
            del features
        with self.phase(phases, "replay"):
            cache.replay()
        with self.phase(phases, "optim"):
            if self.stream.failure:  # no rank updates its weights then
                state.spoil_gradients()
            norm = state.gradient_norm()
            # The host waits for the device here, and where the gradients of the loss are computed, for its scale.
            self.loss, grad_norm = Readback(value, norm).read()
            finite = math.isfinite(self.loss) and math.isfinite(grad_norm)
            if not finite:
                self.world.on_all(self.stream.check)
                state.refuse_divergence(self.step, self.loss, grad_norm)
            else:
                state.skipped = 0
            if finite or state.precision.scaler:  # after an overflow the scaler skips the step and lowers its scale
                state.update(norm)
        state.keep.after_step(phases)
        record = {
            "step": self.step + 1,
            "samples": self.resolved.stage.seen(self.step + 1),
            "batch": self.config.batch,
            "loss": self.loss,
            "lr": lr,
            "grad_norm": grad_norm if finite else None,
            "skipped": not finite,
        }
        self.records.add(record, phases, state.model.logit_scale.exp(), state.captions.widths(texts))

    @contextmanager
    def phase(self, phases: Phases, name: str) -> Iterator[None]:
        """Around a part of a step. Raises UserError where the device has too little memory for it."""
        try:
            with phases(name):
                yield
        except torch.OutOfMemoryError as error:
            towers = self.state.cache.towers
            image, text = (tower.size for tower in towers)
            graphs = sum(tower.graphs.count for tower in towers)
            kept = f" with {graphs} kept graphs (cache.keep=none keeps none)" if graphs else ""
            raise UserError(
                f"step {self.step + 1}: out of memory in {name}, in chunks of {image} images and {text} captions{kept} "
                f"({first_line(error)}); clipscale plan run={self.config.run} fit=true finds settings that fit"
            ) from error

    def inputs(self, batch: HostBatch) -> tuple[ChunkLoader, Any]:
        """The towers' inputs."""
        if self.world.main and self.step == 0:
            doing("waiting for the first samples")
            batch.tokens(0, 16)  # waits for them: no step has begun
        batch.expect(self.state.reads(len(batch)))
        images = ChunkLoader(batch.pixels, len(batch), self.world.device, resident=self.config.offload == "none")
        return images, self.state.captions.input(batch, lambda _: self.agreement.values()[0])

    @contextmanager
    def thrown_away_at_a_signal(self) -> Iterator[None]:
        """Around a step that a signal or lost data end: undoes the little that it changes before its update.

        A resumed run takes it again, bit for bit.
        """
        random = RandomState.now(self.world.device)
        restore_statistics = note_statistics(self.state.model)
        try:
            yield
        except (SignalError, DataError):
            random.restore()
            restore_statistics()
            self.stream.give_back()
            reshard(self.state.model)  # FSDP2 may have left within a forward pass, with whole weights
            raise

    def between_chunks(self) -> None:
        """Leave the step at a signal. Log the one before when the device has done it: nothing waits for that."""
        self.stop.check()
        self.records.poll()
        size = self.config.batch // self.world.size
        if self.records.log:
            self.records.log.progress(f"step {self.step + 1}", self.chunks, self.state.cache.calls(size))
        self.chunks += 1
        if self.chunks == len(self.state.cache.towers[0].cut(size)):
            self.agree()

    def agree(self) -> None:
        """Begin the one message of a step, when the last chunk of images begins: captions follow."""
        texts = self.texts
        chunks = texts.cut(self.state.cache.towers[1].size) if isinstance(texts, SortedCaptions) else 0
        _, seconds = self.config.checkpoint.interval
        late = self.world.main and 0 < seconds < time.monotonic() - self.saved_at
        self.agreement = self.world.highest_later(chunks, int(late))

    def evaluate(self) -> Record:
        """Zero-shot and retrieval metrics of the model as it is now, also written to RUN/eval/step_N.json."""
        state, config = self.state, self.config
        self.records.finish()
        self.stop.restart()
        with state.average.in_place() if state.average and config.eval.weights == "ema" else nullcontext():
            results = evaluate(
                state.model,
                config.eval,
                self.world,
                autocast=state.precision.autocast,
                objective=config.loss.objective,
                file=ResultsFile(self.resolved.folder, self.step, {"precision": config.precision}),
                before_batch=self.stop.check,
                progress=self.records.log.progress if self.records.log else lambda *_: None,
            )
        reshard(state.model)
        if self.records.log:
            self.records.log.eval(self.step, results)
        return results

    def at_start(self) -> Results:
        """The results of the weights that the run began with; empty where it began with random ones."""
        return ResultsFile(self.resolved.folder, 0).record()["results"]

    def save_due(self) -> bool:
        """Whether this step ends with a checkpoint: by steps, by time, and at the end. All ranks agree.

        None after a step that was left out, which may be the weights' fault: the last good checkpoint stays.
        """
        if self.state.skipped and self.step < self.total:
            return False
        steps, _ = self.config.checkpoint.interval
        due = self.step == self.total or (steps > 0 and self.step % steps == 0)
        return due or self.agreement.values()[1] > 0

    def save(self, *, last: bool) -> None:
        """Begin to write a checkpoint; see `checkpoint.Saver`. The `last` one is waited for.

        Raises UserError, on every rank, also where somebody has removed the run's folder: the checkpoint is in a new
        one then, unless another run has begun there.
        """
        self.records.finish()
        if last:
            doing(f"saving step {self.step}")
        removed = self.lock is not None and self.world.on_main(self.lock.renew)
        position = self.world.on_all(self.stream.position)
        now = RandomState.now(self.world.device)
        state = self.state.state_dict() | {
            "random": self.world.gather({"cpu": now.cpu, "cuda": now.cuda}),
            "position": merge_positions(self.world.gather(position)),
            "batch": self.config.batch,
            "samples": self.resolved.stage.seen(self.step),
            "loss": self.loss,
        }
        self.saver.save(self.step, state, last=last or removed)
        self.saved_at = time.monotonic()
        if removed:
            raise UserError(
                f"run={self.config.run}: its folder was removed while it trained, with its records; a new one holds "
                f"step {self.step}: go on with resume=auto"
            )
