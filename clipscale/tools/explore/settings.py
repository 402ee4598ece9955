"""The settings of `clipscale explore`."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from clipscale.common.errors import UserError
from clipscale.config import sections
from clipscale.config.data import DataConfig
from clipscale.config.run_model import EVAL_MODEL_SETTINGS, AnyModel, check_one_model
from clipscale.config.setting import section, setting
from clipscale.run_folder.chosen_checkpoint import find_checkpoint
from clipscale.run_folder.paths import existing_run


@dataclass(frozen=True)
class ExploreConfig(AnyModel):
    """`clipscale explore`: a local page that searches what `embed` has written."""

    USED_SETTINGS: ClassVar = {
        "model": EVAL_MODEL_SETTINGS,
        "data": "train",
    }

    weights: str = setting("trained", sections.WEIGHTS_HELP, choices=sections.WEIGHTS)
    port: int = setting(8765, "Port of the page; 0: a free one.", least=0, most=65535)
    data: DataConfig = section(DataConfig)


def check_explore(config: ExploreConfig) -> None:
    """Raise UserError for a model that is not given, or given twice, and for no folder of `embed` or several."""
    check_one_model(config, config.weights)
    run = existing_run(config.run) if config.run else None
    folders = config.data.train or []
    if len(folders) != 1:
        raise UserError(f"data.train={folders}: give one folder of `clipscale embed`, data=PATH")
    from clipscale.tools.embed.arrays import open_embedded_set

    open_embedded_set(Path(folders[0]).expanduser())
    if run:
        find_checkpoint(run, config.which)
