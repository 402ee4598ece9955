"""The settings of `clipscale report`."""

from dataclasses import dataclass

from clipscale.common.errors import UserError
from clipscale.config.setting import setting

PORT = 8766


@dataclass(frozen=True)
class ReportSettings:
    """`clipscale report RUN...`: a page about runs, with charts to look into."""

    run: list[str] = setting([], "NAMES of folders under runs/, or paths; a sweep's folder means all of its runs.")
    out: str | None = setting(None, "The page's FILE.html; null: report.html in the run's folder, or above.")
    expected: str = setting("", "A published curve behind one's own, as openclip-b32-2b (a wrong name lists all).")
    live: bool = setting(False, "Serve the page to this machine's browsers instead, as the runs go on.")
    port: int = setting(PORT, "Port of the live page; 0: a free one.", least=0, most=65535)

    def check(self) -> None:
        """Raises UserError for the port of a page that is not served."""
        if self.port != PORT and not self.live:
            raise UserError(f"port={self.port}: only a live page has one; give live=true too")
