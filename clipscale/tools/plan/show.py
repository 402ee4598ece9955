"""`clipscale plan`: prints whether a run fits and how long a step may take, or compares a prediction with a run."""

import json
from dataclasses import replace

from clipscale.common.terminal import clear, say
from clipscale.config.eval import existing_run
from clipscale.config.stages import stages_of
from clipscale.models.sources import fetched_description
from clipscale.tools.plan.of_run import compare, configs_of
from clipscale.tools.plan.planner import plan
from clipscale.tools.plan.settings import PlanConfig, on_machine
from clipscale.tools.plan.text import written


def main(config: PlanConfig) -> int:
    """Plan, or with `run` compare, and print; returns the exit status: 1 if the run does not fit. Raises UserError."""
    if config.run and not config.fit:
        results = [compare(existing_run(config.run))]
        status, pages = 0, [written("compared", **results[0])]
    else:
        config = replace(on_machine(config), model=fetched_description(config.model))
        stages = configs_of(existing_run(config.run)) if config.run else stages_of(config)
        results = [plan(replace(stage, fit=config.fit)) for stage in stages]
        status = 0 if all(result["fits"] for result in results) else 1
        pages = [written("page", **result, config=stage) for result, stage in zip(results, stages)]
    if config.json:
        clear()
        print(json.dumps({"stages": results} if results[1:] else results[0], indent=1))
    else:
        for line in "\n".join(pages).splitlines():
            say(line)
    return status
