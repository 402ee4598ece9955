"""The public function: checks the call, chooses its parts, and computes the loss.

Letters: n rows (images) and m columns (texts) of this rank, D feature width, T tokens of a sample.
"""

import logging
import math
import os
from functools import cache
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from clipscale.config.sections import EXCHANGES, OBJECTIVES, LossConfig
from clipscale.config.setting import settings_of
from clipscale.loss.autograd import Backend, ContrastiveLoss, LossCall
from clipscale.loss.exchange import Communicator, Gather, Replicated, Ring, Single, agree
from clipscale.loss.inputs import FACTS, Inputs, Pair, checked_inputs
from clipscale.loss.kept import Kept, kept_bytes
from clipscale.loss.machine import Machine
from clipscale.loss.objective import Objective, Sigmoid, Softmax
from clipscale.loss.similarity import Deep, Dot, Late, Similarity
from clipscale.loss.torch_backend import TorchBackend
from clipscale.loss.triton.tuning import PASSES, Tuning, arithmetic_of

Weights = tuple[float | None, float | None]
# N times the weights of the image-to-text and the text-to-image direction
WEIGHTS: dict[str, Weights] = {
    "softmax": (0.5, 0.5),
    "softmax_image": (1.0, None),
    "softmax_text": (None, 1.0),
    "sigmoid": (None, None),
}
NAMES = (*FACTS, "objective", "exchange")  # what the ranks compare
SETTINGS = settings_of(LossConfig)
KERNELS = ("triton", "gluon")  # backends that need a GPU

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
    objective: str = LossConfig.objective,
    similarity: str | nn.Module = LossConfig.similarity,
    exchange: str = LossConfig.exchange,
    backend: str = LossConfig.backend,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    ranks_per_node: int | None = LossConfig.ranks_per_node,
    label_smoothing: float = LossConfig.label_smoothing,
    image_keys: Tensor | None = None,
    text_keys: Tensor | None = None,
    image_mask: Tensor | None = None,
    text_mask: Tensor | None = None,
    fp32_precision: str = LossConfig.fp32_precision,
    tile: int | None = LossConfig.tile,
    keep: str = LossConfig.keep,
    check: bool = True,
) -> Tensor:
    """The contrastive loss of a batch of image-text pairs spread over the ranks of a group, without a batch x batch matrix.

    With x_ij = logit_scale * similarity(image i, text j) over the N images of all ranks, text i being the one that belongs to image i:

        softmax        mean_i of (LSE_j x_ij + LSE_j x_ji) / 2 - x_ii     (CLIP, arXiv 2103.00020)
        softmax_image  mean_i of LSE_j x_ij - x_ii                        (softmax_text: LSE_j x_ji)
        sigmoid        sum_ij softplus(-z_ij (x_ij + logit_bias)) / N,    z = 1 at the positives, else -1 (SigLIP, arXiv 2303.15343)

    Args:
        image_features: (n, D), rows usually of unit length; (n, T, D) for late interaction; whatever a module takes.
        text_features: (m, D), the first n being the images' own; texts beyond those are hard negatives: columns only.
        logit_scale: the multiplier itself, not its logarithm; positive; a number or a tensor of one element.
        logit_bias: for the sigmoid; the softmax does not depend on it.
        objective: softmax | softmax_image | softmax_text | sigmoid.
        similarity: "dot"; "late": the mean over tokens of the best match (FILIP, arXiv 2111.07783), which differs between the directions
            (the sigmoid takes their mean); or a module from image features and text features to similarities (n, m), pair by pair,
            which is called with one tile at a time, twice, and whose parameters get their gradient too.
        exchange: none (this process by itself) | replicated (CLIP: gather both sides, the whole loss on every rank) | local (OpenCLIP: two
            one-sided losses of the own rows) | gather (all-gather of the texts, reduce-scatter of their gradients; DisCo-CLIP) |
            ring (the texts travel; least memory) | auto (ring). In a group of one they are the same.
        backend: dense (a block's scores at once) | tiled (torch, any device) | triton (CUDA, dot product) | gluon (the same, with
            warp-specialised kernels where there are such) | auto.
        group: the process group, or a mesh of one dimension (FSDP2's, or the data dimension beside tensor parallel's); None: the default
            group, if there is one. Each rank passes its own rows, equally many.
        ranks_per_node: makes the ring a two-level one, inside a node first and then between nodes.
        label_smoothing: share of the target that is spread evenly over all candidates, as in torch's cross_entropy.
        image_keys, text_keys: (n,) and (m,) int64; pairs that are no positives but have equal keys (duplicate captions) are left out.
            Without text_keys the texts have their images' keys.
        image_mask, text_mask: (n, T) bool, for late interaction: which tokens count.
        fp32_precision: ieee | tf32, for matmuls of float32 features on CUDA.
        tile: side of the torch backend's tiles.
        keep: memory for exponentials of scores, which the backward pass then need not compute again (softmax of dot products): none, bytes
            ("8G"), or auto (half of the GPU's free memory). For half-precision features they are rounded to bfloat16.
        check: refuse a result that is not finite and a scale that is not positive, which waits for the device.

    Returns:
        The mean over all N images, the same on every rank: 0-d, float32 (float64 for float64 features). Gradients are local: their sum
        over the ranks is the gradient of the mean. A feature row gets all of its own; logit_scale, logit_bias and a module's
        parameters get this rank's part.

    Features of two types are both cast to the narrower one (float16 with bfloat16: to float32), under autocast float32 features to
    autocast's type, as matmul would. Sums are float32 at least. Every gradient has its input's type.

    Raises:
        ValueError: where inputs do not fit each other, the options or the other ranks, on all ranks and before anything is exchanged;
            and, with `check`, where features, scale or bias are not finite.
        RuntimeError: with `check`, where another rank fails on the way (out of memory, a kernel), with its reason. Without it, and in
            the backward pass, the other ranks get NaN. A rank that fails raises its own error.
    """
    module = similarity if isinstance(similarity, nn.Module) else None
    config = LossConfig(
        objective=objective, similarity=LossConfig.similarity if isinstance(similarity, nn.Module) else similarity,
        exchange=exchange, backend=backend, label_smoothing=label_smoothing, ranks_per_node=ranks_per_node,
        fp32_precision=fp32_precision, tile=tile, keep=keep,
    )  # fmt: skip
    masks, keys = (image_mask, text_mask), (image_keys, text_keys)
    return configured_loss(
        image_features, text_features, logit_scale, logit_bias, config,
        module=module, masks=masks, keys=keys, group=_process_group(group), check=check,
    )  # fmt: skip


