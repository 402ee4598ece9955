"""Remembers what operations on tensors without memory return, because FakeTensorMode alone takes several times longer.

A result depends on the shapes of the arguments alone.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.utils._pytree import tree_any, tree_map, tree_map_only

from clipscale.common.record import Record


class Form(NamedTuple):
    """All that a tensor without memory has."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device | None
    """None: of a tensor that has values."""


class KnownResults:
    """Runs operations on tensors without memory: each one of the same arguments only once in FakeTensorMode."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self.known: dict[Any, Any] = {}

    def run(self, func: OpOverload, args: Any, kwargs: Record) -> Any:
        """What `func` returns."""
        effect = effect_of(func)
        if effect == "view" and isinstance(args[0], FakeTensor):
            with in_kernel_invocation_manager(self.mode):
                views = func(*args, **kwargs)
            return tree_map_only(Tensor, lambda view: FakeTensor(self.mode, view, args[0].fake_device), views)
        if effect == "else":
            return func(*args, **kwargs)
        key = (func, described(args), described([*kwargs.items()]))
        if effect == "out":
            return self.written(key, func, args, kwargs)
        if key not in self.known:
            result = func(*args, **kwargs)
            if tree_any(lambda leaf: not isinstance(leaf, FakeTensor), result):
                return result
            self.known[key] = tree_map_only(FakeTensor, form_of, result)
            return result
        return tree_map(self.tensor, self.known[key], is_leaf=lambda form: isinstance(form, Form))

    def written(self, key: Any, func: OpOverload, args: Any, kwargs: Record) -> Any:
        """What `func` returns, which writes into its argument `out`. Muon's products do so, five times for a matrix."""
        if key in self.known:
            return kwargs["out"]
        before = form_of(kwargs["out"])
        result = func(*args, **kwargs)
        if form_of(result) == before:
            self.known[key] = None
        return result

    def tensor(self, form: Form) -> FakeTensor:
        """A new tensor of a form."""
        with torch._C._DisableTorchDispatch():
            memory = torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device="meta")
        return FakeTensor(self.mode, memory, form.device)


def form_of(tensor: Tensor) -> Form:
    return Form(tensor.shape, tensor.stride(), tensor.dtype, getattr(tensor, "fake_device", None))


def described(value: Any) -> Any:
    """An argument as far as results depend on it."""
    if isinstance(value, Tensor):
        return form_of(value)
    if isinstance(value, list | tuple):
        return tuple(described(part) for part in value)
    return type(value), value


@cache
def effect_of(func: OpOverload) -> str:
    """What an operation does: a `view` of its first argument, `new` tensors, the one tensor `out`, or else."""
    schema = func._schema
    if func.is_view or func is torch.ops.aten._unsafe_view.default:
        return "view"
    if func.namespace != "aten":
        return "else"
    if [part.name for part in schema.arguments if part.alias_info] == ["out"] and len(schema.returns) == 1:
        return "out"
    return "else" if any(part.alias_info for part in (*schema.arguments, *schema.returns)) else "new"
