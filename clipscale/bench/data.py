"""`clipscale bench data`: pictures to pixels per core, and shards to batches through workers, beside open_clip's transform and loader.

The table ends with the cores that feed GPUs of several kinds.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil
from typing import Any, Self

import yaml
from rich.console import Console

from clipscale.bench.data_work import ON_CPU, OWN_TOKENS, PEER, WORDS
from clipscale.bench.harness import Answer, Job
from clipscale.bench.present import Bars, Benchmark, Column, Key, extent
from clipscale.bench.record import counts, drive, processor
from clipscale.common.hardware import HARDWARE
from clipscale.config.presets import conf_dir
from clipscale.config.sections import ModelConfig
from clipscale.config.tools import DataBenchSettings, PlanConfig
from clipscale.models.flops import forward_flops

Row = dict[str, Any]

GPUS = ("a100-80g", "h100-80g", "h200-141g", "b200-180g")
PASSES, CAPTION = 4, 24
"""Of a cached step: two forward passes, and a backward one that costs two; and tokens at which an average caption is computed."""
METHODS = [*(f"decode={name}" for name in ON_CPU), PEER]


def main(settings: DataBenchSettings, console: Console | None = None) -> list[Row]:
    """Measure, print and save. Raises UserError for settings that cannot be."""
    return drive("data", "clipscale.bench.data_work:DataWorker", [plan(settings)], settings, "data", console)


def plan(settings: DataBenchSettings) -> "DataPart":
    """What is measured. Raises UserError."""
    sizes, streams = counts("sizes", settings.sizes), counts("stream", settings.stream)
    cases = [("decode", side) for side in sizes]
    words = [("tokens", WORDS)] if sizes else []
    return DataPart(settings, [*cases, *words, *(("stream", side) for side in streams)])


@dataclass(frozen=True)
class DataPart:
    """All that is measured, (kind, side) by (kind, side)."""

    settings: DataBenchSettings
    cases: Sequence[tuple[str, int]]
    label = "data"

    def methods(self, kind: str) -> list[str]:
        return [OWN_TOKENS, PEER] if kind == "tokens" else METHODS

    def names(self) -> list[Key]:
        return [(kind, side, method) for kind, side in self.cases for method in self.methods(kind)]

    def without(self, done: set[Key]) -> Self:
        measured = {key[:2] for key in done}
        return replace(self, cases=[case for case in self.cases if case not in measured])

    def jobs(self, answers: Sequence[Sequence[Answer]]) -> Iterator[Job]:
        """One process of one thread."""
        about = {"settings": asdict(self.settings)}
        probed = [(f"{kind} {side}", side) for kind, side in self.cases]
        yield Job(about, "cpu", probed, threads=1)

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
    """What was left out, and which GPUs the data path would feed."""
    return [f"{name} was not measured: {why}" for name, why in record["skipped"].items()] + feeding(record)


def feeding(record: Row) -> list[str]:
    """For each kind of GPU and each measured size of the sources, the cores that it keeps busy: decoding and tokenising, one after another.

    The GPU's rate is its bf16 peak times `PlanConfig.utilisation`, an assumption, over the FLOPs of a cached step of `settings.model`.
    """
    model, sides = record["settings"].get("model"), record["settings"]["stream"].split(",")
    medians = {(row["kind"], row["method"], str(row["side"])): row["per_s"]["median"] for row in record["rows"]}
    tokens = next((rate for (*what, _), rate in medians.items() if what == ["tokens", OWN_TOKENS]), None)
    decoding = [(*what, side) for what in (("decode", "decode=exact"),) for side in sides]
    rates = {key[1:]: 1 / (1 / medians[key] + 1 / tokens) for key in decoding if tokens and key in medians}
    if not model or not rates:
        return []
    path = conf_dir() / "model" / f"{model}.yaml"
    flops = PASSES * sum(forward_flops(ModelConfig(**yaml.safe_load(path.read_text(encoding="utf-8"))), CAPTION))
    share, lines = PlanConfig().utilisation, []
    for gpu in GPUS:
        takes = share * HARDWARE[gpu].peak("bf16") / flops
        cores = [
            f"{ceil(takes / rate)} cores for {side}-pixel JPEGs with {method}" for (method, side), rate in rates.items()
        ]
        what = f"{takes:,.0f} samples/s of {model} (predicted, {share:.0%} of its peak)"
        lines.append(f"one {gpu} takes {what}: {', '.join(cores)}")
    return lines


def panels(record: Row) -> list[Bars]:
    """Rates of one core and of the whole path, by source size."""
    found = []
    for kind, heading in (("decode", "pictures to pixels, one core"), ("stream", "shards to batches")):
        rates = {(row["side"], row["method"]): row["per_s"] for row in record["rows"] if row["kind"] == kind}
        sides, methods = dict.fromkeys(side for side, _ in rates), dict.fromkeys(method for _, method in rates)
        series = {method: [rates.get((side, method)) for side in sides] for method in methods}
        found.append(Bars(f"{heading}: samples/s by pixels a side", [str(side) for side in sides], series))
    return found


BENCHMARK = Benchmark(("kind", "side", "method"), title, COLUMNS, targets, panels)
