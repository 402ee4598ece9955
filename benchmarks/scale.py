"""What one machine can show of many: the start of a run, its control messages, and what a step sends.

    python benchmarks/scale.py
    python benchmarks/scale.py shards=500k ranks=1k files= processes= steps=

    start     one of so many ranks, simulated: lists shards at addresses, takes their counts from an index, orders them,
              and finds its place in a checkpoint. Rank 0 reads the index; the others get the counts from it. A data
              worker gets the result
    files     the same of files on this machine's disk: rank 0 looks at each
    message   an all-reduce of one integer over real gloo processes, and the files that a process opens for its group
    step      a step of the trainer in torch's fake process group, which counts what a rank sends, and sends nothing

docs/benchmarks/scale.md explains the figures.
"""

import json
import multiprocessing
import os
import pickle
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil
import torch
import torch.distributed as dist
from measure import Columns, Meter, Row, counts, main, resident
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.multiprocessing import start_processes
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from webdataset import TarWriter

from clipscale.cli.compose import compose_settings
from clipscale.cli.train_verb import with_defaults
from clipscale.config.data import DataConfig
from clipscale.data.loader.open_stream import order_shards, start_positions
from clipscale.data.loader.position import DataPosition, StreamPosition
from clipscale.data.loader.shard_reader import OrderedShards
from clipscale.data.order import BatchShare
from clipscale.data.shards import index
from clipscale.distributed.world import World
from clipscale.start.start_run import start_run

DEFAULTS = {
    "shards": "1k,41k,232k,500k",
    "ranks": "1,512,1k",  # of `start`
    "files": "500k",  # shards on the disk, for the largest number of ranks
    "processes": "2,4,8,16,32",  # of `message`
    "steps": "8,64,512,1k",  # ranks of `step`
    "repeats": 3,
    "out": "runs/bench",
}
# Samples of a rank in a batch of `start`: 2M over 1,024.
LOCAL = 2048
# Samples of a rank in a batch of `step`. Bytes of features are in proportion.
PAIRS = 16
MESSAGES = 50


def plan(settings: SimpleNamespace) -> tuple[str, list[Row]]:
    ranks = counts(settings.ranks)
    starts = [("start", shards, size) for shards in counts(settings.shards) for size in ranks]
    starts += [("files", shards, ranks[-1]) for shards in counts(settings.files)]
    jobs: list[Row] = [
        {"kind": kind, "shards": n, "ranks": size, "repeats": settings.repeats} for kind, n, size in starts
    ]
    jobs += [{"kind": "message", "ranks": size} for size in counts(settings.processes)]
    jobs += [{"kind": name, "ranks": size} for size in counts(settings.steps) for name in ("ring", "gather")]
    return "scale-cpu", jobs


def measure(kind: str, **job: Any) -> list[Row]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
        if kind in ("start", "files"):
            base = f"{folder}/set" if kind == "files" else "https://host.example/laion2b/part-0"
            return [{"figures": start(base, **job)}]
        return [{"figures": message(folder, **job) if kind == "message" else step(folder, exchange=kind, **job)}]


# ---- the start of a run ----


def start(base: str, shards: int, ranks: int, repeats: int) -> Row:
    make_index(base, shards)
    config = DataConfig(train=[f"{base}/{{000000..{shards - 1:06d}}}.tar"])
    share = BatchShare(LOCAL * ranks, 0, ranks)
    first, processor, others, sizes = [], [], [], []
    for _ in range(repeats):
        meter = Meter(torch.device("cpu"))
        begun = time.process_time()
        answers: list[Any] = []  # of rank 0, to the others
        resumed(config, share, partial(kept, answers))
        processor.append(time.process_time() - begun)
        meter("first")
        from_rank_0 = iter(answers)
        ordered = resumed(config, share, lambda _, replies=from_rank_0: next(replies))
        meter("others")
        first.append(meter.seconds["first"])
        others.append(meter.seconds["others"])
        sizes.append(meter.peak["first"] - meter.before["first"])
    sent = pickle.dumps(ordered)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        worker = pool.apply(worker_bytes, [sent])
    figures = {"rank 0, s": median(first), "of a processor, s": median(processor), "others, s": median(others)}
    return figures | {"MB": sizes[0] / 1e6, "a worker, MB": worker / 1e6, "sent to it, MB": len(sent) / 1e6}


def kept(answers: list[Any], work: Callable[[], Any]) -> Any:
    answers.append(work())
    return answers[-1]


