"""`clipscale train ... --check`: reads what a start would read, before a job waits in a queue. Starts nothing.

A run in stages has its model built once, in the sizes of the whole run.
"""

from dataclasses import replace

from clipscale.checkpoint import CheckpointDescription, check_copy, read_description
from clipscale.checkpoint.find import candidates_of
from clipscale.common.errors import UserError
from clipscale.common.terminal import print_line
from clipscale.common.text import counted
from clipscale.config.advice import batch_exceeds_data_warning
from clipscale.config.data import DataConfig
from clipscale.config.train_config import TrainConfig
from clipscale.data.shards.counts import count_if_quick
from clipscale.data.shards.features import find_teachers
from clipscale.data.shards.listing import expand, local_shards
from clipscale.eval.suites import load_chosen_sets
from clipscale.launch.local import num_processes
from clipscale.models.encoders import describe_model
from clipscale.models.towers import build_model, image_size_and_tokenizer
from clipscale.models.weights.load_weights import completed_by_weights
from clipscale.run_folder.paths import run_folder
from clipscale.start.resolve import find_stage
from clipscale.step.chunk_sizes import check_sizes
from clipscale.tools.data.check import check_shard
from clipscale.tools.data.demo_folder import is_missing

# The number of samples that are tried in each source's first shard.
SAMPLES = 64


def main(config: TrainConfig) -> None:
    """Read the weights, the tokenizer, the evaluation sets and some samples; print what was found.

    The settings have passed their own checks. Raises UserError for the first mistake.
    """
    resumed = describe_checkpoint(config)
    if not config.model.name:  # the weights name it, before the stages replace parts of the model
        config = replace(config, model=completed_by_weights(config.model, resumed))
    for stage_config in config.stage_configs:
        describe_model(stage_config.model)
    if config.run or resumed:
        find_stage(replace(config, run=str(run_folder(config.run))), resumed)
    check_chunk_sizes(config)
    model = completed_by_weights(config.model, resumed)
    sources = config.data.train or []
    image_size, tokenizer = image_size_and_tokenizer(model)
    tokenizer([""])
    if model.weight_settings and not resumed:
        build_model(model)
    shards = sets = 0
    if not is_missing(sources):  # a missing demo set is rendered at the start
        shards = sum(check_source(source, config.data) for source in sources)
        find_teachers(config.data, config.distill.teachers, config.distill.scales)
        epoch = count_if_quick(config.data, local_shards(config.data))
        for warning in {batch_exceeds_data_warning(each, epoch) for each in config.stage_configs} - {""}:
            print_line(f"warning: {warning}", error=True)
        sets = len(load_chosen_sets(config.eval))
    if config.checkpoint.copy:
        check_copy(run_folder(config.run), config.checkpoint.copy)
    summary = f"{model.name} of {image_size} pixels, {counted(shards, 'shard')}, {counted(sets, 'evaluation set')}"
    print_line(f"checked, and nothing is started: {summary}")


def describe_checkpoint(config: TrainConfig) -> CheckpointDescription | None:
    """The description of the newest checkpoint that a start may resume, and that can be read; None for a new run."""
    candidates = candidates_of(run_folder(config.run), config.resume) if config.run or config.resume != "auto" else []
    for path in candidates:
        try:
            return read_description(path)
        except UserError:
            if path is candidates[-1]:
                raise
    return None


def check_chunk_sizes(config: TrainConfig) -> None:
    """Raise UserError for a chunk larger than the share of a process on this machine, or for a batch without shares."""
    for stage_config in config.stage_configs:
        local_batch = stage_config.batch // num_processes(stage_config)
        check_sizes(stage_config.cache.sizes, local_batch, stage_config.data.text_layout.texts_per_sample)


def check_source(source: str, config: DataConfig) -> int:
    """The shards of a source. Raises UserError where none of its first samples can be used."""
    shards = expand(source)
    findings = check_shard(shards[0], config, SAMPLES)
    if findings.samples == findings.broken.total():
        why = next(iter(findings.examples.values()), findings.damage or "it has no sample")
        raise UserError(f"data.train={source}: none of the first {SAMPLES} samples of {shards[0]} can be used: {why}")
    return len(shards)
