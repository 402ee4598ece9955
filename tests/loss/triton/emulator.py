"""Runs a Gluon kernel's own Python source on the CPU, over torch tensors: what a GPU would do, in an order that finds errors.

Every partition of `warp_specialize` is a thread. Copies by TMA and products on Blackwell are done by threads of their own, copies in any
order. What is in flight is NaN: a tile of shared memory from the start of a copy to its end, an accumulator from the start of its first
product. Hopper's products read their operands when they are waited for, and TMA stores theirs: what is overwritten too early is wrong. A
barrier that nobody completes within PATIENCE seconds is a deadlock. Layouts, registers and fences within a partition are left out.
"""

import functools
import random
import threading
import types
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

PATIENCE = 20.0
Job = Callable[[], None]


class SynchronisationError(RuntimeError):
    """A barrier is waited for in vain, or gets more arrivals than it has in a phase."""


class Value(torch.Tensor):
    """A tensor in registers."""

    type = SimpleNamespace(layout=None)  # type: ignore[assignment]


class Pointer:
    """A place, or many, in a tensor's memory."""

    def __init__(self, base: Tensor, offset: Any = 0) -> None:
        self.base, self.offset = base, offset

    def __add__(self, more: Any) -> "Pointer":
        return Pointer(self.base, self.offset + more)


class Descriptor:
    """A matrix with blocks, as a host's tensor descriptor says."""

    def __init__(self, given: Any) -> None:
        self.matrix, self.layout, self.dtype = given.base, given.layout, given.base.dtype
        size = given.block_shape[0] * given.block_shape[1] * given.base.element_size()
        self.block_type = SimpleNamespace(shape=list(given.block_shape), nbytes=size)

    def block(self, at: Sequence[Any]) -> tuple[tuple[slice, slice], Tensor]:
        """A block's part inside the matrix, and the block with zeros elsewhere."""
        i, j = (int(x) for x in at)
        high, wide = self.block_type.shape
        inside = slice(i, min(i + high, len(self.matrix))), slice(j, min(j + wide, self.matrix.shape[1]))
        found = torch.zeros(high, wide, dtype=self.dtype)
        part = self.matrix[inside]
        found[: part.shape[0], : part.shape[1]] = part
        return inside, found


class Program:
    """What the threads of a program share."""

    def __init__(self, index: int) -> None:
        self.index, self.failed, self.ended = index, False, False
        self.changed = threading.Condition()
        self.copies: list[Job] = []
        self.products: list[Job] = []
        self.stores: dict[int, list[Job]] = {}
        self.unfenced: dict[int, list[int]] = {}

    def serve(self, jobs: list[Job], choose: Callable[[int], int]) -> None:
        """Do jobs until the program ends."""
        while True:
            with self.changed:
                self.changed.wait_for(lambda: jobs or self.ended or self.failed)
                if not jobs:
                    return
                job = jobs.pop(choose(len(jobs)))
            try:
                job()
            except SynchronisationError:
                self.fail()

    def fail(self) -> None:
        with self.changed:
            self.failed = True
            self.changed.notify_all()

    def add(self, jobs: list[Job], job: Job) -> None:
        with self.changed:
            jobs.append(job)
            self.changed.notify_all()


class Barrier:
    def __init__(self) -> None:
        self.count = self.pending = self.bytes = self.phase = 0

    def change(self, arrivals: int, nbytes: int) -> None:
        with program().changed:
            self.pending -= arrivals
            self.bytes += nbytes
            if self.pending < 0:
                raise SynchronisationError("more arrivals than the barrier has in a phase")
            if self.pending == 0 and self.bytes == 0:
                self.phase, self.pending = self.phase ^ 1, self.count
                program().changed.notify_all()

    def wait(self, parity: int) -> None:
        """Until the phase of this parity is complete."""
        at = program()
        with at.changed:
            if not at.changed.wait_for(lambda: self.phase != parity or at.failed, PATIENCE) or at.failed:
                at.fail()
                raise SynchronisationError(f"program {at.index}: nobody completes phase {parity} of a barrier")


