"""The story of a run: build, resume, loop, save, evaluate. One process's part of it; the command line starts the processes."""

import logging
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from clipscale import checkpoint, distributed
from clipscale.config import TrainConfig, to_yaml
from clipscale.data.stream import TrainStream, merge_positions
from clipscale.distributed import World
from clipscale.errors import UserError
from clipscale.eval.run import evaluate
from clipscale.loss.api import contrastive_loss
from clipscale.models.flops import Flops
from clipscale.models.towers import build_model
from clipscale.optim import Schedule, build_optimizer
from clipscale.precision import Precision
from clipscale.report.metrics import MetricLog
from clipscale.report.plots import write_report
from clipscale.step import GradCache

log = logging.getLogger(__name__)


def train(config: TrainConfig) -> dict[str, Any]:
    """Train as configured, from the start or from the newest checkpoint, and evaluate at the end.

    Returns {"run": folder, "step": steps done, "loss": last loss, "eval": results by set}; the same on every rank.
    Raises UserError for whatever the user can mend.
    """
    world = distributed.start(config.device, config.launch.threads)
    try:
        return Run(config, world).go()
    finally:
        distributed.stop()


class Run:
    """Everything one training process holds."""

    def __init__(self, config: TrainConfig, world: World) -> None:
        self.config, self.world = config, world
        if config.batch % world.size:
            raise UserError(
                f"batch={config.batch} cannot be shared evenly by {world.size} processes; choose a multiple of {world.size}"
            )
        self.local_batch = config.batch // world.size
        self.folder = open_folder(Path(config.run), world)
        state = checkpoint.to_resume(self.folder, config.resume)
        if state is None and checkpoint.found(self.folder):
            raise UserError(
                f"run={config.run} already holds checkpoints; go on with resume=auto, or choose another run=NAME"
            )

        torch.manual_seed(config.seed)
        self.precision = Precision(config.precision, world.device)
        self.model = build_model(config.model).to(world.device)
        if state is not None:
            checkpoint.check_same_model(state, config.model)
            self.model.load_state_dict(state["model"])
        self.optimizer = build_optimizer(self.model, config.optim)
        self.cache = self.build_cache()
        self.flops = Flops(config.model, world.device)
        self.stream = self.open_stream(None if state is None else state["position"])
        self.total, per_epoch = self.length()
        self.schedule = Schedule.build(config.schedule, peak=config.optim.lr, total=self.total, per_epoch=per_epoch)

        torch.manual_seed(config.seed + 1 + world.rank)
        self.step = 0
        self.last_loss = math.nan
        if state is not None:
            self.restore(state)
        self.metrics = self.open_metrics() if world.main else None
        self.saved_at = time.monotonic()
        self.stop_requested = False

    # ---- build ----

    def build_cache(self) -> GradCache:
        """The gradient cache over both towers, data-parallel where there are several ranks."""
        config = self.config.cache
        chunks = []
        for setting, size in (("image_chunk", config.image_chunk), ("text_chunk", config.text_chunk)):
            wanted = size or config.chunk or min(256, self.local_batch)
            if wanted > self.local_batch:
                name = setting if size else "chunk"
                raise UserError(
                    f"cache.{name}={wanted} is larger than the {self.local_batch} samples of one process; make it smaller"
                )
            chunks.append(wanted)
        if self.config.model.compile:
            self.model.image.compile()
            self.model.text.compile()
        return GradCache(
            [self.world.wrap(self.model.image), self.world.wrap(self.model.text)],
            self.loss,
            chunks=chunks,
            keep=config.keep,
            autocast=self.precision.autocast,
            scaler=self.precision.scaler,
        )

    def loss(self, image_features: Tensor, text_features: Tensor) -> Tensor:
        """This rank's view of the loss of the global batch: the global mean, with gradients that are shares to be summed."""
        c = self.config.loss
        return contrastive_loss(
            image_features.to(self.precision.dtype),
            text_features.to(self.precision.dtype),
            self.model.logit_scale.exp(),
            logit_bias=self.model.logit_bias if c.objective == "sigmoid" else None,
            objective=c.objective,
            similarity=c.similarity,
            exchange=c.exchange,
            backend=c.backend,
            label_smoothing=c.label_smoothing,
            ranks_per_node=c.ranks_per_node,
        )

    def open_stream(self, position: dict[str, Any] | None) -> TrainStream:
        return TrainStream(
            self.config.data,
            image_size=self.config.data.image_size or self.model.image_size,
            tokenizer=self.model.tokenizer,
            batch=self.config.batch,
            rank=self.world.rank,
            world=self.world.size,
            seed=self.config.seed,
            position=position,
            pin=self.world.device.type == "cuda",
        )

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
        """Steps of the run, and steps per epoch where the samples of an epoch are known."""
        per_epoch = self.stream.samples_per_epoch
        samples = self.config.samples
        if samples is None:
            assert self.config.epochs is not None
            if per_epoch is None:
                raise UserError(
                    f"epochs={self.config.epochs}: the samples of an epoch are not known for this data; give samples=N"
                )
            samples = round(self.config.epochs * per_epoch)
        if samples < self.config.batch:
            raise UserError(f"samples={samples} is less than one batch={self.config.batch}; nothing would be trained")
        return samples // self.config.batch, None if per_epoch is None else per_epoch / self.config.batch

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where the checkpoint stopped: step, optimizer, scaler and random state (the data stream is already there)."""
        if state["batch"] != self.config.batch:
            raise UserError(
                f"resume: the checkpoint was trained with batch={state['batch']}, this run asks for {self.config.batch}"
            )
        try:
            self.optimizer.load_state_dict(state["optimizer"])
        except (ValueError, KeyError) as error:
            raise UserError(
                f"resume: the checkpoint's optimizer does not fit optim.name={self.config.optim.name} ({error})"
            ) from error
        if self.precision.scaler and state["scaler"]:
            self.precision.scaler.load_state_dict(state["scaler"])
        self.step = state["step"]
        self.last_loss = state["loss"]
        if len(state["random"]) == self.world.size:
            own = state["random"][self.world.rank]
            torch.set_rng_state(own["cpu"])
            if own["cuda"] is not None and self.world.device.type == "cuda":
                torch.cuda.set_rng_state(own["cuda"])
        else:  # another number of ranks: the old states belong to nobody; a fresh one, different at every resume
            torch.manual_seed(self.config.seed + 1 + self.world.rank + self.step * self.world.size)

    # ---- loop ----

    def go(self) -> dict[str, Any]:
        """The loop, from `step` to `total`, and what follows it."""
        config = self.config
        results: dict[str, Any] = {}
        try:
            with self.until_signalled():
                while self.step < self.total:
                    record = self.optimizer_step()
                    self.step += 1
                    self.report(record)
                    if config.eval.every and self.step % config.eval.every == 0 and self.step < self.total:
                        results = self.evaluate()
                    if self.save_due():
                        self.save()
                    if self.stop_requested:
                        raise UserError(
                            f"stopped by a signal after step {self.step}; go on with run={config.run} resume=auto"
                        )
            if config.eval.sets:
                results = self.evaluate()
        finally:
            self.stream.close()
            if self.metrics:
                self.metrics.close()
        if self.world.main:
            write_report(self.folder)
        return {"run": str(self.folder), "step": self.step, "loss": self.last_loss, "eval": results}

    def optimizer_step(self) -> dict[str, Any]:
        """One exact step over the global batch; returns what `metrics.jsonl` holds of it."""
        phases = Phases(self.world.device)
        self.optimizer.zero_grad()
        lr = self.schedule.apply(self.optimizer, self.step)
        batch = self.stream.next_batch()
        device, resident = self.world.device, self.config.offload == "none"
        with phases("encode"):
            features = self.cache.encode(
                DeviceRows(batch.pixels, len(batch), device, resident),
                DeviceRows(batch.tokens, len(batch), device, resident),
            )
        with phases("loss"):
            value = self.loss(*features)
            self.cache.backward(value)
            del features
        with phases("replay"):
            self.cache.replay()
        with phases("optim"):
            grad_norm = self.update()
        self.last_loss = value.item()
        if not math.isfinite(self.last_loss) or (not math.isfinite(grad_norm) and self.precision.scaler is None):
            raise UserError(
                f"step {self.step}: loss={self.last_loss}, gradient norm={grad_norm}: training has diverged; the checkpoints before it "
                "are intact; lower optim.lr, set optim.clip_norm, or use another precision"
            )
        wait = self.stream.take_wait()
        rate = self.config.batch / phases.total
        return {
            "step": self.step + 1,
            "samples": (self.step + 1) * self.config.batch,
            "loss": self.last_loss,
            "logit_scale": self.model.logit_scale.exp().item(),
            "lr": lr,
            "grad_norm": grad_norm if math.isfinite(grad_norm) else None,
            "samples_per_s": rate,
            "samples_per_s_per_gpu": rate / self.world.size,
            "data_wait_frac": wait / phases.total,
            "step_s": phases.total,
            **{f"{name}_s": seconds for name, seconds in phases.seconds.items()},
            "mem_peak_bytes": phases.peak_bytes(),
            "mem_loss_bytes": phases.extra_bytes("loss"),
            "host_rss_bytes": psutil.Process().memory_info().rss,
            "mfu": self.flops.utilisation(rate / self.world.size),
        }

    def update(self) -> float:
        """Optimizer step on the summed gradients; returns their global norm before clipping."""
        config, scaler = self.config.optim, self.precision.scaler
        own = [p for p in (self.model.logit_scale, self.model.logit_bias) if p is not None and p.grad is not None]
        self.world.sum_gradients(own)
        if scaler:
            scaler.unscale_(self.optimizer)
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        norm = torch.nn.utils.clip_grad_norm_(parameters, config.clip_norm or math.inf)
        if scaler:
            scaler.step(self.optimizer)
            scaler.update()
        elif norm.isfinite():
            self.optimizer.step()
        with torch.no_grad():
            self.model.logit_scale.clamp_(max=math.log(config.max_logit_scale))
        return norm.item()

    def report(self, record: dict[str, Any]) -> None:
        if self.metrics:
            self.metrics.step({**record, "broken": sum(self.stream.broken.values())})

    def evaluate(self) -> dict[str, Any]:
        """Zero-shot and retrieval figures of the model as it is now, every rank doing its share; saved as RUN/eval/step_N.json."""
        results = evaluate(
            self.model,
            self.config.eval,
            device=self.world.device,
            autocast=self.precision.autocast,
            run_dir=self.folder,
            step=self.step,
        )
        if self.metrics:
            self.metrics.eval(self.step, results)
        return results

    # ---- save ----

    def save_due(self) -> bool:
        """Whether this step ends with a checkpoint; rank 0 decides for all, by steps, by minutes, at a signal and at the end."""
        c = self.config.checkpoint
        due = self.step == self.total or (c.every > 0 and self.step % c.every == 0)
        if self.world.main:
            due = due or self.stop_requested or (c.minutes > 0 and time.monotonic() - self.saved_at > 60 * c.minutes)
        due, self.stop_requested = self.world.broadcast((due, self.stop_requested))
        return due

    def save(self) -> None:
        cuda = torch.cuda.get_rng_state() if self.world.device.type == "cuda" else None
        random = self.world.gather({"cpu": torch.get_rng_state(), "cuda": cuda})
        positions = self.world.gather(self.stream.position())
        failure = None
        if self.world.main:
            state = {
                "model": self.model.state_dict(),
                "model_config": asdict(self.config.model),
                "optimizer": self.optimizer.state_dict(),
                "scaler": self.precision.scaler.state_dict() if self.precision.scaler else None,
                "random": random,
                "position": merge_positions(positions),
                "batch": self.config.batch,
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

    @contextmanager
    def until_signalled(self) -> Iterator[None]:
        """SIGTERM (a scheduler's warning) finishes the step, saves, and ends the run."""

        def request(*_: object) -> None:
            self.stop_requested = True

        before = signal.signal(signal.SIGTERM, request)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)


