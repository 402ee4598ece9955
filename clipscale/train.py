"""The story of a run: build, resume, loop, save, evaluate. One process's part of it; the command line starts the processes."""

import logging
import math
import signal
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from clipscale import checkpoint, distributed
from clipscale.autotune import CHUNKS, Retention
from clipscale.config.checks import shared
from clipscale.config.sections import LR_SCALING
from clipscale.config.train import TrainConfig, changes, to_yaml
from clipscale.data.loader.memory import free_memory
from clipscale.data.loader.ramp import BatchSizes
from clipscale.data.loader.stream import BatchShare, OffloadSpec, TrainStream, merge_positions, open_stream
from clipscale.data.loader.to_device import ChunkLoader
from clipscale.distributed import World
from clipscale.errors import StoppedError, UserError
from clipscale.eval.run import check as check_sets
from clipscale.eval.run import evaluate
from clipscale.models.towers import Flops
from clipscale.optim import Schedule, peak_lr
from clipscale.phases import Phases
from clipscale.report.metrics import MetricLog
from clipscale.report.page import write_report
from clipscale.report.table import print_results
from clipscale.rng import RandomState
from clipscale.stopping import Stop
from clipscale.train_state import Learner

log = logging.getLogger(__name__)

LEAST_LOSS_SCALE = 1.0
"""Below it fp16 has no room left that a smaller loss scale could give."""


def train(config: TrainConfig) -> dict[str, Any]:
    """Train as configured, from the start or from the newest checkpoint, and evaluate at the end.

    Returns {"run": folder, "step": steps done, "loss": last loss, "eval": results by set}; the same on every rank.
    Raises UserError for whatever the user can mend.
    """
    world = distributed.start(config.device, config.launch.threads)
    folder = Path(config.run)
    own = world.main and not folder.exists()  # a sweep makes its jobs' folders, and keeps them
    try:
        try:
            run = Run(config, world)
        except UserError:
            if own:
                discard_unbegun(folder)
            raise
        return run.go()
    finally:
        distributed.stop()