class Shared:
    """Tiles in shared or in tensor memory."""

    def __init__(self, data: Tensor) -> None:
        self.data = data

    def index(self, i: Any) -> "Shared":
        return Shared(self.data[int(i)])

    def permute(self, order: Sequence[int]) -> "Shared":
        return Shared(self.data.permute(*order))

    def slice(self, start: int, length: int) -> "Shared":
        return Shared(self.data[:, start : start + length])

    def load(self, layout: Any) -> Tensor:
        return self.data.clone().as_subclass(Value)

    def store(self, value: Tensor) -> None:
        self.data.copy_(value)
        program().unfenced.setdefault(threading.get_ident(), []).append(self.data.data_ptr())


class Accumulator:
    """Hopper's products that have not been waited for."""

    def __init__(self, value: Tensor, products: list[tuple[Shared, Shared]]) -> None:
        self.value, self.products = value, products


LOCAL = threading.local()


def program() -> Program:
    return LOCAL.program  # type: ignore[no-any-return]


def started(at: Program, work: Callable[..., None], *given: Any) -> threading.Thread:
    def run() -> None:
        LOCAL.program = at
        with torch.no_grad():  # which a thread does not inherit
            work(*given)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


# ---- the functions that kernels call ----


def load(at: Pointer, mask: Any = None) -> Any:
    if isinstance(at.offset, Tensor):
        return at.base[at.offset.long()].as_subclass(Value)
    return at.base[int(at.offset)]


def store(at: Pointer, value: Tensor, mask: Any = None) -> None:
    offset, value = torch.broadcast_tensors(at.offset.long(), value.to(at.base.dtype))
    inside = slice(None) if mask is None else mask
    at.base[offset[inside]] = value[inside]


def where(condition: Any, x: Any, y: Any) -> Any:
    if isinstance(condition, Tensor) and condition.dim():
        return torch.where(condition, x, y)
    return x if condition else y


