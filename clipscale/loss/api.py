"""The public function: check the call, choose exchange, backend and similarity, and compute the loss.

Letters: n rows (images) and m columns (texts) of this rank, D feature width.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Unpack, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from clipscale.loss.autograd import Backend, ContrastiveLoss, LossCall
from clipscale.loss.exchange import Communicator, Gather, Ring, Single
from clipscale.loss.inputs import Inputs, LossOptions, Pair, checked_inputs
from clipscale.loss.machine import Machine
from clipscale.loss.objective import BACKENDS, EXCHANGES, OBJECTIVES, SHARED, Objective, exchange_of
from clipscale.loss.similarity import Deep, Dot, Similarity
from clipscale.loss.torch_backend import TorchBackend
from clipscale.loss.triton.tuning import WIDTH_STEP

_log = logging.getLogger(__name__)

CHOICES = {"objective": tuple(OBJECTIVES), "exchange": EXCHANGES, "backend": BACKENDS, "shared": SHARED}


@dataclass(frozen=True)
class Choices:
    """How a call is computed. The fields are keyword arguments of `contrastive_loss`, which describes them."""

    objective: str = "softmax"
    exchange: str = "auto"
    backend: str = "auto"
    group: dist.ProcessGroup | DeviceMesh | None = None
    similarity: nn.Module | str | None = None
    shared: str = "mask"
    captions: int = 1
    check: bool = True
    machine: Machine | None = None

    @cached_property
    def comm(self) -> Communicator | None:
        """None: this process is by itself."""
        return None if self.exchange == "none" else Communicator.of(self.group)

    @property
    def module(self) -> nn.Module | None:
        """None: the dot product."""
        return self.similarity if isinstance(self.similarity, nn.Module) else None

    def refuse_mistakes(self, has_keys: bool) -> None:
        """Raise ValueError for a word that is no choice of its argument, and for what does not go together."""
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r} is not one of {', '.join(choices)}")
        if isinstance(self.similarity, str) and self.similarity != "dot":
            raise ValueError(f"similarity={self.similarity!r} is no module; leave it out for the dot product")
        if self.shared == "mask" and has_keys and self.captions > 1:
            raise ValueError("shared=mask takes one caption an image; with several, shared=positive")

    @contextmanager
    def refusals(self, device: torch.device) -> Iterator[None]:
        """A ValueError inside is raised on the other ranks, too, where they call `agree`."""
        try:
            yield
        except ValueError:
            self.agree(None, device)
            raise

    def agree(self, inputs: Inputs | None, device: torch.device) -> None:
        """Raise ValueError where another rank has other inputs or choices, or (None) has none."""
        if self.comm is not None and self.check:
            facts = {name: choices.index(getattr(self, name)) for name, choices in CHOICES.items()} if inputs else {}
            self.comm.agree(inputs.facts() | facts if inputs else None, device)


@torch.compiler.disable(
    reason="the contrastive loss works tile by tile in place and talks to other ranks: a graph of its own gains nothing"
)
def contrastive_loss(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: Tensor | float,
    *,
    logit_bias: Tensor | float | None = None,
    objective: str = "softmax",
    exchange: str = "auto",
    backend: str = "auto",
    keys: Tensor | Pair | None = None,
    **options: Unpack[LossOptions],
) -> Tensor:
    """The contrastive loss of image-text pairs spread over the ranks of a group, without a batch x batch matrix.

    With x_ij = logit_scale * similarity(image i, text j) over the N images of all ranks, text i being the one that
    belongs to image i:

        softmax        mean_i of (LSE_j x_ij + LSE_j x_ji) / 2 - x_ii     (CLIP, arXiv 2103.00020)
        softmax_image  mean_i of LSE_j x_ij - x_ii                        (softmax_text: LSE_j x_ji)
        sigmoid        sum_ij softplus(-z_ij (x_ij + logit_bias)) / N     (SigLIP, arXiv 2303.15343)

    where z is 1 at the positives and -1 elsewhere. With several positives P_i, the mean over them takes x_ii's place in
    both directions (UniCL, arXiv 2204.03610; SupCon's outer form, arXiv 2004.11362), and an image's k captions are k
    texts, each with a weight of 1/k.

    Args:
        image_features: (n, D), rows usually of unit length; whatever a module takes.
        text_features: (m, D), text j of the first captions * n belonging to image j // captions; texts beyond those are
            hard negatives: columns only.
        logit_scale: the multiplier itself, not its logarithm; positive; a number or a tensor of one element.
        logit_bias: for the sigmoid; the softmax does not depend on it.
        objective: softmax | softmax_image | softmax_text | sigmoid.
        similarity: None (or "dot") for the dot product, or a module from image features and text features to
            similarities (n, m), pair by pair, which is called with one tile at a time, twice, and whose parameters get
            their gradient too.
        exchange: none (this process by itself) | replicated (CLIP: gather both sides, the whole loss on every rank; of
            modules and of more texts than images: gather) | local (OpenCLIP: two one-sided losses of the own rows; of
            what replicated does not take, and of other objectives than softmax: gather) | gather (all-gather of the
            texts, reduce-scatter of their gradients; DisCo-CLIP) | ring (the texts travel; least memory) | nodes
            (gather within a node, a ring between nodes) | auto (in one node ring; across nodes gather where that is
            small, else nodes). In a group of one they are the same.
        backend: dense (a block's scores at once) | tiled (torch, any device) | triton (CUDA; the dot product, without
            keys, one caption an image) | auto.
        group: the process group, or a mesh of one dimension (FSDP2's, or the data dimension beside tensor parallel's);
            None: the default group, if there is one. Each rank passes its own rows, equally many.
        keys: int64, (n,) of the images, or with hard negatives that and (m,) of the texts. Samples of equal keys (the
            same caption or picture), on any rank, are no negatives of each other. An own text's key is its image's.
        shared: what pairs of equal keys are that do not belong together: left out of the sums (mask; one caption an
            image), positives too (positive), or negatives as without keys (ignore).
        captions: texts of each image, all of them its positives.
        check: refuse what is not finite, a scale that is not positive, and ranks whose inputs do not fit each other.
            That waits for the device and takes a small all-gather; a training loop needs it in its first step.
        machine: what a dry run computes on instead of this machine.
        options: those of the above that LossOptions has.

    Returns:
        The mean over all N images, the same on every rank: 0-d, float32 (float64 for float64 features). Gradients are
        local: their sum over the ranks is the gradient of the mean. A feature row gets all of its own; logit_scale,
        logit_bias and a module's parameters get this rank's part.

    Features of two types are both cast to the narrower one (float16 with bfloat16: to float32), under autocast float32
    features to autocast's type, as matmul would. Sums are float32 at least; products of float32 are in IEEE precision.
    Every gradient has its input's type.

    Raises:
        ValueError: where inputs do not fit each other or the options; with `check` on all ranks, before features are
            exchanged.
    """
    choices = Choices(objective, exchange, backend, **options)
    comm, module, machine = choices.comm, choices.module, choices.machine or Machine()
    with choices.refusals(image_features.device):
        choices.refuse_mistakes(keys is not None)
        of = OBJECTIVES[objective]
        inputs = checked_inputs(
            image_features, text_features, logit_scale, logit_bias, None if choices.shared == "ignore" else keys,
            captions=choices.captions, has_module=module is not None, check=choices.check,
        )  # fmt: skip
        backend = _chosen_backend(backend, of, module, inputs, machine)
    choices.agree(inputs, image_features.device)
    inputs = inputs.with_shares(comm, positive=choices.shared == "positive" or choices.captions > 1)
    if backend == "triton":
        inputs = inputs.padded(WIDTH_STEP)
    is_replicated = choices.exchange == "replicated" and module is None and len(inputs.rows) == len(inputs.cols)
    if comm is not None and is_replicated:
        inputs, comm = inputs.on_every_rank(comm), None
    over_rows, over_cols = (weight is not None for weight in of.weights)
    if over_cols and not over_rows:
        inputs = inputs.positives_only()  # a hard negative is in no text's softmax
    similarity = Dot() if module is None else Deep(module, image_features.device)
    transfers = _exchange(choices.exchange, comm, inputs, machine)
    values = []
    for part, sides in _parts(of, inputs, choices):
        blocks = _backend(backend, part, sides, similarity, machine)
        call = LossCall(transfers, blocks, similarity, part, sides, choices.check, torch.is_grad_enabled())
        tensors = (sides.rows.features, sides.cols.features, sides.scale, sides.bias, *similarity.parameters)
        values.append(cast(Tensor, ContrastiveLoss.apply(call, *tensors)))
    return values[0] if len(values) == 1 else (values[0] + values[1]) / 2


def _parts(objective: Objective, inputs: Inputs, choices: Choices) -> list[tuple[Objective, Inputs]]:
    """The losses whose mean is the loss. OpenCLIP's local loss is one-sided in both directions: a rank's images against
    all texts, and its texts against all images."""
    is_paired = len(inputs.rows) == len(inputs.cols) and choices.module is None
    if choices.exchange != "local" or objective is not OBJECTIVES["softmax"] or not is_paired:
        return [(objective, inputs)]
    one_sided = replace(objective, weights=(1.0, None))
    return [(one_sided, inputs), (one_sided, replace(inputs, rows=inputs.cols, cols=inputs.rows))]


def _backend(name: str, objective: Objective, inputs: Inputs, similarity: Similarity, machine: Machine) -> Backend:
    if name == "triton":
        return objective.kernels()(machine, machine.tiles(inputs.scale.device, inputs.dtype))
    return TorchBackend(objective.tile(), similarity, machine, dense=name == "dense")


def _exchange(name: str, comm: Communicator | None, inputs: Inputs, machine: Machine) -> Single:
    if comm is None:
        return Single()
    nodes = machine.nodes(comm.size)
    if name == "auto":
        texts, width = inputs.cols.features.shape
        name = exchange_of(nodes, comm.size * texts, width, inputs.dtype.itemsize)
        _log_once(f"loss exchange: {name}, of {comm.size} ranks over {nodes} nodes")
    if name == "nodes" and nodes > 1:
        return Ring(comm, nodes)
    return Ring(comm) if name == "ring" else Gather(comm)


def _chosen_backend(name: str, objective: Objective, module: nn.Module | None, inputs: Inputs, machine: Machine) -> str:
    """The backend's name, with "auto" resolved and logged once. Raises ValueError where Triton is impossible."""
    device = inputs.scale.device
    obstacle = None
    on_gpu = machine.is_gpu(device)
    if not objective.has_kernels:
        obstacle = "the objective has no kernels"
    elif module is not None:
        obstacle = "the similarity is not the dot product"
    elif inputs.dtype == torch.float64:
        obstacle = "the features are float64"
    elif inputs.rows.keys is not None or inputs.captions > 1:
        obstacle = "the kernels take neither keys nor several captions"
    elif not on_gpu and (name == "auto" or os.environ.get("TRITON_INTERPRET") != "1"):
        obstacle = f"the features are on {device.type}"
    if name == "triton" and obstacle:
        raise ValueError(f"backend=triton cannot be had, since {obstacle}; use backend=tiled")
    if name != "auto":
        return name
    if obstacle:
        _log_once(f"loss backend: tiled, since {obstacle}")
        return "tiled"
    _log_once(f"loss backend: triton, for {inputs.dtype}")
    return "triton"


@cache
def _log_once(message: str) -> None:
    _log.info(message)
