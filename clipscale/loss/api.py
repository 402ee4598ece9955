"""The public functions: check the call, choose backend and similarity, and compute the mean over the terms.

Letters: n rows (images) and m columns (texts) of this rank, D feature width.
"""

import inspect
import os
from collections.abc import Callable, Iterable, Sequence
from pkgutil import resolve_name
from typing import Literal, Never, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from clipscale.common.text import did_you_mean
from clipscale.loss.autograd import Backend, ContrastiveLoss, LossCall
from clipscale.loss.choices import BACKENDS, EXCHANGES
from clipscale.loss.distillation.distillation_objective import Distillation, Teacher, add_teachers
from clipscale.loss.distillation.tile import TeacherSpec
from clipscale.loss.inputs import Inputs, make_inputs
from clipscale.loss.objective import OBJECTIVES, Objective
from clipscale.loss.runtime import LossRuntime, current_runtime
from clipscale.loss.similarity import DotProduct, ModuleSimilarity, Similarity
from clipscale.loss.terms import LossTerm, make_terms
from clipscale.loss.torch_backend import TorchBackend
from clipscale.loss.triton.tuning import WIDTH_STEP, TileShape

CHOICES = {"objective": tuple(OBJECTIVES), "exchange": EXCHANGES, "backend": BACKENDS}


@torch.compiler.disable(
    reason="the contrastive loss works tile by tile in place and talks to other ranks: a graph of its own gains nothing"
)
def contrastive_loss(  # noqa: PLR0913 - each keyword of the public function stands here, with its default
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: Tensor | float,
    *,
    logit_bias: Tensor | float | None = None,
    objective: str = "softmax",
    exchange: str = "auto",
    backend: str = "auto",
    keys: Tensor | None = None,
    similarity: nn.Module | Literal["dot"] | None = None,
    captions: int = 1,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    check: bool = True,
    **unknown: Never,
) -> Tensor:
    """The contrastive loss of image-text pairs spread over the ranks of a group, without a batch x batch matrix.

    With x_ij = logit_scale * similarity(image i, text j) over the N images of all ranks, where text i belongs to
    image i:

        softmax        mean_i of (LSE_j x_ij + LSE_j x_ji) / 2 - x_ii     (CLIP, arXiv 2103.00020)
        softmax_image  mean_i of LSE_j x_ij - x_ii                        (softmax_text: LSE_j x_ji)
        sigmoid        sum_ij softplus(-z_ij (x_ij + logit_bias)) / N     (SigLIP, arXiv 2303.15343)

    where z is 1 at the positives and -1 elsewhere. With k captions of an image, the mean of its k scores takes the
    place of x_ii in its row (SupCon's outer form, arXiv 2004.11362, equation 2), and each caption is a text with a
    weight of 1/k.

    Args:
        image_features: (n, D), rows usually of unit length. A module may take other shapes (n, ...).
        text_features: (m, D). Of the first captions * n texts, text j belongs to image j // captions. Texts beyond
            those are hard negatives: they belong to no image, and are columns only.
        logit_scale: the multiplier itself, not its logarithm; positive; a number or a tensor of one element.
        logit_bias: for the sigmoid; the softmax does not depend on it.
        objective: softmax | softmax_image | softmax_text | sigmoid.
        similarity: None (or "dot") for the dot product. Or a module from image features and text features to
            similarities (n, m), pair by pair. It is called with one tile at a time: in training twice by a
            softmax, once by the sigmoid. Its parameters get their gradient too.
        exchange: how the ranks share their rows. With one rank all choices are equivalent.
            auto: gather if that takes little memory. Otherwise ring in one node, and nodes across several. The CPUs of
                one node always take ring.
            replicated: CLIP's. Gather both sides; the whole loss on every rank.
            local: OpenCLIP's. Two one-sided losses of this rank's rows.
            gather: all-gather of the texts, reduce-scatter of their gradients (DisCo-CLIP).
            ring: the texts travel. Takes the least memory.
            nodes: gather within a node, a ring between nodes.
            `replicated` and `local` fall back to `gather` with a similarity module or hard negatives; `local` also for
            any objective but softmax.
        backend: dense (a block's scores at once) | tiled (torch, any device) | triton (CUDA; the dot product, without
            keys, one caption an image) | auto.
        group: the process group, or a mesh of one dimension (FSDP2's, or the data dimension beside tensor parallel's);
            None for the default group, or one process if there is none. Each rank passes its own rows, equally many.
        keys: (n,) int64, one for each image and its texts; not with hard negatives. Samples of equal keys (the same
            caption or picture), on any rank, are not negatives of each other: the sums leave such pairs out.
        captions: texts of each image, all of them its positives. With several, `replicated` and `local` fall back to
            `gather`.
        check: refuse what is not finite, a scale that is not positive, and ranks whose features differ in shape or
            type. This waits for the device and costs a small all-gather, so a training loop may pass False, at the
            latest after its first step.
        unknown: always empty. Another keyword raises TypeError with a hint.

    Returns:
        The mean over all N images, the same on every rank: 0-d, float32 (float64 for float64 features). Gradients are
        local: their sum over the ranks is the gradient of the mean. A feature row gets all of its own; logit_scale,
        logit_bias and a module's parameters get this rank's part.

    If the features have two types, both are cast to the narrower one (float16 with bfloat16: to float32). Under
    autocast, float32 features are cast to autocast's type, as matmul would do. Sums are float32 at least. The dot
    product of float32 features is in IEEE precision; a similarity module keeps the caller's setting. Every gradient has
    its input's type.

    Raises:
        ValueError: if inputs do not fit each other or the options.
        TypeError: for an unknown keyword.
    """
    refuse_unknown(contrastive_loss, unknown)
    _check_choices(objective=objective, exchange=exchange, backend=backend)
    chosen_objective = OBJECTIVES[objective]
    module = _module_of(similarity)
    runtime = current_runtime()
    inputs = make_inputs(
        image_features, text_features, logit_scale, logit_bias, keys,
        captions_per_image=captions, has_module=module is not None, check=check,
    )  # fmt: skip
    backend_name = _choose_backend(backend, chosen_objective, inputs, module, runtime)
    return _loss_of_terms(
        chosen_objective, inputs, exchange_name=exchange, backend_name=backend_name, module=module, group=group,
        check=check, runtime=runtime,
    )  # fmt: skip


