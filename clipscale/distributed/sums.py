"""Sums of gradients over ranks that go on in the background, for parameters outside DDP and FSDP2."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

BUCKET = 2**22
"""Elements of a sum: 16 MiB of float32, which is long enough for the network and short enough to begin early."""


class GradientSum:
    """The sum over ranks of the gradients of some parameters of one type. They are not to be read before `wait`."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        self._flat = torch.cat([g.reshape(-1) for g in gradients])
        parts = self._flat.split([g.numel() for g in gradients])
        for p, part in zip(parameters, parts, strict=True):
            p.grad = part.view_as(p)
        self._work = dist.all_reduce(self._flat, async_op=True)

    def wait(self) -> None:
        """Wait for the sum, on a GPU in its queue."""
        assert self._work is not None
        self._work.wait()


def begin_sums(parameters: Iterable[nn.Parameter], elements: int = BUCKET) -> list[GradientSum]:
    """Begin to sum all gradients that these parameters have. Every rank has those of the same parameters."""
    present = [p for p in parameters if p.grad is not None]
    return [GradientSum(bucket) for bucket in buckets(present, elements)]


class SummedTower(nn.Module):
    """A tower whose trained parameters may be others than its own: float32 masters of bf16 weights.

    Their gradients are summed bucket by bucket while the last chunk's backward pass still computes others. DDP does the same for a module's
    own parameters. `finish` waits for the sums.
    """

    def __init__(self, tower: nn.Module, masters: Mapping[int, nn.Parameter], elements: int = BUCKET) -> None:
        """`masters` maps the id of a parameter to the one whose gradient is summed in its place. Hooks that fill it come before."""
        super().__init__()
        self.module, self._elements = tower, elements
        own = [p for p in tower.parameters() if p.requires_grad]
        self._trained = {p: masters.get(id(p), p) for p in reversed(own)}  # about the order of the backward pass
        self._used: set[Tensor] = set()
        """Parameters that have had a gradient; others have no place in a bucket, which would wait for them."""
        self._waiting: list[list[nn.Parameter]] = []
        self._missing: set[Tensor] = set()
        """Trained parameters of the buckets above whose gradient is not complete."""
        self._sums: list[GradientSum] = []
        self._summed: set[Tensor] = set()
        self._last = False
        for p in own:
            p.register_post_accumulate_grad_hook(self._complete)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.module(*inputs, **named)

    @contextmanager
    def gradient_sync(self, last: bool) -> Iterator[None]:
        """Around the passes of a chunk. `last`: each gradient is complete when its backward pass has added to it."""
        self._last, self._sums, self._summed = last, [], set()
        if last:
            expected = [p for own, p in self._trained.items() if own in self._used]
            self._waiting, self._missing = buckets(expected, self._elements), set(expected)
        yield

    def finish(self) -> None:
        """Sum what is left, and wait. A second call in the same step does nothing."""
        left = [p for p in self._trained.values() if p not in self._summed]
        self._begin(left)
        for one in self._sums:
            one.wait()
        self._sums, self._last = [], False

    def _complete(self, own: Tensor) -> None:
        self._used.add(own)
        if not self._last:
            return
        self._missing.discard(self._trained[own])  # type: ignore[index]
        while self._waiting and not self._missing.intersection(self._waiting[0]):  # in the same order on all ranks
            self._begin(self._waiting.pop(0))

    def _begin(self, parameters: list[nn.Parameter]) -> None:
        self._sums += begin_sums(parameters, self._elements)
        self._summed.update(parameters)


def buckets(parameters: Iterable[nn.Parameter], elements: int = BUCKET) -> list[list[nn.Parameter]]:
    """Parameters in order, in groups of one type and at most `elements` elements, unless a single one is larger."""
    groups: list[list[nn.Parameter]] = []
    size = 0
    for p in parameters:
        if not groups or size + p.numel() > elements or p.dtype != groups[-1][0].dtype:
            groups.append([])
            size = 0
        groups[-1].append(p)
        size += p.numel()
    return groups
