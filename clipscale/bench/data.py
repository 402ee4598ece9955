"""`clipscale bench data`: pictures to pixels per core, and shards to batches through workers, beside open_clip's transform and loader.

On a GPU it also measures the decoder there and what a model takes, to show whether the data path feeds it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import torch
from rich.console import Console

from clipscale.bench.data_work import CHUNK, GPU, ON_CPU, OWN_TOKENS, PEER, WORDS
from clipscale.bench.driver import drive
from clipscale.bench.feeding import feeding
from clipscale.bench.harness import Answer, Job
from clipscale.bench.present import Bars, Benchmark, Column, Key, extent
from clipscale.bench.record import begin, counts, device_of, processor
from clipscale.config.tools import DataBenchSettings
from clipscale.data.loader.gpu_decode import AHEAD, jpeg_decoder
from clipscale.errors import UserError

Row = dict[str, Any]

METHODS = [*(f"decode={name}" for name in ON_CPU), PEER]
HOW = {
    "decode": "pictures a second of one core: JPEG bytes in memory to the pixels of a training sample; CPU time of one thread",
    "tokens": "captions a second of one core, by words a caption: open_clip's CLIP tokenizer, and with the loader's bounds; CPU time",
    "stream": "samples a second from shards on disk through workers into whole batches, tokens included; wall clock, first batch aside",
    "loader": "pictures a second of one core that a loader prepares for data.decode=gpu: header read, crop drawn, bytes copied",
    "device": f"pictures a second of the GPU with data.decode=gpu: bytes to pixels in host memory, {AHEAD} at once",
    "step": f"samples a second that the gradient cache takes on the GPU in bf16, pixels at hand, chunks of {CHUNK} at most",
    "difference": "mean difference of decode=fast from decode=exact on the same crops, in parts of 255",
    "bytes": "memory through which workers hand over one sample, pixels and tokens",
    "pictures": "random, amplitude 1/frequency in every colour, JPEG quality 90",
}


def main(settings: DataBenchSettings, console: Console | None = None) -> list[Row]:
    """Measure, print and save. Raises UserError for settings that cannot be."""
    part, why = plan(settings)
    record, path = begin(settings.out, "data", "data", settings, how=HOW, skipped={GPU: why} if why else {})
    return drive("clipscale.bench.data_work:work", [part], record, path, console=console)


def plan(settings: DataBenchSettings) -> tuple["DataPart", str]:
    """What is measured, and why the GPU is not. Raises UserError."""
    sizes, streams = counts("sizes", settings.sizes), counts("stream", settings.stream)
    device, why = usable(settings.device)
    kinds = ("decode", "loader", *(["device"] if device else []))
    cases = [(kind, side) for kind in kinds for side in sizes]
    cases += [("step", settings.image_size)] if device and settings.model else []
    words = [("tokens", WORDS)] if sizes else []
    return DataPart(settings, device, [*cases, *words, *(("stream", side) for side in streams)]), why


def usable(setting: str) -> tuple[torch.device | None, str]:
    """The device that decodes, by `auto`, `cuda` or `cpu`; or None, and why there is none. Raises UserError for `cuda` without one."""
    if device_of(setting) == "cpu":
        return None, "asked for with device=cpu" if setting == "cpu" else "torch finds no CUDA device"
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        jpeg_decoder(device)
    except UserError as error:
        return None, str(error)
    return device, ""


@dataclass(frozen=True)
class DataPart:
    """All that is measured, (kind, side) by (kind, side)."""

    settings: DataBenchSettings
    device: torch.device | None
    """The GPU; None: not measured."""
    cases: Sequence[tuple[str, int]]
    label = "data"

    def methods(self, kind: str) -> list[str]:
        gpu = [GPU] if self.device else []
        of_kind = {
            "decode": METHODS,
            "tokens": [OWN_TOKENS, PEER],
            "stream": [*METHODS, *gpu],
            "step": [self.settings.model],
        }
        return of_kind.get(kind, [GPU])

    def names(self) -> list[Key]:
        return [(kind, side, method) for kind, side in self.cases for method in self.methods(kind)]

    def without(self, done: set[Key]) -> Self:
        measured = {key[:2] for key in done}
        return replace(self, cases=[case for case in self.cases if case not in measured])

    def jobs(self, answers: Sequence[Sequence[Answer]]) -> Iterator[Job]:
        """One process of one thread."""
        device = str(self.device) if self.device else None
        about = {"settings": asdict(self.settings), "device": device}
        probed = [(f"{kind} {side}", side) for kind, side in self.cases]
        yield Job(about, self.device.type if self.device else "cpu", probed, threads=1)

    def found(self, answers: Sequence[Sequence[Answer]]) -> Row:
        rows, skipped = [], {}
        for name, record in (item for ranks in answers for answer in ranks for item in answer["cases"].items()):
            kind, side = name.split()
            if record["status"] == "ok":
                rows += [{"kind": kind, "side": int(side)} | row for row in record.get("rows", [])]
            else:
                skipped[name] = record["reason"]
        return {"rows": rows, "skipped": skipped}


# ---- how the record is shown ----


_rate = "{:,.0f}".format
COLUMNS = (
    Column("what", "kind", words=True, case=True),
    Column("source", "side", case=True),
    Column("method", "method", words=True, case=True),
    Column("samples/s", "per_s.median", _rate),
    Column("min-max", "per_s", extent(_rate)),
    Column(f"to {PEER}", "ratio", "{:.2f}".format),
    Column("bytes a sample", "bytes", "{:,}".format),
    Column("off exact, /255", "difference", "{:.1f}".format),
)


def title(record: Row) -> str:
    return f"data path on {processor(record)}: samples a second (decode: of one core)"


def targets(record: Row) -> list[str]:
    """Does the data path give as many samples as the model takes, and which GPUs would it feed; and what was left out."""
    lines = [f"{name} was not measured: {why}" for name, why in record["skipped"].items()]
    streams = [row for row in record["rows"] if row["kind"] == "stream" and row["method"] != PEER]
    for step in (row for row in record["rows"] if row["kind"] == "step"):
        need = step["per_s"]["median"]
        for row in streams:
            gives = row["per_s"]["median"]
            share = f"{gives:,.0f} samples/s, {gives / need:.2f} of the {need:,.0f} that {step['method']} takes"
            where = f"{row['side']}-pixel sources, {row['method']}, {record['settings']['workers']} workers"
            lines.append(f"{where}: {share}")
    return lines + feeding(record)


def panels(record: Row) -> list[Bars]:
    """Rates of one core and of the whole path, by source size."""
    found = []
    for kind, heading in (("decode", "pictures to pixels, one core"), ("stream", "shards to batches")):
        rates = {(row["side"], row["method"]): row["per_s"] for row in record["rows"] if row["kind"] == kind}
        sides, methods = dict.fromkeys(side for side, _ in rates), dict.fromkeys(method for _, method in rates)
        series = {method: [rates.get((side, method)) for side in sides] for method in methods}
        found.append(Bars(f"{heading}: samples/s by pixels a side", [str(side) for side in sides], series))
    return found


BENCHMARKS = {"data": Benchmark(("kind", "side", "method"), title, COLUMNS, targets, panels)}
