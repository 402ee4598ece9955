"""The public function: checks what it is given, chooses the parts, and calls the loss.

Letters: n rows (images) and m columns (texts) of this rank, D feature width, T tokens of a sample.
"""

import logging
import os
from dataclasses import dataclass
from functools import cache
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from clipscale.loss.exchange import Communicator, Gather, Replicated, Ring, Single, agree
from clipscale.loss.function import Backend, ContrastiveLoss, Loss
from clipscale.loss.inputs import FACTS, Inputs, checked_inputs
from clipscale.loss.objective import Objective, Sigmoid, Softmax
from clipscale.loss.similarity import Deep, Dot, Late, Similarity
from clipscale.loss.tiled import TorchBackend

OBJECTIVES = ("softmax", "softmax_image", "softmax_text", "sigmoid")
SIMILARITIES = ("dot", "late")
EXCHANGES = ("auto", "none", "replicated", "local", "gather", "ring")
BACKENDS = ("auto", "dense", "tiled", "triton")
PRECISIONS = ("ieee", "tf32")
# N times the weights of the image-to-text and the text-to-image direction
WEIGHTS: dict[str, tuple[float | None, float | None]] = {
    "softmax": (0.5, 0.5),
    "softmax_image": (1.0, None),
    "softmax_text": (None, 1.0),
    "sigmoid": (None, None),
}

_log = logging.getLogger(__name__)


