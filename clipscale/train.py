"""The story of a run: build, resume, loop, save, evaluate. One process's part of it; the command line starts the processes."""

import logging
import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from clipscale import checkpoint, distributed
from clipscale.config import TrainConfig, to_yaml
from clipscale.data.ramp import BatchSizes
from clipscale.data.stream import TrainStream, merge_positions
from clipscale.distributed import World
from clipscale.errors import UserError
from clipscale.eval.run import check as check_sets
from clipscale.eval.run import evaluate
from clipscale.features import StoredTower, stored_rows
from clipscale.loss.api import contrastive_loss
from clipscale.models.flops import Flops
from clipscale.models.towers import build_model
from clipscale.noise import NoiseScale
from clipscale.optim import LR_SCALING, Schedule, build_optimizer, peak_lr
from clipscale.precision import MasterWeights, Precision
from clipscale.probe import Retention, chunk_sizes, find_chunk, remember, remembered, uncut
from clipscale.report.metrics import MetricLog
from clipscale.report.phases import Phases
from clipscale.report.plots import write_report
from clipscale.report.table import print_results
from clipscale.step import GradCache
from clipscale.transfer import DeviceRows

log = logging.getLogger(__name__)

ELEMENTWISE = ("adamw", "lion", "adam", "nadamw", "sgd")
"""Optimizers whose step on a shard is the shard of their step."""


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
        self.sizes = BatchSizes(config.batch, config.ramp)
        self.folder = open_folder(Path(config.run), world)
        state = checkpoint.to_resume(self.folder, config.resume)
        if state is None and checkpoint.found(self.folder):
            raise UserError(
                f"run={config.run} already holds checkpoints; go on with resume=auto, or choose another run=NAME"
            )

        check_sets(config.eval)
        torch.manual_seed(config.seed)
        self.precision = Precision(config.precision, world.device)
        self.model = build_model(config.model)
        self.stored = stored_rows(config.data, config.model, self.model)
        self.model.to(world.device)
        if self.stored:
            self.model.image.cpu()  # needed for evaluations alone
        if state is not None:
            checkpoint.check_same_model(state, config.model)
            self.model.load_state_dict(state["model"])
        self.masters = self.hold_weights()
        self.cache = self.build_cache()
        self.optimizer = self.build_optimizer()
        if config.log.noise_scale and config.launch.parallel == "fsdp":
            raise UserError(
                "log.noise_scale: FSDP2 keeps no gradient of a chunk to look at; leave it 0, or use launch.parallel=ddp"
            )
        self.noise = NoiseScale([self.model.image, self.model.text])
        self.retention = Retention(config.cache.keep, world.device)
        self.flops = Flops(config.model, world.device, stored_images=self.stored is not None)
        self.stream = self.open_stream(state)
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
        self.metrics = self.open_metrics() if world.main else None
        if self.metrics:
            self.metrics.console.print(self.stream.memory, markup=False)
        self.saved_at = time.monotonic()
        self.signalled = False  # this rank has been told to end
        self.stopping = False  # all ranks have agreed to

    # ---- build ----

    def hold_weights(self) -> dict[str, MasterWeights]:
        """Put the towers' matrices into the precision they are to be held in; the optimizer's float32 copies by tower."""
        if self.precision.half_weights and self.config.launch.parallel == "fsdp":
            raise UserError(
                "precision.weights=bf16: FSDP2 shards weights of one type; leave it fp32, or use launch.parallel=ddp"
            )
        held = {name: self.precision.hold(tower) for name, tower in self.towers.items()}
        return {name: masters for name, masters in held.items() if masters is not None}

    @property
    def towers(self) -> dict[str, nn.Module]:
        """What encodes in training: of stored features, no image tower."""
        return {"image": StoredTower() if self.stored else self.model.image, "text": self.model.text}

    @property
    def unwrapped(self) -> list[nn.Parameter]:
        """What the optimizer works on and no wrapper sums over ranks: scale, bias, and towers with master weights."""
        parts = [p for name in self.masters for p in self.trained(name)]
        return parts + [p for p in (self.model.logit_scale, self.model.logit_bias) if p is not None]

    def trained(self, name: str) -> list[nn.Parameter]:
        """What the optimizer works on of one tower."""
        copies = self.masters[name].of if name in self.masters else {}
        return [copies.get(id(p), p) for p in self.towers[name].parameters() if p.requires_grad]

    def build_cache(self) -> GradCache:
        """The gradient cache over both towers, data-parallel where there are several ranks."""
        if self.config.model.compile:
            # Beyond this many variants of one function calls fall back to eager, whose random numbers are not the compiled ones.
            torch._dynamo.config.recompile_limit = 64
            self.model.image.compile()
            self.model.text.compile()
        parallel = {name: "none" if name in self.masters else self.config.launch.parallel for name in self.towers}
        return GradCache(
            [self.world.wrap(tower, parallel[name]) for name, tower in self.towers.items()],
            self.loss,
            chunks=self.chunks(),
            autocast=self.precision.autocast,
            scaler=self.precision.scaler,
        )

    def build_optimizer(self) -> torch.optim.Optimizer:
        """After the cache: FSDP2 puts sharded parameters in the place of the whole ones."""
        name = self.config.optim.name
        if self.config.launch.parallel == "fsdp" and name not in ELEMENTWISE:
            raise UserError(
                f"optim.name={name}: with launch.parallel=fsdp a parameter is in pieces; choose one that works element by element "
                f"({', '.join(ELEMENTWISE)}), or launch.parallel=ddp"
            )
        masters = {key: copy for held in self.masters.values() for key, copy in held.of.items()}
        return build_optimizer(self.model, self.config.optim, masters)

    def chunks(self) -> list[int]:
        """Samples per chunk of the image and the text tower: as set, as found by an earlier start of this run, or by trial."""
        side, length, device = self.model.image_size, self.model.context_length, self.world.device

        def pixels(n: int) -> Tensor:
            return torch.randint(0, 256, (n, 3, side, side), dtype=torch.uint8, device=device)

        def tokens(n: int) -> Tensor:
            return torch.randint(1, 100, (n, length), device=device)

        sizes = chunk_sizes(self.config.cache, self.local_batch)
        found: dict[str, int] = {}
        for name, tower, sample in (("image", self.model.image, pixels), ("text", self.model.text, tokens)):
            if self.stored and name == "image":
                found[name] = self.local_batch
                continue
            size = uncut(tower, name, sizes[name], self.local_batch) or sizes[name] or remembered(self.folder, name)
            if size is None:
                with self.precision.autocast():
                    size = min(self.world.gather(find_chunk(tower, sample, self.local_batch, device)))
            found[name] = size
        if self.world.main:
            remember(self.folder, found)
        return [found["image"], found["text"]]

    def loss(self, image_features: Tensor, text_features: Tensor) -> Tensor:
        """This rank's view of the loss of the global batch: the global mean, with gradients that are shares to be summed.

        With `cache.negatives=chunk` the mean over the micro-batches that the ranks' image chunks make up.
        """
        c = self.config.loss
        scale, bias = self.model.logit_scale.exp(), self.model.logit_bias if c.objective == "sigmoid" else None
        size = self.cache.towers[0].size if self.config.cache.negatives == "chunk" else len(image_features)
        with self.precision.autocast():
            parts = [
                contrastive_loss(u, v, scale, logit_bias=bias, check=False, **asdict(c))
                * (len(u) / len(image_features))
                for u, v in zip(image_features.split(size), text_features.split(size), strict=True)
            ]
            return torch.stack(parts).sum()

    def open_stream(self, state: dict[str, Any] | None) -> TrainStream:
        """The data, from its start or from where a checkpoint stands."""
        if self.stored and self.config.offload == "encoded":
            raise UserError("offload=encoded is for pictures; with data.image_features take offload=host, or disk")
        first = 0 if state is None else state["step"]
        return TrainStream(
            self.config.data,
            image_size=self.config.data.image_size or self.model.image_size,
            tokenizer=self.model.tokenizer,
            batch=self.config.batch,
            rank=self.world.rank,
            world=self.world.size,
            seed=self.config.seed,
            position=None if state is None else state["position"],
            pin=self.world.device.type == "cuda",
            sizes=lambda i: self.sizes.at(first + i),
            tier=self.config.offload if self.config.offload != "none" else "host",
            chunk=self.cache.towers[0].size,
            folder=self.config.offload_dir or str(self.folder),
            stored=self.stored,
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
        if state["batch"] != self.config.batch:
            raise UserError(
                f"resume: the checkpoint was trained with batch={state['batch']}, this run asks for {self.config.batch}"
            )
        seen = state.get("samples", state["step"] * state["batch"])
        if seen != self.sizes.before(state["step"]):
            raise UserError(
                f"resume: the checkpoint has seen {seen} samples in {state['step']} steps, which these ramp.start, ramp.samples and "
                "ramp.rule do not make; give the ramp that it was trained with"
            )
        if state["optimizer_name"] != self.config.optim.name:
            raise UserError(
                f"resume: the checkpoint's optimizer is {state['optimizer_name']}, not optim.name={self.config.optim.name}"
            )
        try:
            distributed.load_optimizer(self.optimizer, state["optimizer"])
        except ValueError as error:
            raise UserError(
                f"resume: the checkpoint's optimizer does not fit this model's parameters ({error})"
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
                    if self.metrics:
                        self.metrics.step(record)
                    if config.eval.every and self.step % config.eval.every == 0 and self.step < self.total:
                        results = self.evaluate()
                    if self.save_due():
                        self.save()
                    if self.stopping:
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
            print_results(results, f"{self.folder.name}, step {self.step}")
            write_report(self.folder)
        return {"run": str(self.folder), "step": self.step, "loss": self.last_loss, "eval": results}

    def optimizer_step(self) -> dict[str, Any]:
        """One exact step over the global batch; returns what `metrics.jsonl` holds of it."""
        phases = Phases(self.world.device)
        size, seen = self.sizes.at(self.step), self.sizes.before(self.step + 1)
        if self.step and size != self.sizes.at(self.step - 1):
            self.retention.working = None  # of a smaller batch; to be measured anew
        self.retention.before_step(self.cache.memory)
        every = self.config.log.noise_scale
        measured = every > 0 and (self.step + 1) % every == 0
        if measured:
            self.cache.memory.budget = 0  # kept graphs have one gradient together
        self.optimizer.zero_grad()
        # The schedule counts full batches: under a ramp it goes by samples, and a scaled peak follows the step's own batch.
        factor = (size / self.config.batch) ** LR_SCALING[self.config.optim.lr_scaling]
        lr = self.schedule.apply(self.optimizer, seen / self.config.batch - 1, factor)
        batch = self.stream.next_batch()
        images, texts = (
            DeviceRows(rows, len(batch), self.world.device, resident=self.config.offload == "none", passing=passing)
            for rows, passing in ((batch.pixels, batch.passing), (batch.tokens, False))
        )
        with phases("encode"):
            features = self.cache.encode(images, texts)
        with phases("loss"):
            value = self.loss(*features)
            self.cache.backward(value)
            del features
        with phases("replay"), self.noise.watching(self.cache) if measured else nullcontext():
            self.cache.replay()
        with phases("optim"):
            scaled = self.precision.scaler.get_scale() if self.precision.scaler else 1.0
            grad_norm = self.gradient_norm()
            noise = self.noise_scale(scaled) if measured else {}
            finite = value.isfinite().item() and math.isfinite(grad_norm)
            if finite or self.precision.scaler:
                self.update()
            elif self.config.optim.on_divergence == "stop":
                self.stop_diverged(value.item(), grad_norm, batch.ids())
        self.retention.after_step(phases)
        self.last_loss = value.item()
        wait = self.stream.take_wait()
        rate = size / phases.total
        return {
            "step": self.step + 1,
            "samples": seen,
            "batch": size,
            "loss": self.last_loss,
            "logit_scale": self.model.logit_scale.exp().item(),
            "lr": lr,
            "grad_norm": grad_norm if finite else None,
            "skipped": not finite,
            "samples_per_s": rate,
            "samples_per_s_per_gpu": rate / self.world.size,
            "data_wait_frac": wait / phases.total,
            "step_s": phases.total,
            **{f"{name}_s": seconds for name, seconds in phases.seconds.items()},
            "mem_peak_bytes": phases.peak_bytes(),
            "mem_loss_bytes": phases.extra_bytes("loss"),
            "host_rss_bytes": psutil.Process().memory_info().rss,
            "broken": sum(self.stream.broken.values()),
            "faults": sum(self.stream.seen.values()),
            "truncated": self.stream.truncated,
            "mfu": self.flops.utilisation(rate / self.world.size),
            **noise,
        }

    def gradient_norm(self) -> float:
        """Sum over ranks what no wrapper has summed, undo the scaler's factor, and take the global norm."""
        self.world.sum_gradients(self.unwrapped)
        if self.precision.scaler:
            self.precision.scaler.unscale_(self.optimizer)
        return distributed.gradient_norm(self.all_trained()).item()

    def all_trained(self) -> list[nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]

    def noise_scale(self, scaled: float) -> dict[str, float | None]:
        norms = [distributed.gradient_norm(self.trained(name)) for name in self.towers]
        return self.noise.estimate(self.world, self.sizes.at(self.step), scaled, norms)

    def update(self) -> None:
        """Clip, step (which the scaler leaves out after an overflow, on every rank alike), clamp the logit scale."""
        config, scaler = self.config.optim, self.precision.scaler
        if config.clip_norm:
            parameters = self.all_trained()
            torch.nn.utils.clip_grads_with_norm_(parameters, config.clip_norm, distributed.gradient_norm(parameters))
        if scaler:
            scaler.step(self.optimizer)
            scaler.update()
        else:
            self.optimizer.step()
        for masters in self.masters.values():
            masters.spread()
        with torch.no_grad():
            self.model.logit_scale.clamp_(max=math.log(config.max_logit_scale))

    def weights(self) -> dict[str, Any]:
        """The model's state dict, whole and with master weights in the place of the rounded ones; a collective."""
        state = dict(distributed.whole(self.model.state_dict()))
        for name, masters in self.masters.items():
            state |= {f"{name}.{key}": copy.detach() for key, copy in masters.copies.items()}
        return state

    def stop_diverged(self, loss: float, grad_norm: float, ids: Tensor) -> None:
        """End the run before the weights are touched, leaving them and the batch's sample ids in RUN/diverged/."""
        every = self.world.gather(ids.clone())
        model = self.weights()
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
        self.model.image.to(self.world.device)
        results = evaluate(
            self.model,
            self.config.eval,
            device=self.world.device,
            autocast=self.precision.autocast,
            run_dir=self.folder,
            step=self.step,
        )
        if self.stored:
            self.model.image.cpu()
        if self.metrics:
            self.metrics.eval(self.step, results)
        return dict(results)

    # ---- save ----

    def save_due(self) -> bool:
        """Whether this step ends with a checkpoint; rank 0 decides for all, by steps, by minutes, at a signal and at the end."""
        c = self.config.checkpoint
        due = self.step == self.total or (c.every > 0 and self.step % c.every == 0)
        if self.world.main:
            due = due or self.signalled or (c.minutes > 0 and time.monotonic() - self.saved_at > 60 * c.minutes)
        due, self.stopping = self.world.broadcast((due, self.signalled))
        return due

    def save(self) -> None:
        cuda = torch.cuda.get_rng_state() if self.world.device.type == "cuda" else None
        random = self.world.gather({"cpu": torch.get_rng_state(), "cuda": cuda})
        positions = self.world.gather(self.stream.position())
        model, optimizer = self.weights(), distributed.whole(self.optimizer.state_dict())
        failure = None
        if self.world.main:
            state = {
                "model": model,
                "model_config": asdict(self.config.model),
                "optimizer": optimizer,
                "optimizer_name": self.config.optim.name,
                "scaler": self.precision.scaler.state_dict() if self.precision.scaler else None,
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

    @contextmanager
    def until_signalled(self) -> Iterator[None]:
        """SIGTERM (a scheduler's warning) finishes the step, saves, and ends the run."""

        def request(*_: object) -> None:
            self.signalled = True

        before = signal.signal(signal.SIGTERM, request)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)


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
