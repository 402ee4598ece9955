"""What a run trains: the model, the gradient cache around its towers, the optimizer, and how a batch's gradient updates them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm

from clipscale.checkpoint import Saved, save_diverged
from clipscale.common.errors import UserError
from clipscale.common.rng import draws_random_numbers
from clipscale.config.train import TrainConfig
from clipscale.data.features import StoredFeatures, stored_features
from clipscale.distributed import world as distributed
from clipscale.distributed.fsdp import check_weights, replicate_state, sharding
from clipscale.distributed.sums import GradientSum, SummedTower
from clipscale.distributed.world import World
from clipscale.loss.api import contrastive_loss
from clipscale.models.towers import ClipModel, StoredTower, build_model
from clipscale.state.empty_model import EmptyModel
from clipscale.step.captions import CaptionRule
from clipscale.step.chunk_sizes import agreed_chunk_sizes
from clipscale.step.ema import WeightAverage
from clipscale.step.grad_cache import GradCache
from clipscale.step.noise_scale import NoiseScale
from clipscale.step.optim import build_optimizer, largest_norm
from clipscale.step.precision import MasterWeights, Precision


class TrainState:
    """The model of a run on one rank, from its initial weights or from a checkpoint, and what turns a batch into new weights."""

    empty: EmptyModel | None = None
    """The model while it has no memory."""
    sums: Sequence[GradientSum] = ()
    """Of the gradients of scale and bias, since the loss's backward pass."""

    def __init__(self, config: TrainConfig, world: World, folder: Path, saved: Saved | None) -> None:
        self.notes: list[str] = []
        """Lines for the user, printed at the start."""
        if saved is not None and config.model.lean and not saved.values["model_config"].get("lean", False):
            config = replace(config, model=replace(config.model, lean=False))
            self.notes.append(
                "model.lean: the checkpoint was trained without it; the towers keep open_clip's forward pass"
            )
        self.config, self.world, self.folder = config, world, folder
        self.local_batch = config.batch // world.size
        torch.manual_seed(config.seed)
        self.earlier_chunks = saved.values.get("chunks", {}) if saved else {}
        self.precision = Precision(config.precision, world.device)
        self.model = self.build_model()
        self.stored = self.stored_features()
        self.captions = self.caption_rule(saved)
        self.notes += filter(None, [self.captions.note])
        self.masters = self.hold_weights()
        self.cache = self.build_cache()
        self.optimizer = self.build_optimizer()
        if config.log.noise_scale and config.launch.parallel == "fsdp":
            raise UserError(
                "log.noise_scale: FSDP2 keeps no gradient of a chunk to look at; leave it 0, or use launch.parallel=ddp"
            )
        self.noise = NoiseScale([self.model.image, self.model.text])
        self.average = WeightAverage(config.ema, self.trained_by_name()) if config.ema else None
        if saved is not None:
            self.load(saved.state(dict(self.model.named_parameters())))
        if self.stored:
            self.model.image.cpu()  # only evaluations use it

    # ---- build ----

    def build_model(self) -> ClipModel:
        """The model of the settings, on this rank's device.

        For FSDP2 over several ranks it has no memory before it is sharded, unless stored features need its weights at once.
        """
        config = self.config.model
        if self.config.launch.parallel == "fsdp" and self.world.size > 1 and not self.config.data.stored_member:
            empty = EmptyModel(config, self.world)
            if empty.suits:
                self.empty = empty
                return empty.model
        return build_model(config).to(self.world.device)

    def stored_features(self) -> StoredFeatures | None:
        """Reads the image tower's features where shards hold them instead of pictures."""
        return stored_features(self.config.data, self.config.model, self.model)

    def caption_rule(self, saved: Saved | None) -> CaptionRule:
        """Whether captions are sorted by length."""
        return CaptionRule(self.config, self.world, self.model, self.empty, saved.values if saved else None)

    def hold_weights(self) -> dict[str, MasterWeights]:
        """Cast the towers' matrices to the type that the settings hold them in; the optimizer's float32 copies by tower."""
        if self.sharded:
            check_weights(self.config.precision)
        shards = self.sharded and self.world.size > 1
        held = {name: self.precision.hold(tower, sharded=shards) for name, tower in self.towers.items()}
        return {name: masters for name, masters in held.items() if masters is not None}

    @property
    def sharded(self) -> bool:
        """Whether the settings ask for FSDP2, on one process too."""
        return self.config.launch.parallel == "fsdp"

    @property
    def towers(self) -> dict[str, nn.Module]:
        """The encoders of training. Stored features need no image encoder."""
        return {"image": StoredTower() if self.stored else self.model.image, "text": self.model.text}

    def trained(self, name: str) -> list[nn.Parameter]:
        """One tower's parameters that the optimizer updates: its master weights where it has any."""
        copies = self.copies()
        return [copies.get(id(p), p) for p in self.towers[name].parameters() if p.requires_grad]

    def copies(self) -> dict[int, nn.Parameter]:
        """The optimizer's float32 copies by the id of the parameter that each stands for."""
        return {key: copy for held in self.masters.values() for key, copy in held.of.items()}

    def trained_by_name(self) -> dict[str, nn.Parameter]:
        """The parameters that the optimizer updates, by the model's names."""
        return {name: p for name, p in self.optimized().named_parameters() if p.requires_grad}

    def build_cache(self) -> GradCache:
        """The gradient cache over both towers, data-parallel over several ranks."""
        if self.config.model.compile:
            # A function with more variants than this falls back to eager, whose random numbers differ from the compiled ones.
            torch._dynamo.config.recompile_limit = 64
            self.model.image.compile()
            self.model.text.compile(dynamic=None if self.captions.pad is None else True)
        towers = [self.data_parallel(name, tower) for name, tower in self.towers.items()]
        if self.empty:
            self.empty.fill()
            self.empty = None
        return GradCache(
            towers,
            self.loss,
            chunks=self.chunks(),
            autocast=self.precision.autocast,
            scaler=self.precision.scaler,
        )

    def data_parallel(self, name: str, tower: nn.Module) -> nn.Module:
        """The tower with its gradients summed over ranks, as `launch.parallel` says."""
        if name in self.masters:
            tower = self.world.wrap(tower, "none")
            return SummedTower(tower, self.masters[name].of) if self.world.size > 1 else tower
        return self.world.wrap(tower, self.config.launch.parallel, sharding(self.config.launch.zero, self.precision))

    def build_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer. Comes after the cache, because FSDP2 replaces parameters by sharded ones."""
        return build_optimizer(self.model, self.config.optim, self.copies(), sharded=self.sharded)

    def chunks(self) -> list[int]:
        """Samples per chunk of the image and the text tower; `cut` names them, and the device that they were found for."""
        side, length, device = self.model.image_size, self.model.context_length, self.world.device

        def pixels(n: int) -> Tensor:
            return torch.randint(0, 256, (n, 3, side, side), dtype=torch.uint8, device=device)

        def tokens(n: int) -> Tensor:
            return torch.randint(1, 100, (n, length), device=device)

        towers = {"image": None if self.stored else (self.model.image, pixels), "text": (self.model.text, tokens)}
        with self.precision.autocast():
            self.cut, note = agreed_chunk_sizes(
                self.config.cache, towers, self.local_batch, self.world, self.folder, self.earlier_chunks
            )
        self.notes += filter(None, [note])
        return [self.cut["image"], self.cut["text"]]

    def image_size(self) -> int:
        """Side of the pictures that the data stream makes. Raises UserError for settings that this model cannot take."""
        if self.stored and self.config.offload == "encoded":
            raise UserError("offload=encoded is for pictures; with data.image_features take offload=host, or disk")
        return self.model.image_size

    # ---- step ----

    def loss(self, image_features: Tensor, text_features: Tensor) -> Tensor:
        """This rank's view of the global loss: its value is the global mean, and its gradients sum over ranks to that mean's.

        With `cache.negatives=chunk`, the mean over micro-batches, each made of one image chunk of every rank.
        """
        c = self.config.loss
        scale, bias = self.model.logit_scale.exp(), self.model.logit_bias if c.objective == "sigmoid" else None
        size = self.cache.towers[0].size if self.config.cache.negatives == "chunk" else len(image_features)
        with self.precision.autocast():
            parts = [
                contrastive_loss(u, v, scale, logit_bias=bias, check=False, **vars(c)) * (len(u) / len(image_features))
                for u, v in zip(image_features.split(size), text_features.split(size), strict=True)
            ]
            return torch.stack(parts).sum()

    def backward(self, value: Tensor) -> None:
        """Gradients of the loss with respect to the features, scale and bias. These two are summed over ranks in the background."""
        self.cache.backward(value)
        scalars = [p for p in (self.model.logit_scale, self.model.logit_bias) if p is not None]
        self.sums = self.world.begin_sums(scalars)

    def gradient_norm(self) -> Tensor:
        """Finish the gradients (the sums over ranks, the scaler's factor); their global norm, 0-d."""
        for tower in self.cache.towers:
            if isinstance(tower.encoder, SummedTower):
                tower.encoder.finish()
        for one in self.sums:
            one.wait()
        if self.precision.scaler:
            self.precision.scaler.unscale_(self.optimizer)
        return distributed.gradient_norm(self.with_gradient())

    def with_gradient(self) -> list[nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]

    def noise_scale(self, batch: int) -> dict[str, float | None]:
        """The noise scale at this batch, from the chunk gradients that `noise` has measured."""
        norms = [distributed.gradient_norm(self.trained(name)) for name in self.towers]
        return self.noise.estimate(self.world, batch, self.precision.loss_scale, norms)

    def update(self, norm: Tensor) -> None:
        """Clip by the gradients' `norm`, step, and clamp the logit scale. After an overflow the scaler skips the step on all ranks."""
        config, scaler = self.config.optim, self.precision.scaler
        if limit := largest_norm(config, sharded=self.sharded):
            torch.nn.utils.clip_grads_with_norm_(self.with_gradient(), limit, norm)
        if scaler:
            scaler.step(self.optimizer)
            scaler.update()
        else:
            self.optimizer.step()
        for masters in self.masters.values():
            masters.spread()
        with torch.no_grad():
            self.model.logit_scale.clamp_(max=math.log(config.max_logit_scale))
        if self.average:
            self.average.update()

    # ---- save and load ----

    def statistics(self) -> list[Tensor]:
        """The running statistics of batch normalisation, which a forward pass changes."""
        return [b for module in self.model.modules() if isinstance(module, _BatchNorm) for b in module.buffers()]

    def weights(self, options: StateDictOptions | None = None) -> dict[str, Any]:
        """The model's state dict, by torch's `options`, with master weights in place of the rounded ones.

        Without options it is sharded where the weights are.
        """
        state = get_model_state_dict(self.model, options=options)
        for name, masters in self.masters.items():
            copies = {f"{name}.{key}": copy.detach() for key, copy in masters.copies.items()}
            state |= {key: copy.cpu() for key, copy in copies.items()} if options and options.cpu_offload else copies
        return state

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of this state, sharded where the weights are. Its tensors change with the next step."""
        return {
            "model": self.weights(),
            "model_config": asdict(self.config.model),
            "optimizer": self.optimizer_state(),
            "sort_captions": self.captions.pad is not None,
            "optimizer_name": self.config.optim.name,
            "chunks": self.cut,
            "scaler": self.precision.scaler.state_dict() if self.precision.scaler else None,
            "ema": self.average.state_dict() if self.average else None,
        }

    def optimizer_state(self) -> dict[str, Any]:
        """The optimizer's state by parameter name."""
        if not self.optimizer.state:  # before the first step; the library would take one, which counts
            groups = zip(self.optimizer.param_groups, self.parameter_names())
            return {"state": {}, "param_groups": [{**group, "params": names} for group, names in groups]}
        state = get_optimizer_state_dict(self.optimized(), self.optimizer)
        return {"state": state["state"], "param_groups": state["param_groups"]}

    def parameter_names(self) -> list[list[str]]:
        """The model's names of the optimizer's parameters, by group."""
        name_of = {id(p): name for name, p in self.optimized().named_parameters()}
        return [[name_of[id(p)] for p in group["params"]] for group in self.optimizer.param_groups]

    def check_finite(self, step: int, loss: float, grad_norm: float, ids: Callable[[], Tensor]) -> bool:
        """Whether a step's loss and gradient are finite. Where they are not, and no lower loss scale can help, training has diverged.

        Then, if the settings say so, the run ends before the optimizer changes the weights; these and the batch's sample `ids` are
        written to RUN/diverged/, and a UserError is raised.
        """
        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        if finite or self.precision.can_lower_loss_scale or self.config.optim.on_divergence != "stop":
            return finite
        every = torch.cat(self.world.gather(ids().clone()))
        weights = self.weights(StateDictOptions(full_state_dict=True, cpu_offload=True))
        if self.world.main:
            state = {"step": step, "loss": loss, "grad_norm": grad_norm, "model": weights, "samples": every}
            save_diverged(self.folder, step, state)
        raise UserError(
            f"step {step}: loss={loss}, gradient norm={grad_norm}: training has diverged; earlier checkpoints are intact and "
            f"{self.folder}/diverged holds the weights; lower optim.lr, set optim.clip_norm, or use another precision"
        )

    def load(self, saved: dict[str, Any]) -> None:
        """Take weights, optimizer and scaler from a checkpoint. Raises UserError where they do not fit."""
        # The optimizer first: to make its state, the library takes a step with zero gradients and a learning rate of 0.
        whole = not any(isinstance(value, DTensor) for value in saved["model"].values())
        self.load_optimizer(saved["optimizer"], whole)
        set_model_state_dict(self.model, dict(saved["model"]), options=StateDictOptions(full_state_dict=whole))
        for name, masters in self.masters.items():
            masters.load({key: saved["model"][f"{name}.{key}"] for key in masters.copies})
        if self.precision.scaler and saved["scaler"]:
            self.precision.scaler.load_state_dict(saved["scaler"])
        if self.average:
            self.average.load(saved.get("ema"))
        if reason := self.other_random_numbers(saved):
            self.notes.append(
                f"{reason}: the towers draw other random numbers than in an undisturbed run, so the curve differs from its"
            )

    def other_random_numbers(self, saved: dict[str, Any]) -> str:
        """Why a run that goes on from `saved` draws other random numbers than one that was never stopped; empty where it does not."""
        if not any(draws_random_numbers(tower) for tower in self.towers.values()):
            return ""
        if len(saved["random"]) != self.world.size:
            return f"resumed on {self.world.size} processes instead of {len(saved['random'])}"
        before, now = ([c.get(name) for name in ("image", "text")] for c in (saved.get("chunks", self.cut), self.cut))
        return f"resumed with chunks of {now} samples instead of {before}" if before != now else ""

    def load_optimizer(self, state: dict[str, Any], whole: bool) -> None:
        """Take the optimizer's state. `whole`: it is not sharded. Raises UserError where it belongs to other parameters."""
        module, names = self.optimized(), self.parameter_names()
        saved = [list(group["params"]) for group in state["param_groups"]]
        if saved != names:
            counts = [sum(map(len, groups)) for groups in (saved, names)]
            raise UserError(
                "resume: the checkpoint's optimizer does not fit this model's parameters (it holds the state of "
                f"{counts[0]}, and {counts[1]} are trained here); freeze the same towers, or choose another run=NAME"
            )
        if state["state"]:
            # Not strict: a parameter that the loss does not use, such as the bias of a softmax loss, has no state.
            options = StateDictOptions(full_state_dict=whole, strict=False)
            set_optimizer_state_dict(module, self.optimizer, state, options=options)
            replicate_state(self.optimizer)
        for group, settings in zip(self.optimizer.param_groups, state["param_groups"]):  # above, tuples become lists
            group.update({key: value for key, value in settings.items() if key != "params"})

    def optimized(self) -> nn.Module:
        """A module whose parameters are those of the optimizer, by the model's names: master weights replace the rounded ones."""
        if not self.masters:
            return self.model
        copies, root = self.copies(), nn.Module()
        for name, p in self.model.named_parameters():
            parent, (*path, leaf) = root, name.split(".")
            for part in path:
                if part not in parent._modules:
                    parent.add_module(part, nn.Module())
                parent = parent.get_submodule(part)
            parent.register_parameter(leaf, copies.get(id(p), p))
        return root
