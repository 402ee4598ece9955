"""The loss where people have another one: in the places of open_clip's and sentence-transformers', and on meshes of FSDP2 and tensor
parallel."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from open_clip.loss import ClipLoss as OpenClipLoss
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Replicate

from clipscale import contrastive_loss, drop_in
from clipscale.drop_in import ClipLoss, RankingLoss
from clipscale.loss.reference import dense_contrastive_loss
from tests.loss.cases import features
from tests.loss.workers import Workers, stacked
from tests.support.ranks import run_ranks


def gradients(loss: nn.Module, u: Tensor, v: Tensor) -> list[Tensor]:
    """The value and the gradients of images, texts and scale."""
    inputs = [
        u.clone().requires_grad_(),
        v.clone().requires_grad_(),
        torch.tensor(20.0, dtype=u.dtype).requires_grad_(),
    ]
    value = loss(*inputs)
    return [value.detach(), *torch.autograd.grad(value, inputs)]


def test_alone_it_is_clip_loss() -> None:
    u, v = features(9, 9, 8)
    for a, b in zip(gradients(ClipLoss(), u, v), gradients(OpenClipLoss(), u, v)):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)
    found = ClipLoss()(u, v, 20.0, logit_bias=torch.tensor(-3.0), output_dict=True)
    assert torch.allclose(found["contrastive_loss"], OpenClipLoss()(u, v, 20.0))


def both(group: dist.ProcessGroup, rank: int, u: Tensor, v: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    settings = {"local_loss": True, "gather_with_grad": True, "rank": rank, "world_size": 4}
    return gradients(ClipLoss(**settings), u[rank], v[rank]), gradients(OpenClipLoss(**settings), u[rank], v[rank])


def test_on_ranks_its_features_have_clip_loss_gradients(ranks: Workers) -> None:
    u, v = stacked(4, 5, 5, 8)
    answers = ranks.run(both, 4, u, v)
    for ours, theirs in answers:
        for name, a, b in zip(("images", "texts"), ours[1:3], theirs[1:3]):
            assert torch.allclose(a, b, rtol=1e-9, atol=1e-12), f"{name} differ by {float((a - b).abs().max()):.1e}"
    for index, name in ((0, "value"), (3, "scale")):  # their means over the ranks
        a, b = (torch.stack([side[index] for side in sides]).mean() for sides in zip(*answers))
        assert torch.allclose(a, b, rtol=1e-9), f"{name}: {float(a)} and {float(b)}"


def on_a_mesh(group: dist.ProcessGroup, rank: int, u: Tensor, v: Tensor) -> Tensor:
    """The loss of a data-parallel dimension: the two ranks of the other one have the same features."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    mine = mesh.get_local_rank("data")
    as_group = contrastive_loss(u[mine], v[mine], 20.0, group=mesh.get_group("data"))
    as_mesh = contrastive_loss(u[mine], v[mine], 20.0, group=mesh["data"])
    assert torch.equal(as_group, as_mesh)
    return as_mesh


def test_a_dimension_of_a_mesh_is_a_group(ranks: Workers) -> None:
    u, v = stacked(2, 5, 5, 8)
    true = dense_contrastive_loss(u.flatten(0, 1), v.flatten(0, 1), 20.0)
    assert all(torch.allclose(found, true, rtol=1e-10) for found in ranks.run(on_a_mesh, 4, u, v))


def tower(weights: Sequence[Tensor]) -> nn.Sequential:
    found = nn.Sequential(nn.Linear(8, 12, bias=False), nn.Tanh(), nn.Linear(12, 8, bias=False)).to(weights[0].dtype)
    for parameter, weight in zip(found.parameters(), weights):
        parameter.data.copy_(weight)
    return found