@dataclass
class LossConfig:
    """Which contrastive loss, and how it is computed; the fields are keyword arguments of `contrastive_loss`."""

    objective: str = "softmax"
    """`softmax` (CLIP), `softmax_image` or `softmax_text` (one direction), `sigmoid` (SigLIP)."""
    similarity: str = "dot"
    """`dot`, or `late` interaction over tokens."""
    exchange: str = "auto"
    """How ranks meet: `none`, `replicated`, `local`, `gather`, `ring`; `auto`: the ring where there are several."""
    backend: str = "auto"
    """`dense` blocks of scores, `tiled` torch, `triton` kernels; `auto`: the best for the device."""
    label_smoothing: float = 0.0
    """Share of the target spread evenly over all candidates."""
    ranks_per_node: int | None = None
    """Makes the ring a two-level one: inside a node, then between nodes."""
    fp32_precision: str = "ieee"
    """`ieee` or `tf32`, for matmuls of float32 features on CUDA."""
    tile: int | None = None
    """Side of the torch backend's tiles; None: chosen."""


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
    group: dist.ProcessGroup | None = None,
    ranks_per_node: int | None = None,
    label_smoothing: float = 0.0,
    image_keys: Tensor | None = None,
    text_keys: Tensor | None = None,
    image_mask: Tensor | None = None,
    text_mask: Tensor | None = None,
    fp32_precision: str = "ieee",
    tile: int | None = None,
    check: bool = True,
) -> Tensor:
    """The contrastive loss of a batch of image-text pairs spread over the ranks of a group, without a batch x batch matrix.

    With x_ij = logit_scale * similarity(image i, text j) over the N rows of all ranks and, for the positives, text i belonging to image i:

        softmax         the mean over i of  (LSE_j x_ij + LSE_j x_ji) / 2 - x_ii     (CLIP, arXiv 2103.00020)
        softmax_image   the mean over i of   LSE_j x_ij - x_ii                       (softmax_text: LSE_j x_ji)
        sigmoid         the sum over all i, j of softplus(-+(x_ij + logit_bias)) / N, - at the positives    (SigLIP, arXiv 2303.15343)

    Args:
        image_features: (n, D), rows usually of unit length; (n, T, D) for similarity="late"; anything a module takes.
        text_features: (m, D), the first n being the images' own texts; texts beyond those (m > n) are hard negatives: columns only.
        logit_scale: the multiplier itself, not its logarithm; positive; a number or a tensor of one element.
        logit_bias: for the sigmoid; the softmax does not depend on it.
        objective: softmax | softmax_image | softmax_text | sigmoid.
        similarity: "dot"; "late" (mean over tokens of the best match, FILIP, arXiv 2111.07783); or a module that maps (image features, text features)
            to (n, m) pair by pair, whose parameters then get their gradient too. A module sees one tile at a time, twice.
        exchange: none (this process alone) | replicated (CLIP: gather both sides, the whole loss on every rank) | local (OpenCLIP: two one-sided losses of
            the own rows) | gather (all-gather of the texts, reduce-scatter of their gradients; DisCo-CLIP) | ring (texts travel; the least memory) | auto
            (ring under a group of several ranks). In a group of one all are the same.
        backend: dense (a block of scores at once) | tiled (torch, any device) | triton (CUDA, dot product) | auto.
        group: the process group; None: the default group if there is one. Each rank passes its own rows, equally many.
        ranks_per_node: makes the ring a two-level one, first inside a node, then between nodes.
        label_smoothing: share of the target spread evenly over all candidates, hard negatives included, as in torch's cross_entropy.
        image_keys, text_keys: (n,) and (m,) int64. Pairs that are no positives but have equal keys (duplicate captions) are left out.
            Without text_keys the texts have their images' keys.
        image_mask, text_mask: (n, T) bool, for late interaction: which tokens count.
        fp32_precision: ieee | tf32, for matmuls of float32 features on CUDA.
        tile: side of the torch backend's tiles.
        check: raise where the loss is not finite or the scale not positive. Reads the result, hence waits for the device.

    Returns:
        The mean over all N rows, the same on every rank: 0-d, float32 (float64 for float64 features). Gradients are shares whose sum over the ranks is the
        gradient of the mean: a feature row gets all of its own, logit_scale, logit_bias and a module's parameters get this rank's part.

    Features of two precisions are both cast to the lower one (float16 with bfloat16: to float32); under autocast float32 features are cast to
    autocast's type, as matmul would. Sums are float32 at least, and every gradient comes back in its input's own type.

    Raises:
        ValueError: for inputs that do not fit each other or the options, on all ranks of the group alike, before anything is exchanged; and, with
            `check`, for features, scale or bias that are not finite.
    """
    comm = None if exchange == "none" else _communicator(group)
    names = (*FACTS, "objective", "exchange")
    try:
        _check_options(objective, similarity, exchange, backend, label_smoothing, fp32_precision, tile)
        inputs = checked_inputs(
            image_features, text_features, logit_scale, logit_bias, image_mask, text_mask, image_keys, text_keys, similarity
        )
        if label_smoothing and (image_keys is not None or objective == "sigmoid"):
            raise ValueError(f"label_smoothing={label_smoothing} is for the softmax, and counts every text: none may be left out by keys")
        backend = _chosen_backend(backend, similarity, inputs)
        _exchange(exchange, comm, ranks_per_node)
    except ValueError as error:
        if comm is not None:
            agree(comm, names, [0] * len(names), error, image_features.device)
        raise
    if comm is not None:
        agree(comm, names, [*inputs.facts(), OBJECTIVES.index(objective), EXCHANGES.index(exchange)], None, image_features.device)

    # One loss of rows against columns; OpenCLIP's local loss is two, the second with the roles exchanged.
    images, texts = ({"mask": image_mask, "keys": inputs.image_keys}, {"mask": text_mask, "keys": inputs.text_keys})
    similar = _similarity(similarity, image_features.device)
    forth = (image_features, images, text_features, texts, similar)
    terms = [(1.0, *forth, WEIGHTS[objective])]
    if exchange == "local" and objective != "sigmoid":
        n = len(image_features)  # as rows, the texts are without the hard negatives
        own_texts = {name: None if x is None else x[:n] for name, x in texts.items()}
        back = (text_features[:n], own_texts, image_features, images, similar.swapped())
        shares = {"softmax": (0.5, 0.5), "softmax_image": (1.0, 0.0), "softmax_text": (0.0, 1.0)}[objective]
        terms = [(share, *term, (1.0, None)) for share, term in zip(shares, (forth, back)) if share]

    total: Tensor | float = 0.0
    for share, rows, row_extras, cols, col_extras, similarity_, weights in terms:
        meeting = _exchange(exchange, comm, ranks_per_node)
        wanted: Objective = Sigmoid()
        if objective != "sigmoid":
            wanted = Softmax(label_smoothing, meeting.size * len(rows), meeting.size * len(cols))
        loss = Loss(
            exchange=meeting,
            backend=_backend(backend, wanted, similarity_, tile, fp32_precision, keep=not isinstance(meeting, Ring)),
            similarity=similarity_,
            weights=weights,
            operands=inputs.operands,
            row_extras=row_extras,
            col_extras=col_extras,
            fp32_precision=fp32_precision,
            check=check,
        )
        value = ContrastiveLoss.apply(loss, rows, cols, inputs.scale, inputs.bias, *similarity_.parameters)
        total = total + share * value
    return cast(Tensor, total)


