"""What `train` checks before torch is imported: the settings, and what lies on this machine."""

import os

from clipscale.common import ranks
from clipscale.common.errors import UserError
from clipscale.common.files import check_writable
from clipscale.common.terminal import is_main_rank, log_warning, print_line
from clipscale.common.text import did_you_mean
from clipscale.config.advice import setting_warnings
from clipscale.config.checks import check_across_sections
from clipscale.config.parse import ALIASES
from clipscale.config.run_model import AnyModel
from clipscale.config.train_config import TrainConfig, samples_of
from clipscale.eval.published import parse_bands
from clipscale.eval.set_paths import check_set_paths
from clipscale.log.sinks import wandb_module
from clipscale.run_folder.paths import check_is_run_folder, path_or_run, run_folder, run_to_resume
from clipscale.tools.data.demo_folder import evaluation_sets, is_missing, user_folder

# Values of `resume` that are not paths.
RESUMES = ("auto", "none")
# A start whose first shard has no usable sample looks for one in the others, if an epoch has at most this many samples.
MAX_SAMPLES_SEARCHED = 50_000
# Device files of the NVIDIA, WSL and AMD drivers. Without any of them there is no GPU.
GPU_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")


def check_without_torch(config: TrainConfig) -> None:
    """Make every check that needs no torch, also of local shards. Raises UserError, prints warnings.

    Writes nothing.
    """
    check_settings(config)
    check_resume(config.resume)
    if config.run and is_main_rank():
        check_is_run_folder(run_folder(config.run))
        check_writable(run_folder(config.run))
    if ranks.under_launcher():  # all ranks look for missing shards together, later
        return
    missing = is_missing(config.data.train or ())
    check_set_paths(config.eval, rendered=evaluation_sets(user_folder()) if missing else ())
    if missing:
        return
    from clipscale.config.conditions import source_names
    from clipscale.data.shards.counts import count_if_quick
    from clipscale.data.shards.listing import local_shards
    from clipscale.data.shards.unusable import lost_pairs, why_unusable

    shards = local_shards(config.data)
    epoch_samples = count_if_quick(config.data, shards)
    if shards and epoch_samples is not None:
        captions = source_names(config.data.captions)
        if reason := why_unusable(shards[0], captions):
            if epoch_samples <= MAX_SAMPLES_SEARCHED and all(why_unusable(url, captions, most=None) for url in shards):
                raise UserError(f"data.train: no sample is usable: {reason}")
            log_warning(f"data.train: {reason}", error=True)
        elif lost := lost_pairs(shards[0], captions):
            log_warning(f"data.train: {lost}", error=True)
        for stage_config in config.stage_configs:
            samples_of(stage_config, epoch_samples)


def check_settings(config: TrainConfig) -> None:
    """Check what settings need of each other, of the environment, and of wandb. Raises UserError, prints warnings."""
    ranks.check_variables()
    if ranks.under_launcher() and not config.run:
        raise UserError("run is not set; under torchrun all ranks need the same name, run=NAME")
    check_across_sections(config)
    parse_bands(config.expected)
    if config.device == "cuda" and not any(map(os.path.exists, GPU_DRIVERS)):
        raise UserError("device=cuda: this machine has no GPU with a driver; use device=cpu or fix the driver")
    if not is_main_rank():
        return
    if config.log.wandb_mode == "online" and not wandb_module().login(prompt=False, verify=False):
        raise UserError("log=wandb: there is no key; run `wandb login`, export WANDB_API_KEY, or WANDB_MODE=offline")
    for warning in setting_warnings(config):
        print_line(f"warning: {warning}", error=True)


def check_resume(resume: str) -> None:
    """Raise UserError for a `resume` that is neither one of its words, nor a path or a run that is there."""
    if resume not in RESUMES and not path_or_run(resume).exists():
        meant = ALIASES.get(f"resume={resume}", resume)
        raise UserError(f"resume={resume}: there is no such file or run folder{did_you_mean(meant, RESUMES)}")


def check_weights(config: TrainConfig | AnyModel, *, checks_connection: bool = True) -> None:
    """Raise UserError for tags of another model. `checks_connection`: also for weights that cannot be fetched.

    May ask a server, so it comes after the other checks.
    """
    from clipscale.models.weights.hub import check_connection
    from clipscale.models.weights.model_settings import check_tags

    if isinstance(config, TrainConfig) and run_to_resume(config.run, config.resume):
        return  # the checkpoint holds all weights
    check_tags(config.model)
    if checks_connection and not ranks.under_launcher():
        check_connection(config.model)