def configured_loss(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: Tensor | float,
    logit_bias: Tensor | float | None,
    config: LossConfig,
    *,
    module: nn.Module | None = None,
    masks: Pair = (None, None),
    keys: Pair = (None, None),
    group: dist.ProcessGroup | None = None,
    check: bool = True,
    tuning: Tuning | None = None,
    machine: Machine | None = None,
) -> Tensor:
    """`contrastive_loss` with its settings in one object. A benchmark varies `tuning`; a dry run replaces the `machine`.

    `module` is a similarity module, in place of config.similarity. `masks` and `keys` are those of (images, texts).
    """
    comm, trains = None if config.exchange == "none" else Communicator.of(group), torch.is_grad_enabled()
    machine = machine or Machine()
    similarity_name = "module" if module is not None else config.similarity
    try:
        _check_config(config)
        bias = 0.0 if logit_bias is None else logit_bias
        inputs = checked_inputs(image_features, text_features, logit_scale, bias, masks, keys, similarity_name)
        if config.label_smoothing and keys[0] is not None:
            raise ValueError(
                f"label_smoothing={config.label_smoothing} spreads over all texts, so none of them can be left out by keys"
            )
        backend_name = _chosen_backend(config.backend, similarity_name, inputs, machine)
        exchange = _exchange(config, comm)
        budget = kept_bytes(config.keep, machine, image_features.device)
    except ValueError as error:
        if comm is not None:
            agree(comm, [0] * len(NAMES), NAMES, error, image_features.device)
        raise
    if comm is not None:
        facts = [*inputs.facts(), OBJECTIVES.index(config.objective), EXCHANGES.index(config.exchange)]
        wish = _blocks_at_once(backend_name, inputs, config, machine)
        exchange.join(agree(comm, facts, NAMES, None, image_features.device, wish))

    def loss(inputs: Inputs, similarity: Similarity, weights: Weights, is_second: bool = False) -> Tensor:
        """The loss of this rank's rows against the columns of all ranks."""
        objective: Objective = Sigmoid()
        if config.objective != "sigmoid":
            rows, cols = exchange.size * len(inputs.rows), exchange.size * len(inputs.cols)
            objective = Softmax(config.label_smoothing, rows, cols)
        backend: Backend
        kept = Kept(budget / (2 if is_one_of_two else 1))
        if backend_name in KERNELS:
            from clipscale.loss.triton.backend import triton_backend  # Triton is imported where it is used

            choices = tuning or Tuning(gluon=backend_name == "gluon")
            backend = triton_backend(objective, config.fp32_precision, choices, machine, kept)
        else:
            is_dense = backend_name == "dense"
            tile = 0 if is_dense else config.tile
            backend = TorchBackend(objective, similarity, tile, exchange.visits == 1, machine, kept)
        call = LossCall(
            exchange, backend, similarity, weights, inputs.masks, inputs.keys, inputs.dtype, config.fp32_precision,
            check, trains, kept, is_second,
        )  # fmt: skip
        numbers = (inputs.scale, inputs.bias, *similarity.parameters)
        return cast(Tensor, ContrastiveLoss.apply(call, inputs.rows, inputs.cols, *numbers))

    if not (trains and (image_features.requires_grad or text_features.requires_grad)):
        budget = 0.0
    is_one_of_two = config.exchange == "local" and config.objective == "softmax"
    device = image_features.device
    similarity = Deep(module, device) if module is not None else Dot() if config.similarity == "dot" else Late(device)
    if config.objective == "softmax_text":
        inputs = inputs.positives_only()  # a hard negative is in no text's softmax
    terms, one_sided = [], WEIGHTS["softmax_image"]
    if config.exchange != "local" or config.objective == "sigmoid":
        terms.append(loss(inputs, similarity, WEIGHTS[config.objective]))
    else:  # OpenCLIP's local loss: one-sided in both directions, the second time with the roles exchanged
        if config.objective != "softmax_text":
            terms.append(loss(inputs, similarity, one_sided))
        if config.objective != "softmax_image":
            terms.append(loss(inputs.swapped(), similarity.swapped(), one_sided, is_second=bool(terms)))
    if exchange.failure is not None:  # without `check`; all transfers are done
        raise exchange.failure
    return terms[0] if len(terms) == 1 else (terms[0] + terms[1]) / 2


