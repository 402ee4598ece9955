"""When a run evaluates and saves between its steps."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Intervals:
    """When a run evaluates and saves, beside its end. 0: never."""

    # Whether the weights are evaluated before the first step.
    evaluates_at_start: bool = False
    # Steps between evaluations.
    eval_steps: int = 0
    # Steps between checkpoints.
    save_steps: int = 0
    # Seconds between checkpoints.
    save_seconds: float = 0.0

    def evaluates_after(self, step: int) -> bool:
        return self.eval_steps > 0 and step % self.eval_steps == 0

    def saves_after(self, step: int) -> bool:
        return self.save_steps > 0 and step % self.save_steps == 0

    def is_overdue(self, seconds: float) -> bool:
        """Whether a checkpoint is due `seconds` after the last one."""
        return 0 < self.save_seconds < seconds
