"""What a run trains: the model, the gradient cache around its towers, the optimizer, and an update of all."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from clipscale import checkpoint
from clipscale.common.errors import UserError
from clipscale.common.record import Record
from clipscale.common.terminal import tell
from clipscale.config.sections import MAX_LOGIT_SCALE
from clipscale.config.train import TrainConfig
from clipscale.data.columns import KEYS
from clipscale.data.features import TeacherFeatures
from clipscale.distributed.fsdp import replicate_state, sharded_as
from clipscale.distributed.world import World, gradient_norm
from clipscale.loss.api import contrastive_loss, distillation_loss
from clipscale.loss.machine import Machine
from clipscale.loss.objective import OBJECTIVES
from clipscale.models.tokenizer import Tokenizer
from clipscale.models.towers import ClipModel, Projection, build_model, fit_positions, unit_rows
from clipscale.step.captions import CaptionRule
from clipscale.step.chunk_sizes import agreed_chunk_sizes, random_captions, random_pixels
from clipscale.step.ema import WeightAverage
from clipscale.step.grad_cache import Chunked, GradCache
from clipscale.step.kept_graphs import KeepBudget
from clipscale.step.optim import MOMENTS, build_optimizer
from clipscale.step.precision import Precision
from clipscale.step.trunk import TrunkFeatures

MOST_SKIPPED = 10
"""Steps in a row that `optim.on_divergence=skip` leaves out: after so many the weights are at fault, not a sample."""


@dataclass(frozen=True)
class Parts:
    """What a run's state is built from, as far as weights, data and machine have a say in it. A dry run has its own."""

    model: ClipModel
    captions: CaptionRule
    teachers: tuple[TeacherFeatures, ...] = ()
    """Read the features of `distill.teachers`."""
    chunks: Record | None = None
    """Samples per chunk of the `image` and `text` tower; None: as the settings say, or found by trial."""
    machine: Machine | None = None
    """What the loss runs on; None: this machine."""
    loss_group: dist.ProcessGroup | None = None
    """The ranks whose samples meet in the loss; None: all."""


def parts_of(
    config: TrainConfig, world: World, tokenizer: Tokenizer, teachers: tuple[TeacherFeatures, ...] = ()
) -> Parts:
    """The parts of a run on this machine. Raises UserError."""
    torch.manual_seed(config.seed)
    model = build_model(config.model, tokenizer=tokenizer).to(world.device)
    return Parts(model, CaptionRule(config, world, model), teachers)


