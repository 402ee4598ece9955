"""`clipscale plan`: whether a run fits, before it is started, and how long a step may take."""

import json
import sys

from rich.console import Console

from clipscale.config.tools import PlanConfig
from clipscale.plan.compare import compare
from clipscale.plan.planner import plan
from clipscale.plan.show import show_comparison, show_plan
from clipscale.report.table import plain_console


def main(config: PlanConfig, console: Console | None = None) -> int:
    """Plan, or with `run` compare, and print; returns the exit status: 1 where the run does not fit. Raises UserError."""
    console = console or plain_console()
    result = (compare if config.run else plan)(config, lambda line: print(line, file=sys.stderr))
    if config.json:
        console.print(json.dumps(result, indent=1), soft_wrap=True)
    else:
        (show_comparison if config.run else show_plan)(result, console)
    return 0 if result.get("fits", True) else 1
