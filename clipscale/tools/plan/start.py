"""Plans a run that is starting, on this machine."""

import torch

from clipscale.common.cpu import cores
from clipscale.common.hardware import gpu_here, hardware_of
from clipscale.common.memory import free_memory
from clipscale.common.record import Record
from clipscale.config.libraries import hidden_packages, unneeded_packages
from clipscale.config.train_config import TrainConfig
from clipscale.launch.local import num_processes
from clipscale.models.weights.model_settings import with_hub_architecture
from clipscale.tools.plan.settings import PlanConfig


def start_plan(config: TrainConfig) -> Record:
    """Plan every stage. Returns `fits` and the `lines` to print of the most demanding one; no lines for an unknown GPU.

    Raises UserError, and any error of the dry run.
    """
    gpu = gpu_here() if config.device != "cpu" else None
    unknown = config.device != "cpu" and not gpu and torch.cuda.is_available()  # in a container without nvidia-smi
    hardware = hardware_of(gpu) if gpu else "cpu"
    if unknown or hardware is None:
        return {"fits": True, "lines": []}
    model = with_hub_architecture(config.model)
    with hidden_packages(*unneeded_packages(model.description, fetches=False)):
        from clipscale.tools.plan.planner import plan
        from clipscale.tools.plan.render import render

    machine = {"model": model, "hardware": hardware, "gpus": num_processes(config), "host_memory": free_memory()}
    plan_config = PlanConfig(**vars(config) | machine)
    plans = [plan(stage_config, search=False) for stage_config in plan_config.stage_configs]
    result = max(plans, key=lambda result: (not result["fits"], result["peak_bytes"]))
    return {"fits": result["fits"], "lines": render("start", **result, cores_here=cores()).splitlines()}
