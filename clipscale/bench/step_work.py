"""What the step benchmark measures, in a fresh process: `python -m clipscale.bench.step_work FOLDER` does the job in FOLDER.

Every method computes the gradients of the same contrastive loss over the same samples with the same towers; none updates weights.
"""

import gc
import json
import math
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import yaml
from torch import Tensor

from clipscale.bench.memory import DeviceMemory, HostMemory, bound_memory, is_out_of_memory
from clipscale.keys import conf_dir
from clipscale.loss.api import contrastive_loss
from clipscale.models.towers import ClipModel, ModelConfig, architecture, build_model
from clipscale.precision import Precision, PrecisionConfig
from clipscale.step import GradCache

Step = Callable[[Tensor, Tensor], Any]
"""Pixels and tokens of a batch in; gradients left in the parameters."""

WORDS = 12
"""Tokens of a caption; the rest of the context is padding, as in most captions."""


@dataclass
class StepJob:
    """What one process is to do."""

    model: str
    batch: int
    chunk: int
    precision: str
    device: str
    probed: list[tuple[str, int]] = field(default_factory=list)
    """Methods and batches whose memory is wanted."""
    timed: list[str] = field(default_factory=list)
    """Methods whose time over `batch` is wanted, in turns."""
    repeats: int = 0
    memory: int | None = None
    """Bytes that the process may take on a CPU beyond what torch itself takes."""


def model_config(name: str) -> ModelConfig:
    """A preset of conf/model."""
    values = yaml.safe_load((conf_dir() / "model" / f"{name}.yaml").read_text(encoding="utf-8"))
    return ModelConfig(**values)


