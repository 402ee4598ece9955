"""Warnings about settings that are allowed but probably not intended."""

from clipscale.common.units import format_count, format_decimal
from clipscale.config.train_config import TrainConfig

# At this learning rate or more, AdamW makes pretrained weights forget what they learnt.
PRETRAINING_LR = 5e-4
# Most samples of a run -> the best batch in LAION's sweeps of that length (scaling-laws-for-comparison, NeurIPS 2025).
BEST_BATCHES = {12_800_000: 2048, 64_000_000: 4096, 128_000_000: 8192, 1_280_000_000: 16384}
# The largest batch that shows a gain in published runs of more samples. DataComp and LAION-2B took up to 90k.
LARGEST_PUBLISHED_BATCH = 1 << 18
# This many times the best batch cost next to nothing in those sweeps: 90k instead of 16k, 0.1 % of ImageNet.
HARMLESS_BATCH_RATIO = 5.5


def setting_warnings(config: TrainConfig) -> list[str]:
    """Warnings about settings that are allowed but probably not intended, a line each."""
    found = []
    if config.loss.backend == "triton" and config.distill.teachers:
        found.append("loss.backend=triton: the teachers' loss has no kernels; it is computed as with loss.backend=auto")
    if config.model.image.groups == 0 and not (config.model.weights or config.model.image.weights):
        found.append("model.image.train=none locks a tower of random weights; give model.image.weights=PATH")
    lora = config.model.lora
    if lora and not config.model.weights:
        found.append(f"model.lora={lora} adapts random weights; give what it adapts, model.weights=...")
    trains_whole_tower = not lora and None in (config.model.image.groups, config.model.text.groups)
    if config.model.weights and config.optim.name == "adamw" and config.optim.lr >= PRETRAINING_LR:
        rate = "1e-6 to 1e-5 for whole towers" if trains_whole_tower else "about 1e-4 for adapters and the last layers"
        found.append(
            f"optim.lr={config.optim.lr:g} is a rate of pretraining, and the run begins with weights; usual is {rate}"
        )
    return found


def batch_exceeds_data_warning(config: TrainConfig, epoch_samples: int | None) -> str:
    """The warning for a batch larger than the data; empty for others. `epoch_samples`: as in `samples_of`."""
    batch = config.batch
    if not epoch_samples or batch <= epoch_samples or config.data.same is not None:
        return ""
    return (
        f"batch={batch} is larger than the {epoch_samples} pairs of data.train: each is {batch / epoch_samples:.3g} "
        f"times in every batch, as its own negatives; take batch={epoch_samples} or less, or data.same=caption, which "
        "leaves the copies out"
    )


def oversized_batch_warning(batch: int, samples: int | None) -> str:
    """The warning for a batch far larger than the best one of published sweeps for a run of this many samples.

    Empty if it is not, or if the number of samples is unknown.
    """
    if samples is None:
        return ""
    best = next((best for most, best in BEST_BATCHES.items() if samples <= most), None)
    if best and batch > HARMLESS_BATCH_RATIO * best:
        return (
            f"batch={format_count(batch)} for {format_decimal(samples)} samples: in published sweeps of that length "
            f"{format_count(best)} was best, and a larger "
            "batch makes too few steps; take a smaller one, or more samples"
        )
    if not best and batch > LARGEST_PUBLISHED_BATCH:
        most = format_count(LARGEST_PUBLISHED_BATCH)
        return (
            f"batch={format_count(batch)}: no published run shows a gain beyond {most}; a smaller one makes more steps"
        )
    return ""
