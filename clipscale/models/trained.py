"""Loads models to use them: of a run's checkpoint, or of any weights that the settings name."""

from collections.abc import Callable
from pathlib import Path

from clipscale import checkpoint
from clipscale.common.errors import UserError
from clipscale.config.parse import typed
from clipscale.config.sections import ModelConfig
from clipscale.models.towers import ClipModel, build_model
from clipscale.models.weights import described, without_weights


def load_model(run: Path, which: str = "latest", weights: str = "trained") -> tuple[ClipModel, ModelConfig, int]:
    """The trained model of a run, in evaluation mode on the CPU, its settings, and the step of its checkpoint.

    `which` is `latest`, a step number, or a path; `weights` is `trained` or `ema`, their moving average. Raises
    UserError where there is no such checkpoint or average.
    """
    path = checkpoint.locate(run, which)
    state = checkpoint.load(path, parts=("model", "ema"))
    if weights == "ema" and not state.get("ema"):
        raise UserError(f"weights=ema: {path} holds no average; take weights=trained, or train with ema=0.9999")
    config = without_weights(typed(ModelConfig, state["model_config"]))
    model = build_model(config)
    model.load_state_dict(state["model"] | (state["ema"]["weights"] if weights == "ema" else {}))
    return model.eval(), config, int(state["step"])


OnMain = Callable[[Callable[[], ModelConfig]], ModelConfig]
"""Calls a function on the first rank, which downloads weights, while the others wait for its result."""


def load_any(
    run: Path | None, which: str, weights: str, config: ModelConfig, on_main: OnMain
) -> tuple[ClipModel, ModelConfig, int | None]:
    """A run's model as from `load_model`; without a run the one that `config` describes, and no step.

    Raises UserError.
    """
    if run is not None:
        return load_model(run, which, weights)
    config = on_main(lambda: described(config))
    return build_model(config).eval(), config, None
