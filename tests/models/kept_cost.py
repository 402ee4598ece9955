"""What a chunk's gradient costs: replayed, or with its graph kept checkpointed or whole.

`python -m tests.models.kept_cost` prints the table of docs/step.md: FLOP, time by the model of a GPU, bytes that wait between the passes,
and `python -m tests.models.kept_cost rounds=15` the processor time of small towers on one core.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn

from clipscale.config.sections import ModelConfig
from clipscale.models.towers import build_model
from clipscale.plan.dry_run import Products
from clipscale.plan.memory_tracker import MemoryTracker, cuda_autocast, without_memory
from clipscale.step.kept_graphs import CHECKPOINTED, WHOLE, checkpointing_switch
from tests.models.step_model import CHUNK, MODELS, Clock, autocast

Context = Callable[[], AbstractContextManager[object]]
KINDS = (None, CHECKPOINTED, WHOLE)
"""None: replayed."""
CAPTION = 24


@dataclass(frozen=True)
class Cost:
    flops: int
    seconds: float
    held: int
    """Bytes between the passes."""


def first_pass(tower: nn.Module, inputs: Tensor, kind: str | None, context: Context) -> Tensor | None:
    """The output with its graph; None for a chunk that will be replayed."""
    switch = checkpointing_switch(tower, ModelConfig())
    assert switch is not None
    with torch.set_grad_enabled(kind is not None), context():
        switch(kind == CHECKPOINTED)
        y = tower(inputs)
        switch(False)
    return y if kind else None


def second_pass(tower: nn.Module, inputs: Tensor, y: Tensor | None, context: Context) -> None:
    if y is None:
        with context():
            y = tower(inputs)
    y.backward(torch.empty_like(y))


def cost(tower: nn.Module, inputs: Tensor, kind: str | None, tracker: MemoryTracker) -> Cost:
    """Of both passes of one chunk, without memory."""
    tower.zero_grad()
    before = tracker.live
    with Products() as products, Clock() as clock:
        y = first_pass(tower, inputs, kind, autocast)
        held = tracker.live - before
        second_pass(tower, inputs, y, autocast)
    return Cost(products.flops, clock.seconds, held)


def costs(name: str) -> Iterator[tuple[str, dict[str | None, Cost]]]:
    """For each tower of a model, by the kind of graph."""
    with without_memory() as tracker, cuda_autocast():
        model = build_model(ModelConfig(name=name))
        side = model.image_size
        pixels = torch.empty(CHUNK, 3, side, side, dtype=torch.uint8)
        tokens = torch.ones(CHUNK, CAPTION, dtype=torch.int32)
        for kind, tower, inputs in (("image", model.image, pixels), ("text", model.text, tokens)):
            yield f"{name}, {kind}", {graph: cost(tower, inputs, graph, tracker) for graph in KINDS}


def table() -> str:
    head = "| tower | FLOP, checkpointed | whole | modelled time, checkpointed | whole | bytes of a whole graph | checkpointed |\n"
    lines = [head, "|---|--:|--:|--:|--:|--:|--:|\n"]
    for name in MODELS:
        for tower, found in costs(name):
            replayed, small, whole = (found[kind] for kind in KINDS)
            shares = [f"{one.flops / replayed.flops:.3f}" for one in (small, whole)]
            shares += [f"{one.seconds / replayed.seconds:.3f}" for one in (small, whole)]
            lines.append(
                f"| {tower} | {' | '.join(shares)} | {whole.held / 2**30:.1f} GiB | {small.held / whole.held:.3f} |\n"
            )
    return "".join(lines)


def timed(rounds: int) -> str:
    """Processor time on one core, kinds interleaved: medians of the ratios to a replay, round by round."""
    torch.set_num_threads(1)
    text = {"context_length": 77, "vocab_size": 49408, "width": 384, "heads": 6, "layers": 6}
    vision = {"image_size": 224, "layers": 6, "width": 384, "head_width": 64, "patch_size": 32}
    model = build_model(ModelConfig(architecture={"embed_dim": 256, "vision_cfg": vision, "text_cfg": text}))
    pixels = torch.randint(0, 256, (32, 3, 224, 224), dtype=torch.uint8)
    tokens = torch.randint(1, 49000, (32, CAPTION))
    lines = []
    for name, tower, inputs in (("image", model.image, pixels), ("text", model.text, tokens)):
        seconds: dict[str | None, list[float]] = {kind: [] for kind in KINDS}
        for number in range(rounds + 1):
            for kind in KINDS if number % 2 else KINDS[::-1]:
                started = time.process_time()
                second_pass(tower, inputs, first_pass(tower, inputs, kind, nullcontext), nullcontext)
                if number:
                    seconds[kind].append(time.process_time() - started)
        for kind in KINDS[1:]:
            ratios = [own / other for own, other in zip(seconds[kind], seconds[None])]
            lines.append(f"{name}, {kind}: {median(ratios):.3f} of a replay ({min(ratios):.3f} to {max(ratios):.3f})\n")
    return "".join(lines)


if __name__ == "__main__":
    options = dict(word.split("=") for word in sys.argv[1:])
    print(timed(int(options["rounds"])) if options else table(), end="")