@torch.compiler.disable(reason="as contrastive_loss")
def distillation_loss(  # noqa: PLR0913 - as contrastive_loss
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: Tensor | float,
    teachers: Sequence[Teacher],
    weights: tuple[float, float] = (0.0, 1.0),
    *,
    exchange: str = "auto",
    backend: str = "auto",
    keys: Tensor | None = None,
    similarity: nn.Module | Literal["dot"] | None = None,
    captions: int = 1,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    check: bool = True,
    **unknown: Never,
) -> Tensor:
    """Cross-entropy to teachers, beside or instead of the contrastive loss, without a batch x batch matrix.

        weights[0] * contrastive_loss + weights[1] / 2 * (-mean_i sum_j P_ij log softmax_j x_ij
                                                          -mean_j sum_i Q_ij log softmax_i x_ij)

    with x_ij of `contrastive_loss`. P is the mean over the teachers of softmax_j(t <a_i, b_j>), and Q of softmax_i
    (MobileCLIP, arXiv 2311.17049; with one teacher and weights of 1 open_clip's DistillClipLoss). Both parts are one
    softmax with mixed targets, so the student's scores are computed as often as for one part alone.

    Args:
        image_features, text_features: (n, D) each, text i belonging to image i.
        logit_scale: the student's multiplier.
        teachers: (a (n, D_k), b (n, D_k), t) for each: its features of the same images and texts, usually of unit
            length, and its logit scale, the multiplier itself. They get no gradient.
        weights: the contrastive loss's, and the distillation's.
        exchange, backend, keys, similarity, group, check, unknown: as for `contrastive_loss`, but there is no
            triton backend.
        captions: only 1.

    Returns:
        The mean over all N images, the same on every rank; gradients as in `contrastive_loss`.

    Raises:
        ValueError: if inputs do not fit each other or the options.
        TypeError: for an unknown keyword.
    """
    refuse_unknown(distillation_loss, unknown)
    _check_choices(exchange=exchange, backend=backend)
    if captions != 1 or backend == "triton":
        raise ValueError(
            "distillation_loss supports one caption per image and has no Triton kernels: drop captions= and "
            "backend='triton'"
        )
    if not teachers or len(weights) != 2 or min(weights) < 0 or not max(weights):
        raise ValueError(f"{len(teachers)} teachers, weights={weights}: give a teacher, and two weights of 0 or more")
    module = _module_of(similarity)
    inputs = make_inputs(
        image_features, text_features, logit_scale, None, keys,
        captions_per_image=1, has_module=module is not None, check=check,
    )  # fmt: skip
    inputs = add_teachers(inputs, teachers)
    chosen_objective = Distillation(
        teachers=tuple(TeacherSpec(a.shape[1], float(t)) for a, _, t in teachers),
        teacher_share=weights[1] / sum(weights),
    )
    backend_name = "dense" if backend == "dense" else "tiled"
    mean = _loss_of_terms(
        chosen_objective, inputs, exchange_name=exchange, backend_name=backend_name, module=module, group=group,
        check=check, runtime=current_runtime(),
    )  # fmt: skip
    return sum(weights) * mean


