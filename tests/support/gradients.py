"""The gradients of a module, and whether they equal the gradients of another one."""

from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def whole(tensor: Tensor) -> Tensor:
    """A tensor, or the whole of a sharded one."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients(module: nn.Module) -> dict[str, Tensor]:
    """Whole gradients by parameter, of those that have one."""
    return {name: whole(p.grad) for name, p in module.named_parameters() if p.grad is not None}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float, case: object = "") -> None:
    assert actual.keys() == expected.keys(), case
    for name, gradient in expected.items():
        error = ((actual[name] - gradient).norm() / gradient.norm().clamp_min(1e-30)).item()
        assert error <= tolerance, f"{name}: relative error {error:.1e} > {tolerance:.0e} {case}"
