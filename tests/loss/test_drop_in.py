"""The loss in the place of open_clip's, and on meshes of FSDP2 and tensor parallel."""

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from open_clip.loss import ClipLoss as OpenClipLoss
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Replicate

from clipscale import contrastive_loss
from clipscale.drop_in import ClipLoss
from clipscale.loss.reference import dense_contrastive_loss
from tests.loss.cases import features
from tests.loss.workers import Workers, stacked


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
    actual = ClipLoss()(u, v, 20.0, logit_bias=torch.tensor(-3.0), output_dict=True)
    assert torch.allclose(actual["contrastive_loss"], OpenClipLoss()(u, v, 20.0))


def both(group: dist.ProcessGroup, rank: int, u: Tensor, v: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    settings = {"local_loss": True, "gather_with_grad": True, "rank": rank, "world_size": 4}
    return gradients(ClipLoss(**settings), u[rank], v[rank]), gradients(OpenClipLoss(**settings), u[rank], v[rank])


def test_on_ranks_its_features_have_clip_loss_gradients(ranks: Workers) -> None:
    u, v = stacked(4, 5, 5, 8)
    answers = ranks.run(both, 4, u, v)
    for ours, original in answers:
        for name, a, b in zip(("images", "texts"), ours[1:3], original[1:3]):
            assert torch.allclose(a, b, rtol=1e-9, atol=1e-12), f"{name} differ by {float((a - b).abs().max()):.1e}"
    for index, name in ((0, "value"), (3, "scale")):  # their means over the ranks
        a, b = (torch.stack([side[index] for side in sides]).mean() for sides in zip(*answers))
        assert torch.allclose(a, b, rtol=1e-9), f"{name}: {float(a)} and {float(b)}"


def tower(weights: Sequence[Tensor]) -> nn.Sequential:
    layers = nn.Sequential(nn.Linear(8, 12, bias=False), nn.Tanh(), nn.Linear(12, 8, bias=False)).to(weights[0].dtype)
    for parameter, weight in zip(layers.parameters(), weights):
        parameter.data.copy_(weight)
    return layers


def under_tensor_parallel(
    group: dist.ProcessGroup, rank: int, u: Tensor, v: Tensor, weights: Sequence[Tensor]
) -> list[Tensor]:
    """The whole gradients of two towers, each split over two ranks and, with FSDP2, over two more."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    mine = mesh.get_local_rank("data")
    towers = [tower(weights) for _ in range(2)]
    for module in towers:
        parallelize_module(module, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(module, mesh=mesh["data"])
    ClipLoss(world_size=2, group=mesh["data"])(towers[0](u[mine]), towers[1](v[mine]), 2.0).backward()
    with pytest.raises(ValueError, match="pass this rank's own rows"):
        contrastive_loss(distribute_tensor(u[mine], mesh["tensor"], [Replicate()]), u[mine], 2.0, group=mesh["data"])
    grads = [parameter.grad for module in towers for parameter in module.parameters()]
    return [grad.full_tensor() for grad in grads if isinstance(grad, DTensor)]


def test_towers_under_tensor_parallel_and_fsdp2_get_the_gradient_of_the_whole_batch(ranks: Workers) -> None:
    u, v = stacked(2, 5, 5, 8)
    torch.manual_seed(0)
    weights = [torch.randn(12, 8, dtype=u.dtype), torch.randn(8, 12, dtype=u.dtype)]
    towers = [tower(weights) for _ in range(2)]
    dense_contrastive_loss(towers[0](u.flatten(0, 1)), towers[1](v.flatten(0, 1)), 2.0).backward()
    true = [parameter.grad for module in towers for parameter in module.parameters()]
    for grads in ranks.run(under_tensor_parallel, 4, u, v, weights):
        assert len(grads) == len(true) == 4
        for a, b in zip(grads, true):
            assert b is not None
            assert torch.allclose(a, b, rtol=1e-9, atol=1e-12), f"off by {float((a - b).abs().max()):.1e}"