def make_index(base: str, shards: int) -> None:
    """Index shards at addresses, which are not looked at, or empty files."""
    names = (f"{number:06d}.tar" for number in range(shards))
    if not base.startswith("https:"):
        Path(base).mkdir()
        for number in range(shards):
            (Path(base) / f"{number:06d}.tar").touch()
            os.utime(f"{base}/{number:06d}.tar", ns=(0, 0))
    with index._writing(index.index_paths(base)[-1]) as database:
        database.execute("BEGIN")
        rows = (
            (name, 0, f"0{index.RULE_MARK}", 9000 + number % 1000, None, "", None) for number, name in enumerate(names)
        )
        database.executemany("INSERT INTO shards VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
        database.execute("COMMIT")


def resumed(config: DataConfig, share: BatchShare, once: Any) -> OrderedShards:
    """What a rank that resumes does with its shards before it opens one. No server is asked whether they exist."""
    with patch("clipscale.data.shards.listing.probe_objects", return_value={}):
        shards = order_shards(config, share, 0, None, once)
    at = {stream: StreamPosition(3, 100) for stream in range(shards.order.num_streams)}
    start_positions(shards, DataPosition(shards.order_fingerprint, len(at), at), share)
    return shards


def worker_bytes(sent: bytes) -> int:
    """Memory that a rank's shards take in a data worker that reads an epoch."""
    before = resident("VmRSS")
    shards = pickle.loads(sent)
    next(shards.order.segments(0, 3))
    return resident("VmRSS") - before


# ---- control messages ----


def message(folder: str, ranks: int) -> Row:
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"  # as `init_world` sets it
    start_processes(talk, (folder, ranks), ranks, start_method="fork")
    figures: Row = json.loads(Path(f"{folder}/figures").read_text())
    return figures


def talk(rank: int, folder: str, ranks: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    world = World(rank, ranks, torch.device("cpu"))
    before = psutil.Process().num_fds()
    times = []
    for _ in range(1 + MESSAGES):
        begun = time.perf_counter()
        world.all_reduce_max(rank)
        times.append(time.perf_counter() - begun)
    files = world.all_gather_object(psutil.Process().num_fds() - before)
    if rank == 0:
        figures = {"first, ms": 1e3 * times[0], "ms": 1e3 * median(times[1:]), "files of a process": max(files)}
        Path(f"{folder}/figures").write_text(json.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()


def fit(rows: list[Row]) -> None:
    """Add the least-squares line through all messages to each."""
    points = {row["ranks"]: row["figures"] for row in rows if row["kind"] == "message" and "figures" in row}
    if len(points) > 1:
        slope, constant = np.polyfit(list(points), [figures["ms"] for figures in points.values()], 1)
        for figures in points.values():
            figures |= {"fit: ms": constant, "+ ms a rank": slope}


# ---- a step ----


class Sent(TorchDispatchMode):
    """Counts what is given to process groups: messages, and thousands of bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.figures = Counter[str]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            name = function.name().removeprefix("c10d::").strip("_")
            if name == "recv":  # the fake group leaves it as it was
                tensors[0].zero_()
            else:
                name = name if tensors[0].is_floating_point() else "vote"
                self.figures.update({name: 1, f"{name}, kB": min(tensor.nbytes for tensor in tensors) / 1e3})
        return function(*args, **(kwargs or {}))


class FakeWorld(World):
    """One rank, all of whose messages go to the fake group."""

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value] * self.size

    @property
    def cpu_group(self) -> dist.ProcessGroup:
        return dist.distributed_c10d._get_default_group()

    @property
    def rank0_group(self) -> dist.ProcessGroup:
        return self.cpu_group


def summed(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A sum of gradients by the fake group, whose work has no result."""
    dist.all_reduce(bucket.buffer())
    return noop_hook(None, bucket)


def step(folder: str, ranks: int, exchange: str) -> Row:
    with TarWriter(f"{folder}/0.tar") as archive:
        for number in range(max(2048, 2 * ranks)):
            archive.write({"__key__": f"{number}", "png": np.zeros((8, 8, 3), np.uint8), "txt": "a photograph"})
    words = ["plan=false", "device=cpu", "model=tiny", "data.workers=0", "data.shuffle=1", "eval.sets=[]"]
    words += [f"data.train={folder}/0.tar", f"batch={PAIRS * ranks}", f"samples={PAIRS * ranks}", f"run={folder}/run"]
    config = with_defaults(
        compose_settings("train", [*words, f"loss.exchange={exchange}", f"cache.chunk={PAIRS // 2}"])
    )
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        with patch("clipscale.distributed.parallel._sum", summed):
            world = FakeWorld(0, ranks, torch.device("cpu"))
            run = start_run(config, world)
            with Sent() as sent:
                run.run_step()
    finally:
        dist.destroy_process_group()
    run.stream.close()
    parameters = sum(p.numel() for p in run.train_step.model.parameters())
    return {**sent.figures, "parameters": parameters, "width": run.train_step.model.embed_dim}


def figures_of(row: Row) -> str:
    return ", ".join(f"{name} {value:,.3g}" for name, value in row["figures"].items())


COLUMNS: Columns = {
    "what": lambda row: row["kind"],
    "shards": lambda row: f"{row['shards']:,}",
    "ranks": lambda row: f"{row['ranks']:,}",
    "figures": figures_of,
}

if __name__ == "__main__":
    main(DEFAULTS, plan, measure, COLUMNS, fit)