def _check_options(
    objective: str, similarity: object, exchange: str, backend: str, label_smoothing: float, fp32_precision: str, tile: int | None
) -> None:
    choices = {"objective": (objective, OBJECTIVES), "exchange": (exchange, EXCHANGES), "backend": (backend, BACKENDS)}
    choices["fp32_precision"] = (fp32_precision, PRECISIONS)
    if not isinstance(similarity, nn.Module):
        choices["similarity"] = (str(similarity), SIMILARITIES)
    for name, (value, allowed) in choices.items():
        if value not in allowed:
            raise ValueError(f"{name}={value!r} is not one of {', '.join(allowed)}")
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing={label_smoothing} must lie in [0, 1)")
    if tile is not None and tile < 1:
        raise ValueError(f"tile={tile} must be at least 1")


def _communicator(group: dist.ProcessGroup | None) -> Communicator | None:
    """The group's transfers; None where there is only this process."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    if dist.get_rank(group) < 0:
        raise ValueError("contrastive_loss was given a group that this rank does not belong to")
    return Communicator(group) if dist.get_world_size(group) > 1 else None


def _exchange(name: str, comm: Communicator | None, ranks_per_node: int | None) -> Single:
    if comm is None:
        return Single()
    if name == "replicated":
        return Replicated(comm)
    return Ring(comm, ranks_per_node) if name in ("ring", "auto") else Gather(comm)


def _similarity(similarity: str | nn.Module, device: torch.device) -> Similarity:
    if isinstance(similarity, nn.Module):
        return Deep(similarity, device)
    return Dot() if similarity == "dot" else Late(device)


def _chosen_backend(name: str, similarity: str | nn.Module, inputs: Inputs) -> str:
    """The backend's name, with "auto" resolved; logged once. Raises ValueError where Triton is asked for and cannot be."""
    device, dtype = inputs.image_features.device, inputs.operands
    obstacle = None
    if similarity != "dot":
        obstacle = "the similarity is not the dot product"
    elif dtype == torch.float64:
        obstacle = "the features are float64"
    elif device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        obstacle = f"the features are on {device.type}"
    if name == "triton" and obstacle:
        raise ValueError(f"backend=triton is not possible here: {obstacle}; use backend=tiled")
    if name != "auto":
        return name
    if obstacle is None and device.type != "cuda":
        obstacle = "the features are on the CPU and Triton would only be interpreted"
    chosen = "tiled" if obstacle else "triton"
    _log_once(f"loss backend: {chosen} ({obstacle or f'dot product of {dtype} features on {torch.cuda.get_device_name(device)}'})")
    return chosen


@cache
def _log_once(message: str) -> None:
    _log.info(message)


def _backend(
    name: str, objective: Objective, similarity: Similarity, tile: int | None, fp32_precision: str, keep: bool
) -> Backend:
    if name == "triton":
        from clipscale.loss.fused import TritonBackend  # the only import of Triton, and only where it is used

        return TritonBackend(objective, fp32_precision)
    return TorchBackend(objective, similarity, 0, keep) if name == "dense" else TorchBackend(objective, similarity, tile)