def under_tensor_parallel(
    group: dist.ProcessGroup, rank: int, u: Tensor, v: Tensor, weights: Sequence[Tensor]
) -> list[Tensor]:
    """The whole gradients of two towers, each split over two ranks and, with FSDP2, over two more."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    mine = mesh.get_local_rank("data")
    towers = [tower(weights) for _ in range(2)]
    for one in towers:
        parallelize_module(one, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(one, mesh=mesh["data"])
    ClipLoss(world_size=2, group=mesh["data"])(towers[0](u[mine]), towers[1](v[mine]), 2.0).backward()
    grads = [parameter.grad for one in towers for parameter in one.parameters()]
    return [grad.full_tensor() for grad in grads if isinstance(grad, DTensor)]


def test_towers_under_tensor_parallel_and_fsdp2_get_the_gradient_of_the_whole_batch(ranks: Workers) -> None:
    u, v = stacked(2, 5, 5, 8)
    torch.manual_seed(0)
    weights = [torch.randn(12, 8, dtype=u.dtype), torch.randn(8, 12, dtype=u.dtype)]
    towers = [tower(weights) for _ in range(2)]
    dense_contrastive_loss(towers[0](u.flatten(0, 1)), towers[1](v.flatten(0, 1)), 2.0).backward()
    true = [parameter.grad for one in towers for parameter in one.parameters()]
    for grads in ranks.run(under_tensor_parallel, 4, u, v, weights):
        assert len(grads) == len(true) == 4
        for a, b in zip(grads, true):
            assert b is not None
            assert torch.allclose(a, b, rtol=1e-9, atol=1e-12), f"off by {float((a - b).abs().max()):.1e}"


def refusals_on_a_mesh(group: dist.ProcessGroup, rank: int, u: Tensor) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    split = distribute_tensor(u, mesh["tensor"], [Replicate()])
    scale = distribute_tensor(torch.tensor([2.0]), mesh["tensor"], [Replicate()])
    calls: list[Callable[[], Tensor]] = [
        lambda: contrastive_loss(u, u, 2.0, group=mesh),
        lambda: contrastive_loss(split, u, 2.0, group=mesh["data"]),
        lambda: contrastive_loss(u, u, scale, group=mesh["data"]),
    ]
    found = []
    for call in calls:
        with pytest.raises(ValueError) as caught:
            call()
        found.append(str(caught.value))
    return found


def test_a_mesh_of_two_dimensions_and_distributed_tensors_are_refused_with_the_remedy(ranks: Workers) -> None:
    for mesh, features_, scale in ranks.run(refusals_on_a_mesh, 4, features(3, 3, 4)[0]):
        assert (
            mesh
            == 'group is a mesh of 2 dimensions, data x tensor; pass the one that splits the batch, such as mesh["data"]'
        )
        assert (
            features_ == "image_features is a DTensor; pass this rank's own rows: x.full_tensor() if all hold the same"
        )
        assert scale == "logit_scale is a DTensor; pass x.full_tensor()"


# ---- in sentence-transformers' place ----


class TheirRankingLoss:
    """Their loss of one process, as their documentation defines it, with one matrix of scores."""

    scale, mini_batch_size, gather_across_devices = 20.0, 2, False
    directions: tuple[str, ...] = ("query_to_doc",)
    partition_mode, hardness_mode, hardness_strength = "joint", None, 0.0
    similarity_fct: Callable[[Tensor, Tensor], Tensor]

    def calculate_loss(self, reps: Any, labels: Any = None, *, with_backward: bool = False) -> Tensor:
        queries, documents = torch.cat(reps[0]), torch.cat([x for column in reps[1:] for x in column])
        scores = self.scale * self.similarity_fct(queries, documents)
        target = torch.arange(len(queries))
        loss = F.cross_entropy(scores, target)
        if "doc_to_query" in self.directions:
            loss = (loss + F.cross_entropy(scores[:, : len(queries)].T, target)) / 2
        if with_backward:
            loss.backward()
        return loss.detach() if with_backward else loss


def cosines(a: Tensor, b: Tensor) -> Tensor:
    return F.normalize(a) @ F.normalize(b).T


def dots(a: Tensor, b: Tensor) -> Tensor:
    return a @ b.T


def euclidean(a: Tensor, b: Tensor) -> Tensor:
    return -torch.cdist(a, b)


class OurRankingLoss(RankingLoss, TheirRankingLoss):
    normalizes = {cosines: True, dots: False}  # noqa: RUF012


@pytest.mark.parametrize("similarity", [cosines, dots, euclidean])
@pytest.mark.parametrize("directions", [("query_to_doc",), ("query_to_doc", "doc_to_query")])
@pytest.mark.parametrize("columns", [2, 4])
def test_representations_have_the_ranking_losss_gradients(
    columns: int, directions: tuple[str, ...], similarity: Callable[[Tensor, Tensor], Tensor]
) -> None:
    torch.manual_seed(0)
    drawn = [torch.randn(5, 6, dtype=torch.float64) for _ in range(columns)]
    found = []
    for kind in (OurRankingLoss, TheirRankingLoss):
        loss = kind()
        loss.directions, loss.similarity_fct = directions, similarity
        loss.partition_mode = "joint" if len(directions) == 1 else "per_direction"
        reps = [[x.clone().requires_grad_() for x in column.split(2)] for column in drawn]
        value = loss.calculate_loss(reps, with_backward=True)
        assert not value.requires_grad
        found.append([value, *(x.grad for column in reps for x in column)])
    for a, b in zip(*found):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)


class Embedding(nn.Module):
    """The module of a SentenceTransformer: a mean of token embeddings, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50, 16)
        self.dropout = nn.Dropout(0.2)

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        mask = features["attention_mask"][..., None].float()
        states = self.dropout(self.tokens(features["input_ids"])) * mask
        return features | {"sentence_embedding": states.sum(1) / mask.sum(1)}


