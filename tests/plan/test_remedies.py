"""Which settings are tried for a run that does not fit, and which are advised."""

from clipscale.config.sections import LossConfig
from clipscale.config.tools import PlanConfig
from clipscale.plan.remedies import Needs, remedies


def run() -> PlanConfig:
    loss = LossConfig(exchange="replicated", backend="dense")
    return PlanConfig(hardware="h100-80g", gpus=8, batch=2**17, loss=loss)


class Machine:
    """A GPU with half of the memory that the run takes in one phase; every setting saves a share of the GPU."""

    def __init__(self, phase: str, fixed: float = 1.0, **saved: float) -> None:
        self.phase, self.fixed, self.saved = phase, fixed, saved

    def __call__(self, config: PlanConfig) -> Needs:
        changes = {
            "loss": config.loss.backend == "auto",
            "checkpointing": config.model.grad_checkpointing,
            "fsdp": config.launch.parallel == "fsdp",
            "chunk": config.cache.chunk == "64",
        }
        gpu = 2.0 - sum(self.saved.get(name, 0) for name, made in changes.items() if made)
        return Needs(gpu, 0.0, self.fixed, self.phase)


def advised(machine: Machine, config: PlanConfig, chunk: int | None = None) -> list[tuple[str, ...]]:
    return [remedy.words for remedy in remedies(config, machine(config), machine, chunk)]


def test_single_settings_that_suffice_come_in_the_order_of_their_help() -> None:
    machine = Machine("replay", chunk=1.1, fsdp=1.2, checkpointing=0.9)
    assert advised(machine, run(), 64) == [("launch.parallel=fsdp",), ("cache.chunk=64",)]
    assert advised(Machine("loss", fixed=0.1, loss=1.5), run(), 64) == [("loss=infcl",)]


def test_settings_that_suffice_only_together_are_combined() -> None:
    assert advised(Machine("loss", loss=0.4, fsdp=0.7), run()) == [("launch.parallel=fsdp", "loss=infcl")]
    assert advised(Machine("loss", loss=0.4), run()) == [], "nothing suffices"


def test_settings_that_the_program_refuses_are_not_tried() -> None:
    config = run()
    assert advised(Machine("optim", fsdp=1.5), config) == [("launch.parallel=fsdp",)]
    config.optim.name = "adafactor"
    assert advised(Machine("optim", fsdp=1.5), config) == [], "its state does not fit shards"


def test_host_memory_has_its_own_settings() -> None:
    def measure(config: PlanConfig) -> Needs:
        return Needs(0.5, 2.0 - 1.2 * (config.offload == "disk") - 0.5 * (config.data.buffers == 1))

    assert [remedy.words for remedy in remedies(run(), measure(run()), measure)] == [("offload=disk",)]
