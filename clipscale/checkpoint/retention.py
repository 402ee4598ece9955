"""Which checkpoints of a run are kept, in its folder and in its copy."""

from dataclasses import dataclass
from pathlib import Path

from clipscale.run_folder.chosen_checkpoint import BestFinder
from clipscale.run_folder.paths import step_of


@dataclass(frozen=True)
class Retention:
    """Which checkpoints of a run stay."""

    # How many of the newest checkpoints stay, not counting those that `every` or `best` keeps; 0: all.
    keep_newest: int = 2
    # Checkpoints at multiples of this many steps stay; 0: none.
    every: int = 0
    # The best checkpoint stays; None if there is no measure of the best.
    best: BestFinder | None = None

    def outdated(self, checkpoints: list[Path], up_to: str) -> list[Path]:
        """Which of the `checkpoints`, sorted by step, to delete. Those after the one named `up_to` are left alone."""
        earlier = [path for path in checkpoints if step_of(path) <= step_of(Path(up_to))]
        best = self.best.best_step(map(step_of, earlier)) if self.best else None
        candidates = [path for path in earlier if step_of(path) != best]
        if self.every:
            candidates = [path for path in candidates if step_of(path) % self.every]
        return candidates[: -self.keep_newest]  # [:-0] is empty: with 0 none is outdated
