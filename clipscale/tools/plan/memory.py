"""Predicts a step's memory at any batch and chunk size from a few dry-run steps, and the host's from its layout.

b: samples of one rank, c: samples of a chunk. All sizes in bytes, of one GPU unless the name says otherwise.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from clipscale.common.record import Record
from clipscale.data.loader.captions import GRAIN
from clipscale.data.loader.stream import layout_of, worker_count
from clipscale.data.order import BatchShare, default_streams
from clipscale.models.families import family_of
from clipscale.models.towers import ClipModel
from clipscale.tools.plan import ASSUMED
from clipscale.tools.plan.dry_run import TOWERS, Bytes, DryRun
from clipscale.tools.plan.settings import PlanConfig

PHASES = ("encode", "loss", "replay", "optim")
Chunks = tuple[int | None, int | None]
"""Chunk sizes of the image and the text tower; None: the whole local batch (batch normalisation)."""


@dataclass(frozen=True)
class StepMemory:
    """Memory of one device in a step."""

    before: dict[str, float]  # live bytes at the start of each phase
    peak: dict[str, float]  # of each stage: "encode", "encode image", "loss", ... A frozen tower has no "replay"
    kept: tuple[int, int] = (0, 0)  # image and text chunks whose graphs are kept

    def phase(self, name: str) -> float:
        """Peak of a phase."""
        return max(size for stage, size in self.peak.items() if stage.split()[0] == name)

    @property
    def highest(self) -> float:
        return max(self.peak.values())


class MemoryModel:
    """Memory of a step at any batch, of a model of any depth.

    With given chunks the peak of every part of a step is a straight line in b and in the number of blocks.
    """

    def __init__(self, runs: list[tuple[int, DryRun]], captions: float = 1.0) -> None:
        """`runs`: by `dry_runs`. `captions`: tokens of an average caption as a share of the context. More sorted ones
        fit a chunk."""
        (_, self.run), *self.longer = runs
        self.captions = captions
        self._step = cache(DryRun.step)
        self._loss = cache(self.run.loss)
        self.graph = cache(self._graph)

    def whole(self, bytes_of: Callable[[DryRun], Bytes]) -> Bytes:
        """What the model with all its blocks takes, by what it takes with few."""
        short = bytes_of(self.run)
        total = dict(short)
        for left_out, run in self.longer:
            for name, size in bytes_of(run).items():
                if name in total:
                    total[name] += left_out * (size - short[name])
        return total

    def _graph(self, tower: int, size: int) -> float:
        """Bytes of the graph of one chunk of a tower (0 or 1) by its rows."""
        return self.whole(lambda run: {"": run.graph(tower, size)})[""]

    def sizes(self, batch: int, chunks: Chunks) -> tuple[int, int]:
        """The rows of an image and of a text chunk of a batch."""
        texts = batch * self.run.captions
        image, text = chunks
        return min(image or batch, batch), min(text or texts, texts)

    def at(self, batch: int, chunks: Chunks, *, resident: bool = False) -> StepMemory:
        """A step of `batch` samples on a rank, without kept graphs.

        `resident`: pixels and tokens stay on the device (offload=none).
        """
        chunk = max([c for c in chunks if c] or [64])
        near = min(batch, 2 * chunk)

        def step(run: DryRun, batch: int) -> Bytes:
            return self._step(run, self.sizes(batch, chunks), batch, resident=resident)

        total = self.whole(lambda run: step(run, near))
        if batch > near:
            start, end = step(self.run, near), step(self.run, near + chunk)
            total |= {name: size + (batch - near) / chunk * (end[name] - start[name]) for name, size in total.items()}
        before = {phase: total[f"before {phase}"] for phase in PHASES}
        peak: dict[str, float] = {}
        for part, size in total.items():
            phase, tower, *_ = [*part.split(), ""]
            if phase in PHASES:
                stage = f"{phase} {tower}" if tower in TOWERS else phase
                peak[stage] = max(size, peak.get(stage, 0))
        return StepMemory(before, peak | {"loss": before["loss"] + self.loss(batch)})

    def counts(self, batch: int, chunks: Chunks) -> list[int]:
        """Image and text chunks of a batch."""
        image, text = self.sizes(batch, chunks)
        return [math.ceil(batch / image), math.ceil(batch * self.run.captions * self.captions / text)]

    def loss(self, batch: int) -> int:
        """The loss and its gradients, beyond the features."""
        size = ASSUMED.linear_from
        if batch <= 2 * size:
            return self._loss(batch)
        low, high = self._loss(size), self._loss(2 * size)
        return round(high + (batch / size - 2) * (high - low))

    def graphs(self, batch: int, chunks: Chunks) -> list[float]:
        """The bytes of the graph of one chunk of each tower; 0 of a frozen one."""
        return [self.graph(tower, size) for tower, size in enumerate(self.sizes(batch, chunks))]

    def room(self, step: StepMemory, batch: int, chunks: Chunks, most: float) -> float:
        """The bytes for kept graphs with which a step, by itself as `step`, takes at most `most`.

        A tower's kept graphs are used up before the first of its chunks is encoded again.
        """
        again = {f"replay {name}": size for name, size in zip(TOWERS, self.graphs(batch, chunks))}
        return max(0.0, most - max(size - again.get(stage, 0) for stage, size in step.peak.items()))

    def with_kept(self, step: StepMemory, batch: int, chunks: Chunks, keep: float) -> StepMemory:
        """Adds the graphs that GradCache would keep in `keep` bytes. A graph lives until its tower's second pass."""
        if keep == 0:
            return step
        counts = self.counts(batch, chunks)
        each = self.graphs(batch, chunks)
        image = min(counts[0], int(keep // max(each[0], 1)))
        # Of a tower that keeps none, one graph at a time is built beside those of the other.
        text = min(counts[1], max(0, int((keep - max(1, image) * each[0]) // max(each[1], 1))))
        kept = (image if each[0] else 0, text if each[1] else 0)  # a frozen tower has no graphs
        held = [number * size for number, size in zip(kept, each)]
        # `step` has the graph of one chunk already: in the last forward pass if it is kept, and in the second pass.
        last = [size if kept == count else 0 for size, kept, count in zip(each, kept, counts)]
        extra = {
            "encode image": held[0] - last[0],
            "encode text": sum(held) - last[1],
            "loss": sum(held),
            "replay": sum(held),
            "replay image": max(0, held[0] - each[0]) + held[1],
            "replay text": max(0, held[1] - each[1]),
        }
        peak = {stage: size + extra.get(stage, 0) for stage, size in step.peak.items()}
        # The forward pass of a kept chunk leaves its graph behind, so none of its memory is freed when it ends.
        for stage, size in (("encode image", held[0]), ("encode text", sum(held))):
            peak[stage] = max(peak[stage], step.before["encode"] + size)
        before = dict(step.before)
        for phase in ("loss", "replay"):
            before[phase] += sum(held)
        return StepMemory(before, peak, kept)


def caption_width(model: ClipModel) -> int:
    """Tokens at which the text tower computes a caption, on average: the whole context, or fewer of sorted captions."""
    encoder = model.text.encoder
    if not family_of(encoder).cuts_captions(encoder):
        return model.context_length
    return min(model.context_length, round(ASSUMED.caption_tokens + GRAIN / 2))


def host_memory(config: PlanConfig, run: DryRun, batch: int, step: float = 0) -> Record:
    """Host memory of a node: `process_bytes`, of one process with its loader workers, by what holds them; `processes`
    and `node_bytes`.

    `batch`: samples of one rank; `step`: what a step takes, on a CPU in the same memory.
    """
    data = config.data
    ranks = config.gpus * config.nodes
    cpu = config.hardware == "cpu"
    streams = data.shard_streams or default_streams(config.batch, ranks, None)
    streams_of_rank = len(BatchShare(batch * ranks, 0, ranks).streams(streams))
    workers = worker_count(data, streams_of_rank)
    layout = layout_of(data, batch, run.side, run.context_length, workers)
    pictures = 3 * config.eval.batch if config.eval.has_sets else 0  # being decoded, waiting, and in a batch
    process = {
        "process": ASSUMED.process if cpu else ASSUMED.cuda_process,
        "step": round(step) if cpu else 0,
        "batch": layout.memory_bytes(),
        "shuffle windows": streams_of_rank * max(data.shuffle, 1) * ASSUMED.picture,
        "loader workers": ASSUMED.loader + workers * ASSUMED.worker if workers else 0,
        "evaluation": pictures * 3 * run.side**2,
    }
    node = config.gpus * sum(process.values())
    return {"process_bytes": process, "processes": config.gpus, "node_bytes": node}


def outside_torch(ranks: int) -> int:
    """Memory of a GPU that torch's allocator does not count."""
    return int(ASSUMED.context + (ASSUMED.nccl if ranks > 1 else 0))
