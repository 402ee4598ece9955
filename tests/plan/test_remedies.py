"""Which settings are tried for a run that does not fit, and which are advised."""

from clipscale.config.sections import LossConfig
from clipscale.config.tools import PlanConfig
from clipscale.plan.remedies import Needs, remedies


def run(**changed: object) -> PlanConfig:
    config = PlanConfig(
        hardware="h100-80g", gpus=8, batch=2**17, loss=LossConfig(exchange="replicated", backend="dense")
    )
    for key, value in changed.items():
        setattr(config, key, value)
    return config


class Machine:
    """A machine where every setting saves a known share of the memory."""

    def __init__(self, **saved: float) -> None:
        self.saved, self.planned = saved, 0

    def __call__(self, config: PlanConfig) -> Needs:
        self.planned += 1
        gpu, saved = 2.0, self.saved
        gpu -= saved.get("loss", 0) * (config.loss.backend == "auto")
        gpu -= saved.get("checkpointing", 0) * config.model.grad_checkpointing
        gpu -= saved.get("fsdp", 0) * (config.launch.parallel == "fsdp")
        gpu -= saved.get("chunk", 0) * (config.cache.chunk == "64")
        return Needs(gpu / config.nodes if saved.get("nodes") else gpu, 0.0)


def advised(machine: Machine, config: PlanConfig, chunk: int | None = None) -> list[tuple[str, ...]]:
    return [remedy.words for remedy in remedies(config, machine(config), machine, chunk)]


def test_single_settings_that_suffice_come_in_the_order_of_their_help() -> None:
    machine = Machine(loss=1.2, fsdp=1.5, checkpointing=0.9, chunk=1.0)
    assert advised(machine, run(), 64) == [("launch.parallel=fsdp",), ("loss=infcl",), ("cache.chunk=64",)]


def test_settings_that_suffice_only_together_are_combined_and_useless_ones_left_out() -> None:
    assert advised(Machine(loss=0.4, fsdp=0.7), run()) == [("launch.parallel=fsdp", "loss=infcl")]


def test_nodes_are_added_where_no_setting_suffices() -> None:
    assert advised(Machine(loss=0.4, nodes=1), run()) == [("loss=infcl", "nodes=2")]
    assert advised(Machine(nodes=1), run(batch=8)) == [], "a batch of 8 cannot be shared by 16 GPUs"
    assert advised(Machine(), run()) == []


def test_settings_that_the_program_refuses_are_not_tried() -> None:
    machine = Machine(fsdp=1.5)
    config = run()
    config.optim.name = "lamb"
    assert advised(machine, config) == [], "FSDP2 takes elementwise optimizers alone"


def test_host_memory_has_its_own_settings() -> None:
    def measure(config: PlanConfig) -> Needs:
        return Needs(0.5, 2.0 - 1.2 * (config.offload == "disk") - 0.5 * (config.data.buffers == 1))

    config = run()
    assert [remedy.words for remedy in remedies(config, measure(config), measure)] == [("offload=disk",)]
