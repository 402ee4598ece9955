"""Checks that the variables of this process's launcher do not contradict each other."""

import os

from clipscale.common import ranks
from clipscale.common.errors import UserError

# Variables that have to be numbers, besides RANK, WORLD_SIZE and MASTER_PORT.
NUMBERS = (
    "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "TORCHELASTIC_RESTART_COUNT",
    "SLURM_RESTART_COUNT",
)  # fmt: skip


def check_launcher_variables() -> None:
    """Raise UserError if variables of a launcher are not numbers, or contradict each other."""
    for name in NUMBERS:
        ranks.env_int(name, 0)
    problem = ""
    if not ranks.under_launcher():
        problem = "comes without WORLD_SIZE" if "RANK" in os.environ else ""
    elif ranks.rank() >= ranks.size():
        problem = f"is not a rank of WORLD_SIZE={ranks.size()}"
    elif ranks.size() > 1 and not (os.environ.get("MASTER_ADDR") and 0 < ranks.env_int("MASTER_PORT", 0) < 2**16):
        problem = "needs MASTER_ADDR, and a port as MASTER_PORT"
    if problem:
        raise UserError(f"RANK={os.environ['RANK']} of the environment {problem}; start with torchrun, or unset RANK")
