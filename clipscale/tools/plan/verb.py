"""The verb `clipscale plan`: prints whether a run fits, and how long a step may take."""

import json
from dataclasses import replace

from clipscale.common.terminal import clear, print_line
from clipscale.config.libraries import hidden_packages, unneeded_packages
from clipscale.models.weights.model_settings import with_hub_architecture
from clipscale.tools.plan.settings import PlanConfig, on_machine


def main(config: PlanConfig) -> int:
    """Plan and print; returns the exit status: 1 if the run does not fit. Raises UserError."""
    here = not config.hardware
    config = replace(on_machine(config), model=with_hub_architecture(config.model))
    with hidden_packages(*unneeded_packages(config.model.description, fetches=False)):
        from clipscale.tools.plan.planner import plan
        from clipscale.tools.plan.render import render

    stage_configs = config.stage_configs
    results = [plan(stage_config) for stage_config in stage_configs]
    if config.json:
        clear()
        print(json.dumps({"stages": results} if results[1:] else results[0], indent=1))
    else:
        pages = [
            render("page", **result, config=stage_config, here=here)
            for result, stage_config in zip(results, stage_configs)
        ]
        for line in "\n".join(pages).splitlines():
            print_line(line)
    return 0 if all(result["fits"] for result in results) else 1
