"""When a run evaluates and saves between its steps."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Intervals:
    """When a run evaluates and saves, beside its end. 0: never."""

    # Whether the weights are evaluated before the first step.
    evaluates_start: bool = False
    # Steps between evaluations.
    evaluation: int = 0
    # Steps between checkpoints.
    save: int = 0
    # Seconds between checkpoints.
    save_s: float = 0.0

    def evaluates_after(self, step: int) -> bool:
        return self.evaluation > 0 and step % self.evaluation == 0

    def saves_after(self, step: int) -> bool:
        return self.save > 0 and step % self.save == 0

    def is_overdue(self, seconds: float) -> bool:
        """Whether a checkpoint is due `seconds` after the last one."""
        return 0 < self.save_s < seconds