def ranked(rank: int, world: int, options: dict[str, Any], columns: int) -> list[list[Tensor]]:
    """For our class and theirs: the value, and the gradients of a model's parameters, averaged over the ranks."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import losses
    from sentence_transformers.util import dot_score

    options = {key: dot_score if value == "dot" else value for key, value in options.items()}
    generator = torch.Generator().manual_seed(rank)
    texts = [torch.randint(0, 50, (7, 5), generator=generator) for _ in range(columns)]
    found = []
    for kind in (drop_in.CachedMultipleNegativesRankingLoss, losses.CachedMultipleNegativesRankingLoss):
        torch.manual_seed(0)
        model = SentenceTransformer(modules=[Embedding()], device="cpu").train()
        torch.manual_seed(1 + rank)  # the dropout
        batch = [{"input_ids": ids, "attention_mask": (ids != 0).long()} for ids in texts]
        value = kind(model, **options)(batch, torch.empty(0))
        value.backward()
        answer = [value.detach(), *(parameter.grad for parameter in model.parameters())]
        if world > 1:
            for x in answer:
                dist.all_reduce(x)
                x /= world
        found.append(answer)
    return found


OPTIONS = [
    {},
    {"scale": 50.0, "mini_batch_size": 3},
    {"similarity_fct": "dot", "scale": 1.0, "mini_batch_size": 2},
    {"mini_batch_num_tokens": 12},
    {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"},
    {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "joint"},
    {"directions": ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc"), "mini_batch_size": 4},
    {"hardness_mode": "all_negatives", "hardness_strength": 5.0},
]


def assert_equal_to_float32_rounding(answers: Sequence[Sequence[Tensor]], case: object) -> None:
    for a, b in zip(*answers):
        off = float((a - b).abs().max() / b.abs().max())
        assert off < 1e-5, f"{case}: {off:.1e}"


@pytest.mark.slow  # sentence-transformers imports transformers: seconds
def test_it_is_sentence_transformers_loss() -> None:
    pytest.importorskip("sentence_transformers", reason="it is not installed (clipscale[sentence])")
    for options, columns in itertools.product(OPTIONS, (2, 4)):
        assert_equal_to_float32_rounding(ranked(0, 1, options, columns), (options, columns))
    kind = drop_in.CachedMultipleNegativesRankingLoss
    assert issubclass(kind, RankingLoss) and kind is drop_in.CachedMultipleNegativesRankingLoss


@pytest.mark.slow
@pytest.mark.parametrize("columns", [2, 4])
@pytest.mark.parametrize("gathers", [True, False])
def test_on_ranks_it_is_sentence_transformers_loss(gathers: bool, columns: int) -> None:
    pytest.importorskip("sentence_transformers", reason="it is not installed (clipscale[sentence])")
    options = {"gather_across_devices": gathers, "mini_batch_size": 3}
    for answers in run_ranks(ranked, 2, options, columns):
        assert_equal_to_float32_rounding(answers, (options, columns))