class DeviceRows:
    """Rows of the host batch as the encoder's input on the device, one chunk at a time (or all kept there: `resident`)."""

    def __init__(self, rows: Callable[[int, int], Tensor], count: int, device: torch.device, resident: bool) -> None:
        self.rows, self.count, self.device = rows, count, device
        self.held: dict[tuple[int, int], Tensor] | None = {} if resident else None

    def __len__(self) -> int:
        return self.count

    def chunk(self, start: int, stop: int) -> Tensor:
        if self.held is not None and (start, stop) in self.held:
            return self.held[start, stop]
        chunk = self.rows(start, stop).to(self.device, non_blocking=True)
        if self.held is not None:
            self.held[start, stop] = chunk
        return chunk


class Phases:
    """Seconds and peak device memory of the parts of one step. A CPU has no allocator to ask: its memory figures are None."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = {}
        self.before: dict[str, int] = {}
        self.peak: dict[str, int] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
            self.before[name] = torch.cuda.memory_allocated(self.device)
        started = time.perf_counter()
        yield
        if cuda:
            torch.cuda.synchronize(self.device)
            self.peak[name] = torch.cuda.max_memory_allocated(self.device)
        self.seconds[name] = time.perf_counter() - started

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    def peak_bytes(self) -> int | None:
        return max(self.peak.values()) if self.peak else None

    def extra_bytes(self, name: str) -> int | None:
        return self.peak[name] - self.before[name] if name in self.peak else None


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