def allocate(dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Any:
    if dtype == torch.int64:
        found = [Barrier() for _ in range(shape[0])]
        return SimpleNamespace(index=lambda i: found[int(i)])
    return Shared(torch.full(list(shape), torch.nan, dtype=dtype))


def init(barrier: Barrier, count: int) -> None:
    barrier.count = barrier.pending = count


def expect(barrier: Barrier, nbytes: int, pred: Any = True) -> None:
    if pred:
        barrier.change(1, nbytes)


def arrive(barrier: Barrier, pred: Any = True) -> None:
    if pred:
        barrier.change(1, 0)


def async_load(source: Descriptor, at: Sequence[Any], barrier: Barrier, to: Shared, pred: Any = True) -> None:
    def copy() -> None:
        to.data.copy_(source.block(at)[1])
        barrier.change(0, -source.block_type.nbytes)

    if pred:
        to.data.fill_(torch.nan)
        program().add(program().copies, copy)


def async_store(target: Descriptor, at: Sequence[Any], source: Shared) -> None:
    mine = threading.get_ident()
    assert source.data.data_ptr() not in program().unfenced.get(mine, []), "stored without fence_async_shared"

    def copy() -> None:
        inside, _ = target.block(at)
        high, wide = (x.stop - x.start for x in inside)
        target.matrix[inside] = source.data[:high, :wide]

    program().stores.setdefault(mine, []).append(copy)


def store_wait(pendings: int) -> None:
    waiting = program().stores.get(threading.get_ident(), [])
    while len(waiting) > pendings:
        waiting.pop(0)()


def fence_async_shared() -> None:
    program().unfenced.pop(threading.get_ident(), None)


def warpgroup_mma(a: Shared, b: Shared, acc: Any, is_async: bool) -> Accumulator:
    earlier = acc if isinstance(acc, Accumulator) else Accumulator(acc, [])
    return Accumulator(earlier.value, [*earlier.products, (a, b)])


def warpgroup_mma_wait(outstanding: int, deps: tuple[Accumulator]) -> Any:
    acc = deps[0]
    done = len(acc.products) - outstanding
    value = acc.value
    for a, b in acc.products[: max(done, 0)]:
        value = value + a.data.float() @ b.data.float()
    return Accumulator(value, acc.products[max(done, 0) :]) if outstanding else value.as_subclass(Value)


def tcgen05_mma(a: Shared, b: Shared, acc: Shared, use_acc: bool, mbarriers: Sequence[Barrier]) -> None:
    def multiply() -> None:
        product = a.data.float() @ b.data.float()
        acc.data.copy_(acc.data + product if use_acc else product)
        for barrier in mbarriers:
            barrier.change(1, 0)

    if not use_acc:
        acc.data.fill_(torch.nan)
    program().add(program().products, multiply)


def tcgen05_commit(barrier: Barrier) -> None:
    program().add(program().products, functools.partial(barrier.change, 1, 0))


def warp_specialize(
    parts: Sequence[tuple[Any, tuple[Any, ...]]], warps: Sequence[int], registers: Sequence[int]
) -> None:
    at = program()
    errors: list[BaseException] = []

    def run(function: Callable[..., None], given: tuple[Any, ...]) -> None:
        try:
            function(*given)
            assert not at.stores.get(threading.get_ident()), "a partition ends before its stores"
        except BaseException as error:
            errors.append(error)
            at.fail()

    services = [
        started(at, at.serve, at.copies, random.Random(at.index).randrange),
        started(at, at.serve, at.products, lambda _: 0),
    ]
    partitions = [started(at, run, *part) for part in parts]
    for thread in partitions:
        thread.join()
    with at.changed:
        at.ended = True
        at.changed.notify_all()
    for thread in services:
        thread.join()
    if errors:
        raise next((x for x in errors if not isinstance(x, SynchronisationError)), errors[0])


LANGUAGE = SimpleNamespace(
    load=load, store=store, where=where, allocate_shared_memory=allocate, warp_specialize=warp_specialize,
    program_id=lambda axis: torch.tensor(program().index), cdiv=lambda x, y: -(-x // y),
    minimum=lambda x, y: torch.minimum(x, torch.as_tensor(y)), maximum=lambda x, y: x.clamp_min(y), exp2=torch.exp2, static_range=range,
    fma=lambda x, y, z: (x.double() * y.double() + z.double()).float(),
    arange=lambda start, stop, layout=None: torch.arange(start, stop), sum=lambda x, axis: x.sum(axis),
    zeros=lambda shape, dtype, layout=None: torch.zeros(shape, dtype=dtype).as_subclass(Value),
    zeros_like=torch.zeros_like, reshape=lambda x, shape: x.reshape(*shape), permute=lambda x, order: x.permute(*order),
    split=lambda x: x.unbind(-1), convert_layout=lambda x, layout, assert_trivial: x, abs=torch.abs,
    float32=torch.float32, int64=torch.int64,
    NVMMADistributedLayout=lambda *given: None, SliceLayout=lambda *given: None, BlockedLayout=lambda *given: None,
)  # fmt: skip
NAMES = {
    "gl": LANGUAGE, "tl": LANGUAGE, "async_load": async_load, "async_store": async_store,
    "tma": SimpleNamespace(store_wait=store_wait), "fence_async_shared": fence_async_shared,
    "mbarrier": SimpleNamespace(init=init, expect=expect, arrive=arrive, wait=Barrier.wait, MBarrierLayout=lambda: None),
    "warpgroup_mma": warpgroup_mma, "warpgroup_mma_wait": warpgroup_mma_wait, "allocate_tensor_memory": allocate,
    "tcgen05_mma": tcgen05_mma, "tcgen05_commit": tcgen05_commit, "TensorMemoryLayout": lambda *given, **named: None,
}  # fmt: skip


def emulated(kernel: Any) -> Callable[..., None]:
    """The kernel's Python function, with these functions in place of Gluon's and Triton's."""
    function = kernel.fn
    found: dict[str, Any] = {}
    for name in _names(function.__code__):
        value = function.__globals__.get(name)
        if name in NAMES:
            found[name] = NAMES[name]
        elif hasattr(value, "fn"):
            found[name] = emulated(value)
        elif value is not None:
            found[name] = getattr(value, "value", value)
    return types.FunctionType(function.__code__, found, function.__name__, function.__defaults__)


def _names(code: types.CodeType) -> set[str]:
    inner = (_names(x) for x in code.co_consts if isinstance(x, types.CodeType))
    return set(code.co_names).union(*inner)


def run(kernel: Any, grid: int, *given: Any, **constants: Any) -> None:
    """Run the kernel's programs one after another."""
    function = emulated(kernel)

    def argument(x: Any) -> Any:
        if isinstance(x, Tensor):
            return Pointer(x.as_strided((x.untyped_storage().nbytes() // x.element_size() - x.storage_offset(),), (1,)))
        return Descriptor(x) if hasattr(x, "block_shape") else torch.tensor(x)

    arguments = [argument(x) for x in given]
    for index in range(grid):
        LOCAL.program = Program(index)
        function(*arguments, **constants)