class StepWork:
    """A job in its process."""

    def __init__(self, job: StepJob) -> None:
        self.job = job
        self.device = torch.device(job.device)
        self.config = model_config(job.model)
        self.precision = Precision(PrecisionConfig(name=job.precision), self.device)
        self.found: dict[str, dict[str, Any]] = {}
        self.steps: dict[str, Step] = {}
        self.models: dict[bool, ClipModel] = {}
        self.weights: list[torch.nn.Module] = []

    def do(self) -> dict[str, Any]:
        if self.device.type == "cpu" and self.job.memory is not None:
            bound_memory(self.job.memory)
        for name, batch in self.job.probed:
            self.attempt(name, partial(self.probe, batch=batch))
        inputs = self.inputs(self.job.batch)
        for number in range(self.job.repeats + 1):
            names = self.job.timed if number % 2 else self.job.timed[::-1]
            for name in names:
                if self.record(name)["status"] == "ok":
                    self.attempt(name, partial(self.time, inputs=inputs, kept=number > 0))
        return {"methods": self.found, "threads": torch.get_num_threads()}

    def record(self, name: str) -> dict[str, Any]:
        return self.found.setdefault(name, {"status": "ok", "seconds": [], "memory": {}})

    def attempt(self, name: str, what: Callable[[str], None]) -> None:
        """`what(name)`, or in the method's record why not."""
        record = self.record(name)
        if record["status"] != "ok":
            return
        try:
            what(name)
        except Exception as error:
            status = "out of memory" if is_out_of_memory(error) else "failed"
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            record |= {"status": status, "reason": reason, "traceback": traceback.format_exc()}
        gc.collect()

    def probe(self, name: str, batch: int) -> None:
        """Growth of the peak during one step, weights, gradients and inputs aside."""
        step = self.step(name)
        step(*self.inputs(min(self.job.chunk, batch)))
        for weights in self.weights:
            weights.zero_grad(set_to_none=False)
        inputs = self.inputs(batch)
        memory = DeviceMemory(self.device) if self.device.type == "cuda" else HostMemory()
        step(*inputs)
        self.record(name)["memory"][str(batch)] = memory.growth()

    def time(self, name: str, inputs: tuple[Tensor, Tensor], kept: bool) -> None:
        step = self.step(name)
        for weights in self.weights:
            weights.zero_grad()
        self.wait()
        start = time.perf_counter()
        step(*inputs)
        self.wait()
        if kept:
            self.record(name)["seconds"].append(time.perf_counter() - start)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def inputs(self, batch: int) -> tuple[Tensor, Tensor]:
        """Random pixels and captions, on the device."""
        model, generator = self.model(), torch.Generator().manual_seed(batch)
        side = model.image_size
        pixels = torch.randint(0, 256, (batch, 3, side, side), dtype=torch.uint8, generator=generator)
        tokens = torch.zeros(batch, model.context_length, dtype=torch.int32)
        words = min(WORDS, model.context_length - 1)
        tokens[:, :words] = torch.randint(1, 49406, (batch, words), generator=generator, dtype=torch.int32)
        tokens[:, words] = 49407
        return pixels.to(self.device), tokens.to(self.device)

    # ---- methods ----

    def model(self, *, frozen: bool = False) -> ClipModel:
        if frozen not in self.models:
            torch.manual_seed(0)
            config = replace(self.config, freeze_image=frozen)
            self.models[frozen] = build_model(config).to(self.device)
            self.weights.append(self.models[frozen])
        return self.models[frozen]

    def step(self, name: str) -> Step:
        """The method of that name, built once."""
        if name not in self.steps:
            if name == "open_clip":
                self.steps[name] = self.open_clip_step()
            else:
                base, frozen = name.removeprefix("frozen-"), name.startswith("frozen")
                model = self.model(frozen=frozen)
                if base == "plain":
                    self.steps[name] = self.plain_step(model, frozen)
                else:
                    share = float(base.removeprefix("keep-")) / 100 if base.startswith("keep-") else 0.0
                    self.steps[name] = self.cached_step(model, share)
        return self.steps[name]

    def loss_of(self, model: ClipModel) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda u, v: contrastive_loss(u, v, model.logit_scale.exp(), check=False)

    def plain_step(self, model: ClipModel, frozen: bool) -> Step:
        """One graph over the whole batch."""
        loss = self.loss_of(model)

        def step(pixels: Tensor, tokens: Tensor) -> None:
            with self.precision.autocast():
                with torch.set_grad_enabled(not frozen):
                    u = model.image(pixels)
                v = model.text(tokens)
            loss(u, v).backward()

        return step

    def cached_step(self, model: ClipModel, share: float) -> Step:
        """The gradient cache, with room for that share of all graphs."""
        towers = [model.image, model.text]
        cache = GradCache(towers, self.loss_of(model), chunks=self.job.chunk, autocast=self.precision.autocast)

        def step(pixels: Tensor, tokens: Tensor) -> None:
            trained = [tower for tower in cache.towers if tower.trained]
            if share and not all(
                tower.cost for tower in trained
            ):  # the first time: keep one graph of each tower, to measure it
                for tower in trained:
                    cache.memory.budget = 1
                    tower.encode(pixels if tower is cache.towers[0] else tokens)
            needed = sum(tower.cost * len(pixels) / min(tower.size, len(pixels)) for tower in trained)
            cache.memory.budget = math.inf if share == 1 else share * needed
            cache.step(pixels, tokens)

        return step

    def open_clip_step(self) -> Step:
        """One step of open_clip's own training loop with accumulation over chunks, on pixels normalised beforehand."""
        import open_clip
        from open_clip.model import CustomTextCLIP
        from open_clip_train.train import train_one_epoch

        torch.manual_seed(0)
        model = CustomTextCLIP(**architecture(self.config), output_dict=True).to(self.device)
        self.weights.append(model)
        loss = open_clip.ClipLoss()
        precision = {"fp32": "fp32", "bf16": "amp_bf16"}[self.job.precision]
        ready: dict[int, Any] = {}

        def step(pixels: Tensor, tokens: Tensor) -> None:
            size = min(self.job.chunk, len(pixels))
            if id(pixels) not in ready:
                ready.clear()
                tower = self.model().image
                images = (pixels - tower.mean) / tower.std
                ready[id(pixels)] = list(zip(images.split(size), tokens.long().split(size), strict=True))
            chunks = _Loader(ready[id(pixels)])
            args = SimpleNamespace(
                device=str(self.device), precision=precision, accum_freq=len(chunks), batch_size=size, rank=0, local_rank=0,
                world_size=1, distill=False, skip_scheduler=True, horovod=False, grad_clip_norm=None, log_every_n_steps=1,
                wandb=False, log_local=False,
            )  # fmt: skip
            data = {"train": SimpleNamespace(dataloader=chunks, set_epoch=lambda _: None)}
            train_one_epoch(model, data, loss, 0, _NoOptimizer(), None, None, None, args)

        return step


class _Loader(list[Any]):
    """Chunks as open_clip's loop wants them."""

    @property
    def num_batches(self) -> int:
        return len(self)

    @property
    def num_samples(self) -> int:
        return sum(len(images) for images, _ in self)


class _NoOptimizer:
    """Leaves gradients and weights alone: only forward and backward are compared, and gradients are cleared between the steps."""

    param_groups = ({"lr": 0.0},)

    def zero_grad(self) -> None:
        pass

    def step(self) -> None:
        pass


def main(folder: Path) -> int:
    record = json.loads((folder / "job.json").read_text())
    job = StepJob(**record | {"probed": [tuple(pair) for pair in record["probed"]]})
    answer = StepWork(job).do()
    part = folder / "answer.part"
    part.write_text(json.dumps(answer))
    part.rename(folder / "answer.json")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
