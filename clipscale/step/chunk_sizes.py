"""Samples per chunk: from the settings, from the checkpoint, or from a measurement.

For captions that are sorted by length, a chunk size of n means n * context_length tokens, so short captions come in
larger chunks (`data/loader/sorted_texts.py`).
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median_high

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from clipscale.common.batch import ChunkSizes
from clipscale.common.errors import UserError
from clipscale.common.modules import is_trainable
from clipscale.common.rng import RandomState
from clipscale.data.loader.sorted_texts import MAX_SEQUENCES
from clipscale.distributed.agreement import run_on_all_ranks
from clipscale.distributed.world import World
from clipscale.models.towers import ClipModel
from clipscale.step.cache.batch_norm import batch_norms
from clipscale.step.memory import usable_bytes

# Samples per chunk on a CPU. Larger chunks fit there too, but are not faster.
CPU_CHUNK = 256
# The smallest and the largest chunk that are measured on a GPU.
MIN_CHUNK = 16
MAX_CHUNK = MAX_SEQUENCES
# Share of the best speed that suffices. If some graphs are kept, the smallest chunk that reaches this speed is taken:
# the memory that is left over, too little for one more graph, is smaller with small chunks.
MIN_RELATIVE_SPEED = 0.95
# With more rows than this, torch's layer norm on a GPU sums the gradients of its gain and bias in parallel. Otherwise
# one block sums 32 columns, which leaves most of the GPU idle (LaunchGammaBetaBackwardCUDAKernel of torch 2.15).
MAX_SLOW_NORM_ROWS = 65_536
# Bytes that a step holds for each trained weight beside a tower's passes, at most: the gradient and DDP's bucket (4
# each), the optimizer's state (8), the moving average (4), and the weight in half precision (2).
STEP_BYTES_OF_A_WEIGHT = 22
TowerInput = Tensor | tuple[Tensor, ...]
# Draws random inputs of a tower: (model, device, samples) -> inputs.
Draw = Callable[[ClipModel, torch.device, int], TowerInput]


def check_sizes(sizes: Sequence[int | None], local_batch: int, texts_per_sample: int = 1) -> None:
    """Raise UserError for a chunk larger than the local batch.

    `sizes`: from the settings; None to measure one. `texts_per_sample`: captions and hard negatives of a sample.
    """
    for size, rows, noun in zip(sizes, (local_batch, local_batch * texts_per_sample), ("samples", "captions")):
        if size is not None and size > rows:
            raise UserError(f"cache.chunk={size}: one process holds {rows} {noun} of the batch; choose 1 to {rows}")


def batch_norm_chunk(tower: nn.Module, name: str, size: int | None, rows: int) -> int | None:
    """The chunk size of a tower that trains batch normalisation: the local batch. None for any other tower.

    Raises UserError for a smaller `size`.
    """
    norms = batch_norms(tower)
    if not norms or not is_trainable(tower):
        return None
    if size is not None and size < rows:
        raise UserError(
            f"cache.chunk={size}: the {name} tower has batch normalisation ({next(iter(norms))}), which mixes the "
            f"samples of a batch; set model.batch_norm=frozen, or cache.chunk={rows}, all that one process holds"
        )
    return rows


def agreed_chunk_sizes(
    requested: Sequence[int | None],
    model: ClipModel,
    local_batch: int,
    world: World,
    earlier: ChunkSizes | None,
    *,
    keeps_graphs: bool,
    texts_per_sample: int = 1,
    pairs: nn.Module | None = None,
) -> ChunkSizes:
    """A collective: the chunk sizes of both towers, the same on all ranks. Each is the first of these that exists:

    1. the local batch, for a tower that trains batch normalisation,
    2. the `requested` size, by the settings,
    3. the checkpoint's size, `earlier`, if it was found on the same kind of device,
    4. a measurement; see `find_chunk` for `keeps_graphs`.

    Random numbers are drawn chunk by chunk. So a resumed run needs the checkpoint's size to draw the same ones.

    `texts_per_sample`: the number of captions and hard negatives of a sample. `pairs`: a captioner's encoder. A chunk
    of it holds images with their captions, so both towers have one size.
    """
    device_name = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu"
    device = " and ".join(sorted(set(world.all_gather_object(device_name))))
    earlier_sizes = (earlier.image, earlier.text) if earlier and earlier.device == device else (None, None)
    encoders: list[tuple[str, nn.Module, Draw, int]]
    if pairs is not None:
        encoders = [("image", pairs, random_pairs, local_batch)]
    else:
        encoders = [
            ("image", model.image, random_pixels, local_batch),
            ("text", model.text, random_captions, local_batch * texts_per_sample),
        ]
    sizes = list[int]()
    for (name, encoder, draw, rows), requested_size, earlier_size in zip(encoders, requested, earlier_sizes):
        size = batch_norm_chunk(encoder, name, requested_size, rows) or requested_size or earlier_size
        if size is None:
            probe = ChunkProbe(encoder, partial(draw, model, world.device), world.device, other_step_bytes(model))
            size = measured_chunk(probe, rows, world, keeps_graphs=keeps_graphs)
        sizes.append(size)
    return ChunkSizes(sizes[0], sizes[-1], device)


def other_step_bytes(model: nn.Module) -> int:
    """Bytes that a step needs beside a tower's passes, at most: for gradients, optimizer and average of all weights."""
    return STEP_BYTES_OF_A_WEIGHT * sum(p.numel() for p in model.parameters() if p.requires_grad)


def random_pairs(model: ClipModel, device: torch.device, count: int) -> tuple[Tensor, Tensor]:
    """Random input of a captioner's encoder."""
    return random_pixels(model, device, count), random_captions(model, device, count)


