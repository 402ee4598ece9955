"""The public function: checks the call, chooses its parts, and computes the loss.

Letters: n rows (images) and m columns (texts) of this rank, D feature width.
"""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Unpack, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from clipscale.loss.autograd import Backend, ContrastiveLoss, LossCall
from clipscale.loss.distillation import Distillation
from clipscale.loss.exchange import Communicator, Gather, Replicated, Ring, Single
from clipscale.loss.inputs import FACTS, Arguments, Inputs, LossOptions, Pair, Teacher, checked_inputs
from clipscale.loss.keys import with_shares
from clipscale.loss.machine import Machine
from clipscale.loss.objective import Objective
from clipscale.loss.objectives import BACKENDS, EXCHANGES, OBJECTIVES, SHARED, exchange_of
from clipscale.loss.similarity import Deep, Dot, Similarity
from clipscale.loss.torch_backend import TorchBackend
from clipscale.loss.triton.tuning import WIDTH_STEP

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Choices:
    """How a call is computed: the parts it chooses. Its fields are keyword arguments of `contrastive_loss`."""

    objective: str = "softmax"
    exchange: str = "auto"
    backend: str = "auto"
    group: dist.ProcessGroup | DeviceMesh | None = None
    similarity: nn.Module | str | None = None
    shared: str = "mask"
    captions: int = 1
    check: bool = True
    machine: Machine | None = None

    def refuse_mistakes(self, has_keys: bool) -> None:
        """Raise ValueError for a word that is no choice of its argument, and for what does not go together."""
        for name, value, choices in (
            ("objective", self.objective, tuple(OBJECTIVES)),
            ("exchange", self.exchange, EXCHANGES),
            ("backend", self.backend, BACKENDS),
            ("shared", self.shared, SHARED),
        ):
            if value not in choices:
                raise ValueError(f"{name}={value!r} is not one of {', '.join(choices)}")
        if isinstance(self.similarity, str) and self.similarity != "dot":
            raise ValueError(f"similarity={self.similarity!r} is no module; leave it out for the dot product")
        if self.shared == "mask" and has_keys and self.captions > 1:
            raise ValueError("shared=mask takes one caption an image; with several, shared=positive")


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
        exchange: none (this process by itself) | replicated (CLIP: gather both sides, the whole loss on every rank) |
            local (OpenCLIP: two one-sided losses of the own rows; of modules or several captions: gather) | gather
            (all-gather of the texts, reduce-scatter of their gradients; DisCo-CLIP) | ring (the texts travel; least
            memory) | nodes (gather within a node, a ring between nodes) | auto (in one node ring; across nodes gather
            where that is small, else nodes). In a group of one they are the same.
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
    arguments = Arguments(image_features, text_features, logit_scale, logit_bias, keys)
    return _loss(arguments, Choices(objective, exchange, backend, **options))


def distillation_loss(
    image_features: Tensor, text_features: Tensor, logit_scale: Tensor | float, teachers: Sequence[Teacher],
    weights: tuple[float, float] = (0.0, 1.0), **options: Any,
) -> Tensor:  # fmt: skip
    """weights[0] times `contrastive_loss` (with all its `options`) and weights[1] times the cross-entropy to teachers,

        1/2 [-mean_i sum_j P_ij log softmax_j x_ij - mean_j sum_i Q_ij log softmax_i x_ij]

    where P is the mean over teachers of softmax_j(t <a_i, b_j>) and Q that of softmax_i (MobileCLIP, arXiv 2311.17049).
    That part is computed in torch's tiles. `teachers`: (a (n, D_k), b (m, D_k), t) each, features of the same images
    and texts, usually of unit length, and the teacher's own logit scale. They get no gradient.
    """
    value = torch.zeros((), device=image_features.device)
    if weights[0]:
        value = weights[0] * contrastive_loss(image_features, text_features, logit_scale, **options)
    if weights[1]:
        arguments = Arguments(image_features, text_features, logit_scale, teachers=teachers)
        kept = {name: options[name] for name in ("exchange", "group", "check", "machine") if name in options}
        backend = "dense" if options.get("backend") == "dense" else "tiled"
        value = value + weights[1] * _loss(arguments, Choices(backend=backend, **kept))
    return value