def _process_group(group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup | None:
    if not isinstance(group, DeviceMesh):
        return group
    if group.ndim != 1:
        names = group.mesh_dim_names or tuple(map(str, range(group.ndim)))
        raise ValueError(
            f"group is a mesh of {group.ndim} dimensions, {' x '.join(names)}; pass the one that splits the batch, such as "
            f'mesh["{names[0]}"]'
        )
    return group.get_group()


def _check_config(config: LossConfig) -> None:
    for setting in SETTINGS:
        name, value = setting.name, getattr(config, setting.name)
        if setting.choices is not None and value not in setting.choices:
            raise ValueError(f"{name}={value!r} is not one of {', '.join(setting.choices)}")
        if setting.least is not None and value is not None and not value >= setting.least:
            raise ValueError(f"{name}={value} must be at least {setting.least}")
    if config.label_smoothing >= 1:
        raise ValueError(f"label_smoothing={config.label_smoothing} must lie in [0, 1)")
    if config.label_smoothing and config.objective == "sigmoid":
        raise ValueError(f"label_smoothing={config.label_smoothing} is for the softmax; the sigmoid has no such target")


def _exchange(config: LossConfig, comm: Communicator | None) -> Single:
    if comm is None:
        return Single()
    if config.exchange == "replicated":
        return Replicated(comm)
    return Ring(comm, config.ranks_per_node) if config.exchange in ("ring", "auto") else Gather(comm)


def _blocks_at_once(backend: str, inputs: Inputs, config: LossConfig, machine: Machine) -> int:
    """Blocks of how many ranks fill the GPU: at least a tile for each multiprocessor."""
    if backend not in KERNELS:
        return 1
    device, arithmetic = inputs.rows.device, arithmetic_of(inputs.dtype, config.fp32_precision)
    shape = machine.tiles(device, PASSES[0], arithmetic)
    tiles = math.ceil(len(inputs.rows) / shape.rows) * math.ceil(len(inputs.cols) / shape.cols)
    return math.ceil(machine.multiprocessors(device) / tiles)


def _chosen_backend(name: str, similarity: str, inputs: Inputs, machine: Machine) -> str:
    """The backend's name, with "auto" resolved (and logged, once). Raises ValueError where Triton is asked for and is impossible."""
    device, dtype, obstacle = inputs.rows.device, inputs.dtype, None
    gpu = machine.gpu_name(device)
    if similarity != "dot":
        obstacle = "the similarity is not the dot product"
    elif dtype == torch.float64:
        obstacle = "the features are float64"
    elif gpu is None and (name == "auto" or os.environ.get("TRITON_INTERPRET") != "1"):
        obstacle = f"the features are on {device.type}"
    if name in KERNELS and obstacle:
        raise ValueError(f"backend={name} cannot be had, since {obstacle}; use backend=tiled")
    if name != "auto":
        return name
    if obstacle:
        _log_once(f"loss backend: tiled, since {obstacle}")
        return "tiled"
    _log_once(f"loss backend: triton, for the dot product of {dtype} features on {gpu}")
    return "triton"


@cache
def _log_once(message: str) -> None:
    _log.info(message)
