"""Adds up a step's memory at any batch and chunk size from its measured parts, and the host's from its layout.

All sizes in bytes, of one GPU unless the name says otherwise.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypedDict

from clipscale.data.loader.open_stream import layout_of, worker_count
from clipscale.data.order import BatchShare, default_streams
from clipscale.step.cache.kept_graphs import num_that_fit
from clipscale.tools.plan.assumed import ASSUMED
from clipscale.tools.plan.dry_run import ChunkMemory, DryRun
from clipscale.tools.plan.settings import PlanConfig

TOWERS = ("image", "text")
PHASES = ("encode", "loss", "replay", "optim")
# Bytes of each number of a feature.
FEATURE_BYTES = 4
# One number for the image and one for the text tower: rows, chunk sizes, or kept graphs.
TowerPair = tuple[int, int]


@dataclass(frozen=True)
class StepMemory:
    """Memory of one device in a step."""

    before: dict[str, float]  # live bytes at the start of each phase
    peak: dict[str, float]  # of each part of a phase: "encode image", "loss", ... A frozen tower has no "replay"
    kept: TowerPair = (0, 0)  # chunks whose graphs are kept
    kept_images: int = 0  # images whose outputs of a frozen image tower a captioner keeps

    def phase(self, name: str) -> float:
        """Peak of a phase."""
        return max(size for part, size in self.peak.items() if part.split()[0] == name)

    @property
    def highest(self) -> float:
        return max(self.peak.values())


class StepEstimate:
    """The memory of a step of `batch` samples on a rank: of each pass, the loss and the update, beyond what is live as
    it begins."""

    def __init__(self, dry_run: DryRun, batch: int, chunks: TowerPair) -> None:
        self.dry_run = dry_run
        self.batch = batch
        # Whether pixels and tokens stay on the device.
        self.stays_on_device = dry_run.config.offload == "none"
        # Rows of pictures and of texts; for a captioner rows of pairs, and 0.
        self.rows = batch, 0 if dry_run.trains_captioner else batch * dry_run.texts_per_sample
        # Rows of a chunk.
        image, text = (min(chunk, rows) for chunk, rows in zip(chunks, self.rows))
        self.sizes = image, image if dry_run.trains_captioner else text
        # Whether a tower has a single chunk.
        self.only_chunk = [size >= rows for size, rows in zip(self.sizes, self.rows)]

    @cached_property
    def passes(self) -> list[ChunkMemory]:
        """The measured memory of each tower's chunks."""
        no_gradients = [self.dry_run.is_alone and only_chunk for only_chunk in self.only_chunk]
        return [self.dry_run.passes(i, self.sizes[i], no_gradients[i], self.only_chunk[i]) for i in (0, 1)]

    @property
    def counts(self) -> list[int]:
        """Chunks of each tower."""
        shares = 1, self.dry_run.caption_share
        return [math.ceil(rows * share / size) for rows, share, size in zip(self.rows, shares, self.sizes)]

    def operations(self, replayed_share: Sequence[float]) -> float:
        """Operations of all passes. `replayed_share`: the share of each tower's chunks that are encoded twice."""
        return sum(
            count * (share * chunk.encode_operations + (chunk.replay_operations or chunk.encode_operations))
            for count, share, chunk in zip(self.counts, replayed_share, self.passes)
        )

    def memory(self, kept: TowerPair = (0, 0), kept_images: int = 0) -> StepMemory:
        """Add up the parts. `kept`: chunks whose graphs stay until their tower's second pass. `kept_images`: images
        whose outputs stay."""
        dry_run = self.dry_run
        features_per_row = 2 if dry_run.trains_captioner else 1
        features = [rows * dry_run.model.embed_dim * FEATURE_BYTES * features_per_row for rows in self.rows]
        gradients = [size if trained else 0 for size, trained in zip(features, dry_run.trained)]
        held = [self.held_bytes(i, features[i], kept[i]) for i in (0, 1)]
        held[0] += kept_images * dry_run.image_output_bytes
        live = float(dry_run.memory.state)
        before = {"encode": live}
        peak = {}
        for i, name in enumerate(TOWERS):
            live += held[i]
            encode = self.passes[i].encode
            if kept[i]:
                encode = max(encode, self.passes[i].encode_kept)
            peak[f"encode {name}"] = live + encode + dry_run.memory.gathered[i].encode
        before["loss"] = live
        peak["loss"] = live + dry_run.loss(self.batch)
        live += sum(gradients)
        before["replay"] = live
        for i, name in enumerate(TOWERS):
            if dry_run.trained[i]:
                added = dry_run.memory.single_chunk_gradients if self.only_chunk[i] else dry_run.memory.gradients
                replay = self.passes[i].replay
                if kept[i]:  # all kept graphs are freed before the first chunk is encoded again
                    replay -= self.passes[i].graph
                peak[f"replay {name}"] = live + added[i] + replay + dry_run.memory.gathered[i].replay
            live += dry_run.memory.summed_gradients[i] - held[i] - gradients[i]
        before["optim"] = live
        peak["optim"] = live + dry_run.memory.update
        return StepMemory(before, peak, kept, kept_images)

    def held_bytes(self, tower: int, features: float, kept: int) -> float:
        """Bytes that stay from a tower's first pass to its second one: features, kept graphs, inputs and weights."""
        memory = self.dry_run.memory
        size = features
        if self.stays_on_device:
            size += self.rows[tower] * self.dry_run.row_bytes[tower]
        size += memory.gathered[tower].held
        if not self.only_chunk[tower]:
            size += memory.cast_weights[tower]
        return size + kept * self.passes[tower].graph

    def budget(self, most: float) -> float:
        """The most bytes that kept graphs may take if the step is to take at most `most` bytes."""
        if_kept: dict[str, float] = {}  # how much the peaks grow once graphs are kept, without the graphs
        for name, chunk in zip(TOWERS, self.passes):
            if_kept[f"encode {name}"] = max(0, chunk.encode_kept - chunk.encode)
            if_kept[f"replay {name}"] = -chunk.graph
        highest = max(size + if_kept.get(part, 0) for part, size in self.memory().peak.items())
        return max(0.0, most - highest)

    def memory_within(self, budget: float) -> StepMemory:
        """The memory if `budget` bytes are for outputs of a frozen image tower, and what remains is for graphs."""
        size = self.dry_run.image_output_bytes
        kept_images = min(self.batch, int(budget // size)) if size else 0
        return self.memory(self.num_kept(budget - kept_images * size), kept_images)

    def num_kept(self, budget: float) -> TowerPair:
        """The number of chunks whose graphs GradCache would keep in `budget` bytes."""
        image_graph, text_graph = (chunk.graph for chunk in self.passes)
        images = num_that_fit(budget, self.counts[0], image_graph)
        texts = num_that_fit(budget, self.counts[1], text_graph, earlier=[(images, image_graph)])
        return images, texts


class HostMemory(TypedDict):
    """Host memory of a node."""

    # Part of the memory of one process and its loader workers -> bytes.
    process_bytes: dict[str, int]
    processes: int
    node_bytes: int


def host_memory(config: PlanConfig, dry_run: DryRun, batch: int, step: float) -> HostMemory:
    """Host memory of a node.

    `batch`: samples of one rank; `step`: bytes of a step on a CPU, which are in the same memory.
    """
    data = config.data
    cpu = config.hardware == "cpu"
    num_streams = data.shard_streams or default_streams(config.batch, config.ranks, None)
    streams_of_rank = len(BatchShare(batch * config.ranks, 0, config.ranks).stream_ids(num_streams))
    workers = worker_count(data, streams_of_rank)
    model = dry_run.model
    layout = layout_of(data, batch, model.image_size, model.context_length, workers, dry_run.teachers)
    pictures = 3 * config.eval.batch if config.eval.has_sets else 0  # being decoded, waiting, and in a batch
    process = {
        "process": ASSUMED.process_bytes if cpu else ASSUMED.cuda_process_bytes,
        "step": round(step) if cpu else 0,
        "batch": layout.memory_bytes(),
        "shuffle windows": streams_of_rank * max(data.shuffle, 1) * ASSUMED.picture_bytes,
        "loader workers": ASSUMED.loader_bytes + workers * ASSUMED.worker_bytes if workers else 0,
        "evaluation": pictures * 3 * dry_run.model.image_size**2,
    }
    node = config.gpus * sum(process.values())
    return {"process_bytes": process, "processes": config.gpus, "node_bytes": node}


def bytes_outside_torch(world_size: int) -> int:
    """Memory of a GPU that torch's allocator does not count."""
    return int(ASSUMED.context_bytes + (ASSUMED.nccl_bytes if world_size > 1 else 0))