def _loss(arguments: Arguments, choices: Choices) -> Tensor:
    comm = None if choices.exchange == "none" else Communicator.of(choices.group)
    device = arguments.image_features.device
    machine = choices.machine or Machine()
    try:
        choices.refuse_mistakes(arguments.keys is not None)
        module = choices.similarity if isinstance(choices.similarity, nn.Module) else None
        inputs = checked_inputs(
            arguments if choices.shared != "ignore" else replace(arguments, keys=None),
            choices.captions, has_module=module is not None, check=choices.check,
        )  # fmt: skip
        objective = OBJECTIVES[choices.objective]
        if arguments.teachers:
            widths = tuple((a.shape[1], float(t)) for a, _, t in arguments.teachers)
            objective = Distillation((0.5, 0.5), log_sum_exps=1 + len(widths), teachers=widths)
        backend = _chosen_backend(choices.backend, objective, module, inputs, machine)
    except ValueError:
        if comm is not None and choices.check:
            comm.agree(FACTS, None, device)
        raise
    if comm is not None and choices.check:
        number = list(OBJECTIVES).index(choices.objective)
        comm.agree(FACTS, inputs.facts(number, choices.exchange, choices.shared), device)
    inputs = with_shares(inputs, comm, positive=choices.shared == "positive" or choices.captions > 1)
    if backend == "triton":
        inputs = inputs.padded(WIDTH_STEP)
    exchange = _exchange(choices.exchange, comm, inputs, machine)
    similarity = Dot() if module is None else Deep(module, device)
    # OpenCLIP's local loss of a dot product is one-sided in both directions.
    in_two = choices.exchange == "local" and module is None and inputs.captions == 1
    values = []
    for part, sides in _parts(objective, inputs, in_two):
        blocks = _backend(backend, part, sides, similarity, machine)
        call = LossCall(exchange, blocks, similarity, part, sides, choices.check, torch.is_grad_enabled())
        numbers = (sides.scale, sides.bias, *similarity.parameters)
        values.append(cast(Tensor, ContrastiveLoss.apply(call, sides.rows, sides.cols, *numbers)))
    return values[0] if len(values) == 1 else (values[0] + values[1]) / 2


def _parts(objective: Objective, inputs: Inputs, in_two: bool) -> list[tuple[Objective, Inputs]]:
    """The losses whose mean is the loss. `in_two`: one for each direction, with the roles exchanged."""
    over_rows, over_cols = (weight is not None for weight in objective.weights)
    if over_cols and not over_rows:
        inputs = inputs.positives_only()  # a hard negative is in no text's softmax
    if not in_two or not (over_rows or over_cols):
        return [(objective, inputs)]
    one_sided = replace(objective, weights=(1.0, None))
    parts = [(one_sided, inputs)] if over_rows else []
    return parts + [(one_sided, inputs.swapped())] if over_cols else parts


def _backend(name: str, objective: Objective, inputs: Inputs, similarity: Similarity, machine: Machine) -> Backend:
    if name == "triton":
        return objective.kernels()(machine, machine.tiles(inputs.rows.device, inputs.dtype))
    return TorchBackend(objective.tile(), similarity, machine, dense=name == "dense")


def _exchange(name: str, comm: Communicator | None, inputs: Inputs, machine: Machine) -> Single:
    if comm is None:
        return Single()
    nodes = machine.nodes(comm.size)
    if name == "auto":
        texts, width = inputs.cols.shape
        name = exchange_of(nodes, comm.size * texts, width, inputs.dtype.itemsize)
        _log_once(f"loss exchange: {name}, of {comm.size} ranks over {nodes} nodes")
    if name == "replicated":
        return Replicated(comm)
    if name == "nodes" and nodes > 1:
        return Ring(comm, nodes)
    return Ring(comm) if name == "ring" else Gather(comm)


def _chosen_backend(name: str, objective: Objective, module: nn.Module | None, inputs: Inputs, machine: Machine) -> str:
    """The backend's name, with "auto" resolved and logged once. Raises ValueError where Triton is impossible."""
    device = inputs.rows.device
    obstacle = None
    on_gpu = machine.is_gpu(device)
    if not objective.has_kernels:
        obstacle = "the objective has no kernels"
    elif module is not None:
        obstacle = "the similarity is not the dot product"
    elif inputs.dtype == torch.float64:
        obstacle = "the features are float64"
    elif "keys" in inputs.beside[0] or inputs.captions > 1:
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
