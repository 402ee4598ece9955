"""`clipscale data check`: reads every sample as training does, and reports what is broken, by its reason."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from clipscale.common.cpu import cores
from clipscale.common.terminal import announce_task, tracked
from clipscale.common.text import counted
from clipscale.common.units import format_bytes
from clipscale.config.conditions import source_names
from clipscale.config.data import DataConfig
from clipscale.data.addresses import basename
from clipscale.data.filters import parse_selection, sample_name
from clipscale.data.order import CounterRNG
from clipscale.data.picture import Picture
from clipscale.data.sample import (
    IMAGE_TYPES,
    BrokenSampleError,
    dotted_names_message,
    dotted_pictures,
    image_bytes,
    size_limits_of,
)
from clipscale.data.shards import index
from clipscale.data.shards.reader import ReadFailure, read_shard
from clipscale.data.shards.subset import subset_of
from clipscale.data.shards.unusable import RULE, json_remedy, why_unusable
from clipscale.log.table import TextTable, show
from clipscale.tools.data.make_index import expand_sources
from clipscale.tools.data.settings import CheckSettings


@dataclass
class Findings:
    """A shard's samples, and what is wrong with them."""

    samples: int = 0
    # The sum of the samples' weights in `data.sample_weights`.
    weight: float = 0.0
    bytes: int = 0
    # Reason -> samples.
    broken: Counter[str] = field(default_factory=Counter)
    # Reason -> the first such sample, and what is wrong with it.
    examples: dict[str, str] = field(default_factory=dict)
    # Pictures that are not read, because their names have further dots, and the first sample with such.
    dotted_pictures: int = 0
    dotted_example: str = ""
    # Why the shard could not be read to its end; empty if it could.
    damage: str = ""


def main(sources: Sequence[str], settings: CheckSettings) -> int:
    """Print the table. Returns 1 if there is no sample, if a shard is damaged, or if a sample is broken.

    A sample that a filter leaves out is not broken. Raises UserError.
    """
    urls = expand_sources(sources)
    announce_task(f"checking {counted(len(urls), 'shard')}", error=True)
    checked = index.map_shards(partial(check_shard, config=settings.data), cores(), urls)
    shards = list(tracked(checked, "checking shards", len(urls)))
    samples = sum(shard.samples for shard in shards)
    broken = sum((shard.broken for shard in shards), Counter[str]())
    examples = {reason: text for shard in reversed(shards) for reason, text in shard.examples.items()}
    damaged = [("damaged shard", url, shard.damage) for url, shard in zip(urls, shards) if shard.damage]
    rows = [
        ("samples", str(samples), format_bytes(sum(shard.bytes for shard in shards))),
        ("usable", str(samples - broken.total()), ""),
    ]
    if settings.data.sample_weights:
        rows.append(("samples in an epoch", f"{sum(shard.weight for shard in shards):.1f}", "by data.sample_weights"))
    if not samples and not damaged:
        rows.append(("no sample", "", RULE))
    if cut := sum(shard.dotted_pictures for shard in shards):
        example = next(shard.dotted_example for shard in shards if shard.dotted_example)
        rows.append(("pictures not read", str(cut), example))
    rows += [(reason, str(count), examples[reason]) for reason, count in broken.most_common()]
    show(TextTable(("", "", ""), rows + damaged))
    return int(not samples or bool(damaged) or not all(reason.startswith("filter_") for reason in broken))


def check_shard(url: str, config: DataConfig, most: int | None = None) -> Findings:
    """Decode the shard's samples as training does. `most`: only this many of the first samples."""
    findings = Findings()
    problem = ReadFailure()
    chosen = parse_selection(config)
    size_limits = size_limits_of(IMAGE_TYPES, chosen.extensions_to_read())
    for sample in islice(read_shard(url, problem, size_limits=size_limits, subset=subset_of(config)), most):
        findings.weight += min(1.0, sample.keep_probability)
        if sample.repeat:
            continue
        findings.samples += 1
        findings.bytes += sample.num_bytes
        if cut := dotted_pictures(sample.dotted_extensions):
            findings.dotted_pictures += len(cut)
            if not findings.dotted_example:
                findings.dotted_example = f"{sample_name(sample)} {dotted_names_message(sample.dotted_extensions)}"
        try:
            if sample.error:
                raise BrokenSampleError(sample.error, sample.detail)
            captions = chosen.draw(sample.members, CounterRNG(sample.index))
            chosen.check(sample, [caption for caption, _ in captions])
            chosen.draw_negatives(sample.members, CounterRNG(sample.index))
            Picture.read(image_bytes(sample.members)).decode()
        except BrokenSampleError as error:
            findings.broken[error.reason] += 1
            findings.examples.setdefault(error.reason, f"{basename(url)}/{sample.key}: {error}"[:200])
    if findings.broken.keys() & {"no_image", "no_caption"}:
        names = source_names(config.captions)
        holds = why_unusable(url, names)
        findings.examples |= {reason: holds for reason in ("no_image", "no_caption") if holds}
        if not holds and "no_caption" in findings.broken and (remedy := json_remedy(url, names, also=names)):
            findings.examples["no_caption"] += f"; {remedy}"
    if problem.reason:
        findings.damage = f"{problem.reason}: {problem.detail}".replace(f"{url}: ", "")
    return findings
