"""The settings of `clipscale report`."""

from dataclasses import dataclass

from clipscale.common.errors import UserError
from clipscale.config.setting import setting


@dataclass(frozen=True)
class ReportSettings:
    """`clipscale report RUN...`: a page about runs, with charts to look into."""

    run: list[str] = setting([], "NAMES of folders under runs/, or paths; a sweep's folder means all of its runs.")
    out: str | None = setting(None, "The page's FILE.html; null: report.html in the run's folder, or above.")

    def check(self) -> None:
        """Raise UserError for a file that is not a page."""
        if self.out and not self.out.endswith((".html", ".htm")):
            raise UserError(f"out={self.out}: the report is a page; give out=FILE.html")
