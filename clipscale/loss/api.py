"""The public function: checks the call, chooses its parts, and computes the loss.

Letters: n rows (images) and m columns (texts) of this rank, D feature width, T tokens of a sample.
"""

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from clipscale.config.sections import BACKENDS, EXCHANGES, OBJECTIVES, SHARED
from clipscale.loss.autograd import Backend, ContrastiveLoss, LossCall
from clipscale.loss.exchange import Communicator, Gather, Replicated, Ring, Single
from clipscale.loss.inputs import FACTS, Inputs, Pair, checked_inputs
from clipscale.loss.machine import Machine
from clipscale.loss.objective import Distillation, Objective, Sigmoid, Softmax
from clipscale.loss.shared import Corrected, Masked, prepared
from clipscale.loss.similarity import Deep, Dot, Similarity
from clipscale.loss.torch_backend import TorchBackend

Teacher = tuple[Tensor, Tensor, float]
"""Features of images and of texts, and the logit scale."""
Weights = tuple[float | None, float | None]  # N times those of the image-to-text and the text-to-image direction
WEIGHTS: dict[str, Weights] = {
    "softmax": (0.5, 0.5),
    "softmax_image": (1.0, None),
    "softmax_text": (None, 1.0),
    "sigmoid": (None, None),
}

_log = logging.getLogger(__name__)


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
    similarity: str | nn.Module = "dot",
    exchange: str = "auto",
    backend: str = "auto",
    group: dist.ProcessGroup | DeviceMesh | None = None,
    keys: Tensor | Pair | None = None,
    shared: str = "mask",
    captions: int = 1,
    teachers: Sequence[Teacher] = (),
    check: bool = True,
    machine: Machine | None = None,
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
        similarity: "dot", or a module from image features and text features to similarities (n, m), pair by pair, which
            is called with one tile at a time, twice, and whose parameters get their gradient too.
        exchange: none (this process by itself) | replicated (CLIP: gather both sides, the whole loss on every rank) |
            local (OpenCLIP: two one-sided losses of the own rows; with several captions: gather) | gather (all-gather
            of the texts, reduce-scatter of their gradients; DisCo-CLIP) | ring (the texts travel; least memory) | auto
            (ring). In a group of one they are the same.
        backend: dense (a block's scores at once) | tiled (torch, any device) | triton (CUDA, dot product) | auto.
        group: the process group, or a mesh of one dimension (FSDP2's, or the data dimension beside tensor parallel's);
            None: the default group, if there is one. Each rank passes its own rows, equally many.
        keys: int64, (n,) of the images, or with hard negatives that and (m,) of the texts. Samples of equal keys (the
            same caption or picture), on any rank, are no negatives of each other. An own text's key is its image's.
        shared: what pairs of equal keys are that do not belong together: left out of the sums (mask; one caption an
            image), positives too (positive; dot product), or negatives as without keys (ignore).
        captions: texts of each image, all of them its positives (more than one: dot product).
        teachers: see `distillation_loss`: their probabilities, instead of the pairs, are what the softmax should be.
        check: refuse what is not finite, a scale that is not positive, and ranks whose inputs do not fit each other.
            That waits for the device and takes a small all-gather; a training loop needs it in its first step.
        machine: what a dry run computes on instead of this machine.

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
    machine = machine or Machine()
    kind = "module" if isinstance(similarity, nn.Module) else similarity
    comm = None if exchange == "none" else Communicator.of(group)
    positive = shared == "positive" or captions > 1
    try:
        _check_choices(objective, similarity, exchange, backend, shared)
        if positive and kind != "dot":
            raise ValueError("shared=positive and several captions take similarity=dot")
        if shared == "mask" and keys is not None and captions > 1:
            raise ValueError("shared=mask takes one caption an image; with several, shared=positive")
        inputs = checked_inputs(
            image_features, text_features, logit_scale, 0.0 if logit_bias is None else logit_bias, kind,
            keys=None if shared == "ignore" else keys, captions=captions, check=check,
        )  # fmt: skip
        if teachers:
            inputs = replace(inputs, teachers=_side_by_side(teachers, inputs, objective, kind))
        backend = _chosen_backend(backend, kind, inputs, machine)
    except ValueError as error:
        if comm is not None and check:
            comm.agree([0] * len(FACTS), FACTS, error, image_features.device)
        raise
    if comm is not None and check:
        comm.agree(inputs.facts(objective, exchange, shared), FACTS, None, image_features.device)
    inputs = prepared(inputs, comm)
    if objective == "softmax_text":
        inputs = inputs.positives_only()  # a hard negative is in no text's softmax
    pairs = _similarity(similarity, image_features.device)
    terms: list[tuple[Inputs, Similarity, Weights]] = [(inputs, pairs, WEIGHTS[objective])]
    if exchange == "local" and objective != "sigmoid" and captions == 1:
        # OpenCLIP's local loss: one-sided in both directions, the second time with the roles exchanged
        both = (inputs, pairs), (inputs.swapped(), pairs.swapped())
        wanted = (w is not None for w in WEIGHTS[objective])
        terms = [(*sides, WEIGHTS["softmax_image"]) for sides, is_wanted in zip(both, wanted) if is_wanted]
    ranks, values = _exchange(exchange, comm), []
    for given, pairs, weights in terms:
        widths = [(a.shape[1], float(t)) for a, _, t in teachers]
        terms_of = Distillation(widths) if teachers else Sigmoid() if objective == "sigmoid" else Softmax()
        blocks = _backend(backend, terms_of, pairs, machine, given.keys[0] is not None, positive)
        call = LossCall(ranks, blocks, pairs, weights, given, check, torch.is_grad_enabled())
        numbers = (given.scale, given.bias, *pairs.parameters)
        values.append(cast(Tensor, ContrastiveLoss.apply(call, given.rows, given.cols, *numbers)))
    return values[0] if len(values) == 1 else (values[0] + values[1]) / 2


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
    student, value = (image_features, text_features, logit_scale), torch.zeros((), device=image_features.device)
    if weights[0]:
        value = weights[0] * contrastive_loss(*student, **options)
    if weights[1]:
        kept = {x: options[x] for x in ("exchange", "group", "check", "machine") if x in options}
        backend = "dense" if options.get("backend") == "dense" else "tiled"
        value = value + weights[1] * contrastive_loss(*student, teachers=teachers, backend=backend, **kept)
    return value


def _check_choices(objective: str, similarity: str | nn.Module, exchange: str, backend: str, shared: str) -> None:
    """Raise ValueError for a word that is no choice of its argument."""
    for name, value, choices in (
        ("objective", objective, OBJECTIVES),
        ("similarity", similarity, ("dot",)),
        ("exchange", exchange, EXCHANGES),
        ("backend", backend, BACKENDS),
        ("shared", shared, SHARED),
    ):
        if isinstance(value, str) and value not in choices:
            raise ValueError(f"{name}={value!r} is not one of {', '.join(choices)}")


def _side_by_side(teachers: Sequence[Teacher], inputs: Inputs, objective: str, similarity: str) -> Pair:
    """The teachers' images and texts, in one type. Raises ValueError where they do not fit."""
    if objective == "sigmoid" or similarity != "dot" or inputs.keys[0] is not None or inputs.captions > 1:
        raise ValueError("teachers take a softmax of dot products, without keys and with one caption an image")
    n, m = len(inputs.rows), len(inputs.cols)
    for a, b, _ in teachers:
        if a.shape != (n, b.shape[-1]) or b.shape != (m, a.shape[-1]) or a.device != inputs.rows.device:
            raise ValueError(f"a teacher's features {tuple(a.shape)} and {tuple(b.shape)} for {n} images and {m} texts")
    a, b = (torch.cat(x, 1) for x in zip(*((a, b) for a, b, _ in teachers)))
    wide = torch.float64 if inputs.dtype == torch.float64 else torch.promote_types(a.dtype, b.dtype)
    return a.to(wide), b.to(wide)


def _similarity(similarity: str | nn.Module, device: torch.device) -> Similarity:
    return Deep(similarity, device) if isinstance(similarity, nn.Module) else Dot()


def _backend(
    name: str, objective: Objective, similarity: Similarity, machine: Machine, has_keys: bool, positive: bool
) -> Backend:
    """The backend; with keys, for pairs that are positives or else left out."""
    plain: Backend = TorchBackend(objective, similarity, machine, dense=name == "dense")
    if name == "triton":
        from clipscale.loss.triton.backend import triton_backend  # Triton is imported where it is used

        plain = triton_backend(objective, machine)
    if not has_keys:
        return plain
    if positive or (plain.sums_pairs and isinstance(similarity, Dot)):
        return Corrected(plain, positive)
    exact = TorchBackend(objective, similarity, machine, dense=name == "dense", leaves_out=True)
    return Masked(plain, exact) if isinstance(similarity, Dot) else exact


def _exchange(name: str, comm: Communicator | None) -> Single:
    if comm is None:
        return Single()
    if name == "replicated":
        return Replicated(comm)
    return Ring(comm) if name in ("ring", "auto") else Gather(comm)


def _chosen_backend(name: str, similarity: str, inputs: Inputs, machine: Machine) -> str:
    """The backend's name, with "auto" resolved and logged once. Raises ValueError where Triton is impossible."""
    device, obstacle = inputs.rows.device, None
    on_gpu = machine.is_gpu(device)
    if inputs.teachers[0] is not None:
        obstacle = "there are teachers"
    elif similarity != "dot":
        obstacle = "the similarity is not the dot product"
    elif inputs.dtype == torch.float64:
        obstacle = "the features are float64"
    elif not on_gpu and (name == "auto" or os.environ.get("TRITON_INTERPRET") != "1"):
        obstacle = f"the features are on {device.type}"
    if name == "triton" and obstacle:
        raise ValueError(f"backend=triton cannot be had, since {obstacle}; use backend=tiled")
    if name != "auto":
        return name
    _log_once(f"loss backend: tiled, since {obstacle}" if obstacle else f"loss backend: triton, for {inputs.dtype}")
    return "tiled" if obstacle else "triton"


@cache
def _log_once(message: str) -> None:
    _log.info(message)
