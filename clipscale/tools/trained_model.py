"""Loads the trained model of a run, or the model of any weights. It is not in `models/`, which knows no run."""

from dataclasses import replace
from pathlib import Path

from clipscale import checkpoint
from clipscale.common.errors import UserError, to_user_error
from clipscale.common.ranks import OnRank0
from clipscale.config.model import ModelConfig
from clipscale.models.towers import ClipModel, build_model
from clipscale.models.weights import adapters
from clipscale.models.weights.load_weights import completed_by_weights, without_weights
from clipscale.models.weights.model_settings import with_checkpoints_of_runs
from clipscale.run_folder.chosen_checkpoint import find_checkpoint


def load_model(run_dir: Path, which: str = "latest", weights: str = "trained") -> tuple[ClipModel, ModelConfig, int]:
    """The model of a run's checkpoint; see `load_checkpoint`. `which`: as `find_checkpoint` takes it.

    Raises UserError where there is no such checkpoint or average.
    """
    return load_checkpoint(find_checkpoint(run_dir, which), weights)


def load_checkpoint(path: Path, weights: str = "trained") -> tuple[ClipModel, ModelConfig, int]:
    """The trained model of a checkpoint, in evaluation mode on the CPU, its settings, and its step.

    `weights` is `trained` or `ema`, their moving average. Adapters are merged. Raises UserError for a damaged
    checkpoint, and where there is no average.
    """
    with to_user_error(f"checkpoint {path} holds no model"):
        state = checkpoint.load(path, entries=("model", "ema"))
        if weights == "ema" and not state.ema:
            raise UserError(f"weights=ema: {path} holds no average; take weights=trained, or train with ema=0.9999")
        config = replace(without_weights(ModelConfig.from_values(state.model_config)), lora=0)
        model = build_model(config)
        trained = state.model | (state.ema["weights"] if state.ema and weights == "ema" else {})
        model.load_state_dict(adapters.merge_run_adapters(trained))
        return model.eval(), config, int(state.step)


def load_run_or_weights(
    run_dir: Path | None, which: str, weights: str, config: ModelConfig, on_rank0: OnRank0
) -> tuple[ClipModel, ModelConfig, int | None]:
    """A run's model as from `load_model`; without a run the one that `config` describes, and no step.

    Rank 0 finds the checkpoint, which is then the same on every rank even if the run saves another one meanwhile.
    Raises UserError.
    """
    if run_dir is not None:
        return load_checkpoint(on_rank0(lambda: find_checkpoint(run_dir, which)), weights)
    config = on_rank0(lambda: completed_by_weights(config))
    found = on_rank0(lambda: with_checkpoints_of_runs(config))
    return build_model(found).eval(), config, None
