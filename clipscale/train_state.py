"""What is trained: the model, the gradient cache around its towers, its optimizer, and what a step does with them."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from clipscale import checkpoint, distributed
from clipscale.autotune import chunk_sizes, find_chunk, remember, remembered, uncut
from clipscale.config.train import TrainConfig
from clipscale.data.features import StoredFeatures, stored_features
from clipscale.distributed import World
from clipscale.errors import UserError
from clipscale.grad_cache import GradCache
from clipscale.loss.api import contrastive_loss
from clipscale.models.towers import ClipModel, StoredTower, build_model
from clipscale.noise_scale import NoiseScale
from clipscale.optim import build_optimizer
from clipscale.precision import MasterWeights, Precision

ELEMENTWISE = ("adamw", "lion", "adam", "nadamw", "sgd")
"""Optimizers whose step on a shard is the shard of their step."""


class Learner:
    """The model of a run on one rank, from nothing or from a checkpoint's state, with all that turns a batch into new weights."""

    def __init__(self, config: TrainConfig, world: World, folder: Path, state: dict[str, Any] | None) -> None:
        self.config, self.world, self.folder = config, world, folder
        self.local_batch = config.batch // world.size
        torch.manual_seed(config.seed)
        self.precision = Precision(config.precision, world.device)
        self.model = self.build_model()
        self.stored = self.stored_rows()
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

    def build_model(self) -> ClipModel:
        """The model of the settings, on this rank's device."""
        return build_model(self.config.model).to(self.world.device)

    def stored_rows(self) -> StoredFeatures | None:
        """How the image tower's features are read, where they are read in the place of pictures."""
        return stored_features(self.config.data, self.config.model, self.model)

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
        known = self.world.broadcast({name: remembered(self.folder, name) for name in sizes})
        found: dict[str, int] = {}
        for name, tower, sample in (("image", self.model.image, pixels), ("text", self.model.text, tokens)):
            if self.stored and name == "image":
                found[name] = self.local_batch
                continue
            size = uncut(tower, name, sizes[name], self.local_batch) or sizes[name] or known[name]
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

    def gradient_norm(self) -> Tensor:
        """Sum over ranks what no wrapper has summed, undo the scaler's factor, and take the global norm, 0-d."""
        self.world.sum_gradients(self.unwrapped)
        if self.precision.scaler:
            self.precision.scaler.unscale_(self.optimizer)
        return distributed.gradient_norm(self.all_trained())

    def all_trained(self) -> list[nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]

    def noise_scale(self, batch: int, scaled: float) -> dict[str, float | None]:
        """What the step's chunk gradients, `scaled` by the loss scaler, tell of the noise scale at this batch."""
        norms = [distributed.gradient_norm(self.trained(name)) for name in self.towers]
        return self.noise.estimate(self.world, batch, scaled, norms)

    def update(self, norm: Tensor) -> None:
        """Clip by the gradients' `norm`, step (after an overflow the scaler leaves it out, on all ranks alike), clamp the logit scale."""
        config, scaler = self.config.optim, self.precision.scaler
        if config.clip_norm:
            torch.nn.utils.clip_grads_with_norm_(self.all_trained(), config.clip_norm, norm)
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

    def restore(self, state: dict[str, Any]) -> None:
        """Optimizer and scaler as a checkpoint has them (the weights are there already). Raises UserError where they do not fit."""
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