def _loss_of_terms(
    objective: Objective,
    inputs: Inputs,
    *,
    exchange_name: str,
    backend_name: str,
    module: nn.Module | None,
    group: dist.ProcessGroup | DeviceMesh | None,
    check: bool,
    runtime: LossRuntime,
) -> Tensor:
    """A collective: the mean over the terms of the call. `module`: None for the dot product."""
    device = inputs.scale.device
    comm = runtime.communicator(group)
    if comm is not None and check:
        facts = inputs.facts_to_compare()
        facts[f"exchange (its place in {', '.join(EXCHANGES)})"] = EXCHANGES.index(exchange_name)
        comm.check_same_on_all_ranks(facts, device, objective.function_name)
    if backend_name == "triton":
        inputs = inputs.pad_features(WIDTH_STEP)
    similarity = DotProduct() if module is None else ModuleSimilarity(module, device)
    values = []
    for term in make_terms(exchange_name, objective, inputs, similarity, comm, runtime):
        call = LossCall(
            exchange=term.exchange,
            backend=_make_backend(backend_name, term, similarity, runtime),
            similarity=similarity,
            objective=term.objective,
            inputs=term.inputs,
            check=check,
            needs_backward=torch.is_grad_enabled(),
        )
        values.append(cast(Tensor, ContrastiveLoss.apply(call, *term.tensors, *similarity.parameters)))
    if len(values) == 1:
        return values[0]
    return sum(values[1:], values[0]) / len(values)


def _module_of(similarity: nn.Module | str | None) -> nn.Module | None:
    """The similarity module; None for the dot product. Raises ValueError for anything else."""
    if similarity is None or similarity == "dot":
        return None
    if not isinstance(similarity, nn.Module):
        raise ValueError(f"similarity={similarity!r} is not a module; leave it out for the dot product")
    return similarity


def _check_choices(**given: str) -> None:
    """Raise ValueError for an option that is not one of its CHOICES."""
    for option, choice in given.items():
        if choice not in CHOICES[option]:
            raise ValueError(f"{option}={choice!r} is not one of {', '.join(CHOICES[option])}")


# Arguments that an earlier version had -> what became of them.
REMOVED = {"shared": "shared= was removed in 0.2.0: pairs of equal keys are left out"}


def refuse_unknown(function: Callable[..., Tensor], unknown: Iterable[str]) -> None:
    """Raise TypeError, as Python does, for the first of these keywords, if there are any."""
    for name in unknown:
        if name in REMOVED:
            hint = f"; {REMOVED[name]}"
        else:
            parameters = inspect.signature(function).parameters.values()
            hint = did_you_mean(name, [p.name for p in parameters if p.kind is p.KEYWORD_ONLY])
        raise TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}{hint}")


def _make_backend(backend_name: str, term: LossTerm, similarity: Similarity, runtime: LossRuntime) -> Backend:
    if backend_name == "triton":
        tiles = runtime.tile_shape(term.inputs.scale.device, term.inputs.dtype)
        assert term.objective.triton_backend is not None
        make_backend: Callable[[LossRuntime, TileShape], Backend] = resolve_name(term.objective.triton_backend)
        return make_backend(runtime, tiles)
    return TorchBackend(term.objective.make_tile_ops(), similarity, runtime, is_dense=backend_name == "dense")


def _choose_backend(
    backend_name: str, objective: Objective, inputs: Inputs, module: nn.Module | None, runtime: LossRuntime
) -> str:
    """The backend's name, with "auto" resolved. Raises ValueError where Triton is impossible."""
    device = inputs.scale.device
    is_gpu = runtime.is_gpu(device)
    obstacle = None
    if objective.triton_backend is None:
        obstacle = "the objective has no kernels"
    elif module is not None:
        obstacle = "the similarity is not the dot product"
    elif inputs.dtype == torch.float64:
        obstacle = "the features are float64"
    elif inputs.rows.keys is not None:
        obstacle = "the kernels take no keys"
    elif inputs.positive_layout.captions_per_image > 1:
        obstacle = "the kernels take one caption an image"
    elif not is_gpu and (backend_name == "auto" or os.environ.get("TRITON_INTERPRET") != "1"):
        obstacle = f"the features are on {device.type}"
    if backend_name == "triton" and obstacle:
        raise ValueError(f"backend=triton cannot be had, since {obstacle}; use backend=tiled")
    if backend_name != "auto":
        return backend_name
    return "tiled" if obstacle else "triton"