class TrainState:
    """A run's model on one rank, from its initial weights or a checkpoint, and what turns a batch into new weights."""

    def __init__(
        self, config: TrainConfig, world: World, parts: Parts, saved: Path | None = None, stage: str = ""
    ) -> None:
        """`saved`: the checkpoint to go on from. `stage`: it ends another; `continue` or `restart` the optimizer."""
        self.config, self.world, self.parts = config, world, parts
        self.model, self.captions = parts.model, parts.captions
        self.skipped = 0
        """Steps in a row that were left out since they were not finite."""
        self.precision = Precision(config.precision, world.device)
        self.frozen: list[str] | None = None
        """Digests of the weights that adapters adapt, which checkpoints leave out; None: without adapters."""
        if config.model.lora:
            self.frozen = [tower.digest(frozen=True) for tower in (self.model.image, self.model.text)]
        projecting = [name for name in ("image", "text") if getattr(self.model, name).trains_only_its_projection()]
        self.trunks = projecting if config.launch.parallel == "ddp" else []  # FSDP2 shards whole towers
        """The towers whose trunk runs once a step."""
        towers: dict[str, nn.Module] = {"image": self.model.image, "text": self.model.text}
        towers |= {name: Projection(towers[name]) for name in self.trunks}  # type: ignore[arg-type]
        for tower in towers.values():
            self.precision.store(tower)
        parallel = config.launch.parallel
        encoders = [world.wrap(tower, parallel, self.precision.dtype) for tower in towers.values()]
        earlier = checkpoint.read_values(saved)["chunks"] if saved and not stage else {}
        self.chunks = parts.chunks or self.chunk_sizes(earlier)
        self.cache = GradCache(
            encoders,
            self.loss,
            chunks=[self.chunks["image"], self.chunks["text"]],
            autocast=self.precision.autocast,
            scaler=self.precision.scaler,
        )
        # After the wrappers: FSDP2 replaces parameters by sharded ones.
        scales = self.model.rate_factors(config.model)
        self.optimizer = build_optimizer(self.model, config.optim, sharded=parallel != "ddp", scales=scales)
        self.keep = KeepBudget(config.cache.keep, world)
        self.average = WeightAverage(config.ema, self.model) if config.ema else None
        if saved is not None:
            like = dict(self.model.named_parameters())
            self.load(checkpoint.load(saved, verified=True, like=like), stage)

    def chunk_sizes(self, earlier: Record) -> Record:
        """Samples per chunk of the `image` and `text` tower, and their `device`; `earlier`: the checkpoint's."""
        model, device = self.model, self.world.device
        towers: Any = {
            "image": (model.image, partial(random_pixels, model, device=device)),
            "text": (model.text, partial(random_captions, model, device=device)),
        }
        with self.precision.autocast():
            local_batch = self.config.batch // self.world.size
            texts = self.config.data.texts_per_step
            return agreed_chunk_sizes(self.config.cache, towers, local_batch, self.world, earlier, texts)

    # ---- step ----

    def past_trunk(self, name: str, inputs: Chunked) -> Chunked:
        """The input of what is trained of a tower, by that of the whole one."""
        whole = getattr(self.model, name)
        return TrunkFeatures(inputs, whole.trunk, self.precision.autocast) if name in self.trunks else inputs

    def reads(self, rows: int) -> Iterator[tuple[int, int]]:
        """The ranges of pixels that a step of `rows` samples reads, in order."""
        tower = self.cache.towers[0]
        return iter(tower.cut(rows)) if "image" in self.trunks else tower.ranges(rows)

    def loss(
        self, image_features: Tensor, text_features: Tensor, *, targets: Mapping[str, Tensor] = MappingProxyType({})
    ) -> Tensor:
        """The global mean of the loss, on every rank. Gradients are shares: their sum over ranks is its gradient.

        `targets`: the columns that it takes (data/columns.py), by their names.
        """
        config = self.config.loss
        bias = self.model.logit_bias if OBJECTIVES[config.objective].needs_bias else None
        captions = self.config.data.captions_per_step
        options: Record = {
            "logit_bias": bias,
            "captions": captions,
            "keys": targets.get(KEYS),
            "group": self.parts.loss_group,
            "machine": self.parts.machine,
            "check": False,
            **vars(config),
        }
        scale = self.model.logit_scale.exp()
        with self.precision.autocast():
            if not self.parts.teachers:
                return contrastive_loss(image_features, text_features, scale, **options)
            teachers = []
            for teacher in self.parts.teachers:
                rows = unit_rows(targets[teacher.member])
                teachers.append((rows[:, 0], rows[:, 1], teacher.scale))
            weights = self.config.distill.weights
            return distillation_loss(image_features, text_features, scale, teachers, weights, **options)

    def spoil_gradients(self) -> None:
        """Make the gradients' norm NaN on all ranks, so that none of them updates its weights."""
        assert self.model.logit_scale.grad is not None
        self.model.logit_scale.grad.fill_(math.nan)

    def gradient_norm(self) -> Tensor:
        """Finish the gradients (scale's and bias's sums over ranks, the scaler's factor); their global norm, 0-d."""
        self.world.sum_gradients([self.model.logit_scale, self.model.logit_bias])
        if self.precision.scaler:
            self.precision.scaler.unscale_(self.optimizer)
        return gradient_norm(self.trained)

    @property
    def trained(self) -> list[nn.Parameter]:
        """The parameters that the optimizer updates, in its order."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def update(self, norm: Tensor) -> None:
        """Clip by the gradients' `norm`, step, and clamp the logit scale.

        After an overflow the scaler skips the step on all ranks, and there is nothing to average.
        """
        config, scaler = self.config.optim, self.precision.scaler
        skipped = scaler is not None and not bool(norm.isfinite())
        if config.clip_norm:
            torch.nn.utils.clip_grads_with_norm_(self.trained, config.clip_norm, norm)
        if scaler:
            scaler.step(self.optimizer)
            scaler.update()
        else:
            self.optimizer.step()
        with torch.no_grad():
            self.model.logit_scale.clamp_(max=math.log(MAX_LOGIT_SCALE))
        if self.average and not skipped:
            self.average.update()

    def refuse_divergence(self, step: int, loss: float, grad_norm: float) -> None:
        """Raise UserError for a value that is not finite, unless a lower loss scale or a skipped step may help.

        Steps are skipped at most MOST_SKIPPED in a row. `step`: counted from 0.
        """
        if self.precision.can_lower_loss_scale:
            return
        self.skipped += 1
        values = f"step {step + 1}: loss={loss}, gradient norm={grad_norm}"
        if self.config.optim.on_divergence == "skip" and self.skipped < MOST_SKIPPED:
            if self.world.main:
                tell(f"warning: {values}: left out ({self.skipped} in a row; {MOST_SKIPPED} end the run)", error=True)
            return
        raise UserError(
            f"{values}: training has diverged; its checkpoints are intact; lower optim.lr, set optim.clip_norm, or use "
            "another precision"
        )

    # ---- save and load ----

    def saved_bytes(self) -> int:
        """Bytes of a checkpoint, at least: what other optimizers keep is not known before the first step."""
        trained = sum(p.nbytes for p in self.trained)
        weights = trained if self.frozen is not None else sum(p.nbytes for p in self.model.parameters())
        average = trained if self.average else 0
        return weights + average + MOMENTS.get(self.config.optim.name, 0) * trained

    def state_dict(self) -> Record:
        """What a checkpoint holds of it, sharded where the weights are. Its tensors change with the next step."""
        optimizer = get_optimizer_state_dict(self.model, self.optimizer)
        return {
            "model": get_model_state_dict(
                self.model, options=StateDictOptions(ignore_frozen_params=self.frozen is not None)
            ),
            "frozen": self.frozen,
            "model_config": asdict(self.config.model),
            "optimizer": {"state": optimizer["state"], "param_groups": optimizer["param_groups"]},
            "optimizer_name": self.config.optim.name,
            "chunks": self.chunks,
            "scaler": self.precision.scaler.state_dict() if self.precision.scaler else None,
            "ema": self.average.state_dict() if self.average else None,
        }

    def load(self, saved: Record, stage: str = "") -> None:
        """Take weights, optimizer and scaler from a checkpoint. Raises UserError where it trains other parameters.

        Settings of the optimizer are those of now. In a new `stage` the averages of resized position embeddings begin
        anew, or (`restart`) all do.
        """
        name_of = {id(p): name for name, p in self.model.named_parameters()}
        names = [[name_of[id(p)] for p in group["params"]] for group in self.optimizer.param_groups]
        if [group["params"] for group in saved["optimizer"]["param_groups"]] != names:
            raise UserError(
                "resume: the checkpoint's optimizer does not fit this model's parameters; freeze the same towers, or "
                "choose another run=NAME"
            )
        groups = [dict(group) for group in self.optimizer.param_groups]
        if stage:
            for weights in (saved["model"], (saved["ema"] or {}).get("weights", {})):
                for name in fit_positions(weights, self.model):
                    weights[name] = sharded_as(self.model.get_parameter(name), weights[name])
                    saved["optimizer"]["state"].pop(name, None)
        # The optimizer first: to make its state, the library takes a step with zero gradients and a learning rate of 0.
        # Not strict: a parameter that the loss does not use, such as the bias of a softmax loss, has no state.
        options = StateDictOptions(strict=False)
        if stage != "restart":
            set_optimizer_state_dict(self.model, self.optimizer, saved["optimizer"], options=options)
            replicate_state(self.optimizer)
        for group, settings in zip(self.optimizer.param_groups, groups):  # these settings, which may have changed
            group.update({key: value for key, value in settings.items() if key != "params"})
        if not stage and saved.get("frozen") != self.frozen:  # a stage's may have other positions
            raise UserError("model.weights: not the weights that the checkpoint's adapters were trained on")
        set_model_state_dict(self.model, saved["model"], options=StateDictOptions(strict=self.frozen is None))
        if self.precision.scaler and saved["scaler"]:
            self.precision.scaler.load_state_dict(saved["scaler"])
        if self.average:
            self.average.load(saved["ema"])
