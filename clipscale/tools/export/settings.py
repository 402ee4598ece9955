"""The settings of `clipscale export`."""

from dataclasses import dataclass
from pathlib import Path

from clipscale.common.errors import UserError
from clipscale.common.files import check_writable
from clipscale.config import sections
from clipscale.config.run_model import RunModel
from clipscale.config.setting import setting
from clipscale.run_folder.chosen_checkpoint import find_checkpoint
from clipscale.run_folder.paths import existing_run


@dataclass(frozen=True)
class ExportSettings(RunModel):
    """`clipscale export`: a run's weights as a folder for open_clip or transformers, with a model card."""

    format: str = setting(
        "open_clip",
        "`open_clip` (`local-dir:FOLDER`), or `hf`: transformers' CLIP or SigLIP.",
        choices=("open_clip", "hf"),
    )

    weights: str = setting("trained", sections.WEIGHTS_HELP, choices=sections.WEIGHTS)
    average: list[str] = setting(
        [],
        "Averaged with the run: values of `model.weights`, such as a run or RUN/checkpoints/step_N (WiSE-FT, soups).",
    )
    shares: list[float] = setting([], "Shares of the run and of each in `average`, adding up to 1; empty: equal ones.")
    out: str | None = setting(None, "Folder to write; null: RUN/export, with -average and -hf where they apply.")

    def check(self) -> None:
        """Raise UserError for shares of nothing, and for two checkpoints."""
        super().check()
        if self.shares and not self.average:
            raise UserError(f"shares={self.shares}: of what? Give average=RUN too")


def check_export(settings: ExportSettings) -> None:
    """Raise UserError without a run, for a checkpoint that is missing, and for a folder that cannot be written."""
    if settings.out:
        check_writable(Path(settings.out).expanduser(), "out")
    find_checkpoint(existing_run(settings.run), settings.which)
