"""The settings of `clipscale export`."""

from dataclasses import dataclass

from clipscale.config import sections
from clipscale.config.eval import RunModel
from clipscale.config.setting import setting


@dataclass(frozen=True)
class ExportSettings(RunModel):
    """`clipscale export`: a run's weights as a folder for open_clip or transformers, with a model card."""

    format: str = setting(
        "open_clip",
        "`open_clip` (`local-dir:FOLDER`), or `hf`: transformers' CLIP or SigLIP.",
        choices=("open_clip", "hf"),
    )

    weights: str = setting("trained", sections.WEIGHTS_HELP, choices=sections.WEIGHTS)
    out: str | None = setting(None, "Folder to write; null: RUN/export, of `hf` RUN/export-hf.")