class Run:
    """Everything one training process holds."""

    def __init__(self, config: TrainConfig, world: World) -> None:
        self.config, self.world = config, world
        shared(config.batch, world.size, f"{world.size} processes")
        self.sizes = BatchSizes(config.batch, config.ramp)
        self.folder = open_folder(Path(config.run), world)
        state = checkpoint.to_resume(self.folder, config.resume)
        check_same_start(world.gather(None if state is None else state["step"]), config.run)
        if state is None and checkpoint.found(self.folder):
            raise UserError(
                f"run={config.run} already holds checkpoints; go on with resume=auto, or choose another run=NAME"
            )
        if state is not None and state["batch"] != config.batch:
            raise UserError(
                f"batch={config.batch}: the checkpoint was trained with batch={state['batch']}; go on with that, or choose another run=NAME"
            )

        check_sets(config.eval, world)
        self.learner = Learner(config, world, self.folder, state)
        self.retention = Retention(config.cache.activation_budget, world.device)
        self.flops = Flops(config.model, world.device, stored_images=self.learner.stored is not None)
        self.stream = self.open_stream(state)
        merge_positions(world.gather(self.stream.position()))  # refuses shards that differ between the ranks
        samples, per_epoch = self.length()
        self.total = self.sizes.steps(samples)
        peak = peak_lr(config.optim, config.batch)
        if config.optim.lr_scaling != "none" and world.main:
            print(
                f"peak learning rate {peak:.4g}: optim.lr={config.optim.lr:g}, {config.optim.lr_scaling} in batch / reference_batch"
            )
        self.schedule = Schedule.build(
            config.schedule, peak=peak, total=max(1, samples // config.batch), per_epoch=per_epoch
        )

        torch.manual_seed(config.seed + 1 + world.rank)
        self.step = 0
        self.last_loss = math.nan
        if state is not None:
            self.restore(state)
            if self.world.main:
                self.tell_resumed()
        self.metrics = self.open_metrics() if world.main else None
        if self.metrics:
            self.metrics.console.print(self.stream.memory, markup=False)
        self.saved_at = time.monotonic()
        self.stop = Stop(tells=world.main)  # what this rank has been told
        self.stopping = False  # all ranks have agreed to

    # ---- build ----

    def open_stream(self, state: dict[str, Any] | None) -> TrainStream:
        """The data, from its start or from where a checkpoint stands."""
        if self.learner.stored and self.config.offload == "encoded":
            raise UserError("offload=encoded is for pictures; with data.image_features take offload=host, or disk")
        side, own = self.config.data.image_size, self.learner.model.image_size
        if side and side != own and not (self.learner.model.any_size or self.learner.stored):
            raise UserError(
                f"data.image_size={side}: model.name={self.config.model.name} has learned positions for {own} pixels; leave it unset, or "
                "take an architecture for that size"
            )
        first = 0 if state is None else state["step"]
        free = free_memory()
        self.world.gather(None)  # all ranks have looked before the first takes its share
        return open_stream(
            self.config.data,
            BatchShare(self.config.batch, self.world.rank, self.world.size, sizes=lambda i: self.sizes.at(first + i)),
            OffloadSpec(
                backend=self.config.offload if self.config.offload != "none" else "host",
                chunk=self.learner.cache.towers[0].size,
                folder=self.config.offload_dir or str(self.folder),
                free=free,
            ),
            image_size=side or own,
            tokenizer=self.learner.model.tokenizer,
            seed=self.config.seed,
            position=None if state is None else state["position"],
            stored=self.learner.stored,
            device=self.world.device,
        )

    def tell_resumed(self) -> None:
        """Say from where the run goes on, and what is not as it was when it stopped."""
        file = self.folder / "config.yaml"
        found = changes(file.read_text(encoding="utf-8"), self.config) if file.exists() else []
        told = "; changed: " + ", ".join(found) if found else ""
        print(f"run={self.config.run}: going on after step {self.step} of {self.total}{told}")

    def open_metrics(self) -> MetricLog:
        return MetricLog(
            self.folder,
            self.config.log,
            resolved_config=to_yaml(self.config),
            resume_step=self.step,
            total_steps=self.total,
            world=self.world.size,
        )

    def length(self) -> tuple[int, float | None]:
        """Samples of the run, and full batches per epoch where the samples of an epoch are known."""
        per_epoch = self.stream.samples_per_epoch
        samples = self.config.samples
        if samples is None:
            assert self.config.epochs is not None
            if per_epoch is None:
                raise UserError(
                    f"epochs={self.config.epochs}: the samples of an epoch are not known for this data; give samples=N"
                )
            samples = round(self.config.epochs * per_epoch)
        if samples < self.sizes.at(0):
            raise UserError(f"samples={samples} is less than one batch={self.sizes.at(0)}; nothing would be trained")
        return samples, None if per_epoch is None else per_epoch / self.config.batch

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where the checkpoint stopped: step, optimizer, scaler and random state (the data stream is already there)."""
        seen = state["samples"]
        if seen != self.sizes.before(state["step"]):
            raise UserError(
                f"resume: the checkpoint has seen {seen} samples in {state['step']} steps, which these ramp.start, ramp.samples and "
                "ramp.rule do not make; give the ramp that it was trained with"
            )
        self.learner.restore(state)
        self.step = state["step"]
        if self.world.main:
            checkpoint.set_aside(self.folder, self.step)
        self.last_loss = state["loss"]
        if len(state["random"]) == self.world.size:
            own = state["random"][self.world.rank]
            RandomState(own["cpu"], own["cuda"] if self.world.device.type == "cuda" else None).restore()
        else:  # another number of ranks: the old states belong to nobody; a fresh one, different at every resume
            torch.manual_seed(self.config.seed + 1 + self.world.rank + self.step * self.world.size)

    # ---- loop ----

    def go(self) -> dict[str, Any]:
        """The loop, from `step` to `total`, and what follows it."""
        config = self.config
        results: dict[str, Any] = {}
        if self.step >= self.total and self.world.main:
            print(
                f"run={config.run} is complete at step {self.step}: nothing is left to train; more samples= go on with it"
            )
        try:
            with self.stop:
                while self.step < self.total:
                    record = self.optimizer_step()
                    self.step += 1
                    if self.metrics:
                        self.metrics.step(record)
                    if config.eval.every and self.step % config.eval.every == 0 and self.step < self.total:
                        results = self.evaluate()
                    if self.save_due():
                        self.save()
                    if self.stopping:
                        stopped = StoppedError(
                            f"stopped by a signal after step {self.step}; go on with run={config.run} resume=auto"
                        )
                        stopped.number = self.stop.number or signal.SIGTERM
                        raise stopped
            if config.eval.sets:
                results = self.evaluate()
        finally:
            self.stream.close()
            if self.metrics:
                self.metrics.close()
        if self.world.main:
            print_results(results, f"{self.folder.name}, step {self.step}")
            write_report(self.folder)
        return {"run": str(self.folder), "step": self.step, "loss": self.last_loss, "eval": results}

    def optimizer_step(self) -> dict[str, Any]:
        """One exact step over the global batch; returns what `metrics.jsonl` holds of it."""
        learner, phases = self.learner, Phases(self.world.device)
        size, seen = self.sizes.at(self.step), self.sizes.before(self.step + 1)
        if self.step and size != self.sizes.at(self.step - 1):
            self.retention.working = None  # of a smaller batch; to be measured anew
        self.retention.before_step(learner.cache.memory)
        every = self.config.log.noise_scale
        measured = every > 0 and (self.step + 1) % every == 0
        if measured:
            learner.cache.memory.budget = 0  # kept graphs have one gradient together
        learner.optimizer.zero_grad()
        # The schedule counts full batches: under a ramp it goes by samples, and a scaled peak follows the step's own batch.
        factor = (size / self.config.batch) ** LR_SCALING[self.config.optim.lr_scaling]
        lr = self.schedule.apply(learner.optimizer, seen / self.config.batch - 1, factor)
        batch = self.stream.next_batch()
        images, texts = (
            ChunkLoader(rows, len(batch), self.world.device, resident=self.config.offload == "none")
            for rows in (batch.pixels, batch.tokens)
        )
        batch.expect(learner.cache.ranges(0, len(batch)))
        with phases("encode"):
            features = learner.cache.encode(images, texts)
        with phases("loss"):
            value = learner.loss(*features)
            learner.cache.backward(value)
            del features
        with phases("replay"), learner.noise.watching(learner.cache) if measured else nullcontext():
            learner.cache.replay()
        with phases("optim"):
            scaled = learner.precision.scaler.get_scale() if learner.precision.scaler else 1.0
            norm = learner.gradient_norm()
            grad_norm = norm.item()
            noise = learner.noise_scale(size, scaled) if measured else {}
            finite = value.isfinite().item() and math.isfinite(grad_norm)
            scaler = learner.precision.scaler
            # An overflow lowers the loss scale; where that is low already, it is the training that overflows.
            diverged = not finite and (scaler is None or scaled < LEAST_LOSS_SCALE)
            if diverged and self.config.optim.on_divergence == "stop":
                self.stop_diverged(value.item(), grad_norm, batch.ids())
            elif finite or scaler:
                learner.update(norm)
        self.retention.after_step(phases)
        self.last_loss = value.item()
        return {
            "step": self.step + 1,
            "samples": seen,
            "batch": size,
            "loss": self.last_loss,
            "logit_scale": learner.model.logit_scale.exp().item(),
            "lr": lr,
            "grad_norm": grad_norm if finite else None,
            "skipped": not finite,
            **self.figures(size, phases),
            **noise,
        }

    def figures(self, size: int, phases: Phases) -> dict[str, Any]:
        """What `metrics.jsonl` holds of a step of `size` samples besides the training itself: speed, memory, data."""
        wait = self.stream.take_wait()
        rate = size / phases.total
        return {
            "samples_per_s": rate,
            "samples_per_s_per_gpu": rate / self.world.size,
            "data_wait_frac": wait / phases.total,
            "step_s": phases.total,
            **{f"{name}_s": seconds for name, seconds in phases.seconds.items()},
            "mem_peak_bytes": phases.peak_bytes(),
            **{f"mem_{name}_bytes": phases.extra_bytes(name) for name in phases.seconds},
            "host_rss_bytes": psutil.Process().memory_info().rss,
            "host_pinned": self.stream.pinned,
            "broken": sum(self.stream.broken.values()),
            "broken_by": dict(self.stream.broken),
            "faults": sum(self.stream.seen.values()),
            "faults_by": dict(self.stream.seen),
            "truncated": self.stream.truncated,
            "mfu": self.flops.utilisation(rate / self.world.size),
        }

    def stop_diverged(self, loss: float, grad_norm: float, ids: Tensor) -> None:
        """End the run before the weights are touched, leaving them and the batch's sample ids in RUN/diverged/."""
        every = self.world.gather(ids.clone())
        model = self.learner.weights()
        if self.world.main:
            folder = self.folder / "diverged"
            folder.mkdir(exist_ok=True)
            torch.save(
                {"step": self.step, "loss": loss, "grad_norm": grad_norm, "model": model, "samples": torch.cat(every)},
                folder / f"step_{self.step:08d}.pt",
            )
        raise UserError(
            f"step {self.step}: loss={loss}, gradient norm={grad_norm}: training has diverged; earlier checkpoints are intact and "
            f"{self.folder}/diverged holds the weights; lower optim.lr, set optim.clip_norm, or use another precision"
        )

    def evaluate(self) -> dict[str, Any]:
        """Zero-shot and retrieval figures of the model as it is now; saved as RUN/eval/step_N.json."""
        self.learner.model.image.to(self.world.device)
        results = evaluate(
            self.learner.model,
            self.config.eval,
            self.world,
            autocast=self.learner.precision.autocast,
            run_dir=self.folder,
            step=self.step,
        )
        if self.learner.stored:
            self.learner.model.image.cpu()
        if self.metrics:
            self.metrics.eval(self.step, results)
        return dict(results)

    # ---- save ----

    def save_due(self) -> bool:
        """Whether this step ends with a checkpoint; rank 0 decides for all, by steps, by minutes, at a signal and at the end."""
        c = self.config.checkpoint
        due = self.step == self.total or (c.every > 0 and self.step % c.every == 0)
        if self.world.main:
            due = due or bool(self.stop.number) or (c.minutes > 0 and time.monotonic() - self.saved_at > 60 * c.minutes)
        due, self.stopping = self.world.broadcast((due, bool(self.stop.number)))
        return due

    def save(self) -> None:
        now = RandomState.now(self.world.device)
        random = self.world.gather({"cpu": now.cpu, "cuda": now.cuda})
        positions = self.world.gather(self.stream.position())
        model, optimizer = self.learner.weights(), distributed.whole(self.learner.optimizer.state_dict())
        failure = None
        if self.world.main:
            state = {
                "model": model,
                "model_config": asdict(self.config.model),
                "optimizer": optimizer,
                "optimizer_name": self.config.optim.name,
                "scaler": self.learner.precision.scaler.state_dict() if self.learner.precision.scaler else None,
                "random": random,
                "position": merge_positions(positions),
                "batch": self.config.batch,
                "samples": self.sizes.before(self.step),
                "loss": self.last_loss,
            }
            try:
                checkpoint.save(self.folder, self.step, state, keep=self.config.checkpoint.keep)
            except UserError as error:
                failure = str(error)
        failure = self.world.broadcast(failure)
        if failure:
            raise UserError(failure)
        self.saved_at = time.monotonic()


def check_same_start(steps: Sequence[int | None], run: str) -> None:
    """Raises UserError where the ranks found different checkpoints (None: none) to go on from."""
    if len(set(steps)) > 1:
        found = ", ".join(
            f"rank {rank}: {'none' if step is None else f'step {step}'}" for rank, step in enumerate(steps)
        )
        raise UserError(
            f"run={run}: the processes found different checkpoints ({found}); the folder must be one that all nodes share, and hold the "
            "same for each of them"
        )


def discard_unbegun(folder: Path) -> None:
    """Remove the folder of a run that was refused before it began, if it holds nothing but what making it and finding chunks left."""
    held = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if held in ({"checkpoints"}, {"checkpoints", CHUNKS}) and not any((folder / "checkpoints").iterdir()):
        (folder / CHUNKS).unlink(missing_ok=True)
        (folder / "checkpoints").rmdir()
        folder.rmdir()


def open_folder(path: Path, world: World) -> Path:
    """The run's folder, made on rank 0. Raises UserError, on every rank, where it cannot be written."""
    failure = None
    if world.main:
        try:
            (path / "checkpoints").mkdir(parents=True, exist_ok=True)
            probe = path / ".writable"
            probe.touch()
            probe.unlink()
        except OSError as error:
            failure = f"run={path} cannot be written ({error.strerror}); choose another run=PATH"
    failure = world.broadcast(failure)
    if failure:
        raise UserError(failure)
    return path