def random_pixels(model: ClipModel, device: torch.device, count: int) -> Tensor:
    """Random input of the image tower: (count, 3, side, side) uint8."""
    side = model.image_size
    return torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8, device=device)


def random_captions(model: ClipModel, device: torch.device, count: int) -> Tensor:
    """Random input of the text tower: (count, context length) int64."""
    return torch.randint(1, 100, (count, model.context_length), device=device)


@dataclass(frozen=True)
class ChunkProbe:
    """Measures an encoder's passes over chunks of random inputs on a GPU."""

    encoder: nn.Module
    # Draws this many samples.
    draw: Callable[[int], TowerInput]
    device: torch.device
    # See `other_step_bytes`.
    other_step_bytes: int

    def samples_per_second(self, size: int) -> float:
        """Speed of one pass without a graph and one with a graph, after a warm-up. Clears the gradients.

        Restarts torch's record of the most memory that was allocated.
        """
        inputs = self.draw(size)
        torch.cuda.reset_peak_memory_stats()
        try:
            for _ in range(2):
                started = time.perf_counter()
                both_passes(self.encoder, inputs)
                torch.cuda.synchronize()
                seconds = time.perf_counter() - started
        finally:
            self.encoder.zero_grad()
        return size / seconds

    def leaves_enough_memory(self) -> bool:
        """Whether the last `samples_per_second` left the memory that a step needs beside it, at its peak."""
        at_peak = torch.cuda.max_memory_allocated(self.device) - torch.cuda.memory_allocated(self.device)
        return usable_bytes(self.device) - at_peak >= self.other_step_bytes

    def norm_rows(self) -> int:
        """Rows (tokens) of a sample that a layer norm normalises: the median of the norms that train; 0 without any."""
        rows = list[int]()

        def count(norm: nn.LayerNorm, arguments: tuple[Tensor, ...]) -> None:
            rows.append(arguments[0].numel() // math.prod(norm.normalized_shape))

        norms = [
            module for module in self.encoder.modules() if isinstance(module, nn.LayerNorm) and is_trainable(module)
        ]
        hooks = [norm.register_forward_pre_hook(count) for norm in norms]
        try:
            with torch.no_grad():
                self.encoder(*as_arguments(self.draw(1)))
        finally:
            for hook in hooks:
                hook.remove()
        return median_high(rows) if rows else 0


def measured_chunk(probe: ChunkProbe, rows: int, world: World, *, keeps_graphs: bool) -> int:
    """A collective: the smallest chunk size that `find_chunk` finds on any rank."""
    size = run_on_all_ranks(world, lambda: find_chunk(probe, rows, keeps_graphs=keeps_graphs))
    return min(world.all_gather_object(size))


def find_chunk(probe: ChunkProbe, rows: int, *, keeps_graphs: bool) -> int:
    """A chunk size that fits the device and is fast, forward and backward. On a CPU nothing is measured.

    1. Candidates are MIN_CHUNK, twice that and so on, at most the local batch or MAX_CHUNK. A size that is too large
       for the memory, or over 5 % slower than a smaller one (MIN_RELATIVE_SPEED), ends the list. If several sizes were
       measured, the largest is then left out, because features, loss, optimizer and the other tower's gradients need
       memory, too. It stays if it is the whole local batch and has left them enough.
    2. If some graphs are kept, the candidates with at least MIN_RELATIVE_SPEED of the best speed stay. Only the fastest
       stays if no graph is kept (`keeps_graphs` is false), or if the whole batch fits in one chunk, so that all are
       kept.
    3. If some of these have more than MAX_SLOW_NORM_ROWS rows of a layer norm, only they stay.
    4. The smallest is taken, because small chunks waste less of the memory for graphs.

    `rows`: the images, texts or pairs of the local batch.
    """
    if probe.device.type == "cpu":
        return min(CPU_CHUNK, rows)
    speeds: dict[int, float] = {}
    size = min(MIN_CHUNK, rows)
    with RandomState.now().preserved():
        while True:
            try:
                speeds[size] = probe.samples_per_second(size)
            except torch.OutOfMemoryError:
                break
            if size in (rows, MAX_CHUNK) or speeds[size] < MIN_RELATIVE_SPEED * max(speeds.values()):
                break
            size = min(2 * size, rows, MAX_CHUNK)
        norm_rows = probe.norm_rows() if speeds else 0
    torch.cuda.empty_cache()
    if not speeds:
        raise UserError(f"cache.chunk=auto: not even {size} samples fit the device; set model.grad_checkpointing=true")
    whole_batch_fits = rows in speeds
    if len(speeds) > 1 and not (whole_batch_fits and probe.leaves_enough_memory()):
        del speeds[max(speeds)]
    share = MIN_RELATIVE_SPEED if keeps_graphs and not whole_batch_fits else 1.0
    fast = [n for n, measured in speeds.items() if measured >= share * max(speeds.values())]
    return min([n for n in fast if n * norm_rows > MAX_SLOW_NORM_ROWS] or fast)


def both_passes(tower: nn.Module, inputs: TowerInput) -> None:
    """A pass without a graph and, if the tower trains, one with a graph, which adds to the tower's gradients."""
    arguments = as_arguments(inputs)
    with torch.no_grad():
        tower(*arguments)
    if is_trainable(tower):
        outputs = [out for out in tree_leaves(tower(*arguments)) if out.requires_grad]
        torch.autograd.backward(outputs, [torch.ones_like(out) for out in outputs])


def as_arguments(inputs: TowerInput) -> tuple[Tensor, ...]:
    return inputs if isinstance(inputs, tuple) else (inputs,)
