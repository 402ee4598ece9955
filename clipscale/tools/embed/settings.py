"""The settings of `clipscale embed`."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from clipscale.common.errors import UserError
from clipscale.common.files import check_writable
from clipscale.config import sections
from clipscale.config.data import DataConfig
from clipscale.config.run_model import EVAL_MODEL_SETTINGS, AnyModel, check_one_model
from clipscale.config.setting import section, setting
from clipscale.run_folder.chosen_checkpoint import find_checkpoint
from clipscale.run_folder.paths import existing_run

# The features of a sample, in the order of a row.
IMAGE, TEXT = SIDES = ("image", "text")


@dataclass(frozen=True)
class EmbedConfig(AnyModel):
    """`clipscale embed`: features of the pictures and texts in `data.train`, by a run or any `model.weights`."""

    USED_SETTINGS: ClassVar = {
        "model": EVAL_MODEL_SETTINGS,
        "data": "train captions",
        "launch": "procs timeout_s",
    }

    weights: str = setting("trained", sections.WEIGHTS_HELP, choices=sections.WEIGHTS)
    out: str = setting("", "Folder to write; complete files in it are kept.")
    teacher: str = setting(
        "", "Write shards with both features as a further member TEACHER.npy, for `distill.teachers`; empty: arrays."
    )
    dtype: str = setting("float16", "Dtype of the features.", choices=("float16", "float32"))
    batch: int = setting(256, "Pictures or texts encoded at once.", least=1)
    data: DataConfig = section(DataConfig)
    launch: sections.LaunchConfig = section(sections.LaunchConfig)


def check_embed(config: EmbedConfig) -> Path | None:
    """The folder of the run; None for weights of another source. Raises UserError."""
    if not config.out:
        raise UserError("out is not set; give the folder to write, out=DIR")
    check_writable(Path(config.out).expanduser(), "out")
    if config.teacher and not re.fullmatch(r"[a-z0-9_-]+", config.teacher):
        raise UserError(f"teacher={config.teacher}: take lower-case letters, digits, _ and -")
    check_one_model(config, config.weights)
    folder = existing_run(config.run) if config.run else None
    if not config.data.train:
        raise UserError("data.train is not set; give shards, data='/data/{00000..00099}.tar'")
    from clipscale.data.shards.listing import local_shards

    local_shards(config.data)
    if folder:
        find_checkpoint(folder, config.which)
    return folder
