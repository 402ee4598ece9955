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
    """A GPU with half of the memory that the run takes in one phase; every setting saves a share of the GPU."""

    def __init__(self, phase: str, fixed: float = 1.0, **saved: float) -> None:
        self.phase, self.fixed, self.saved, self.tried = phase, fixed, saved, list[PlanConfig]()

    def __call__(self, config: PlanConfig) -> Needs:
        self.tried.append(config)
        changes = {
            "loss": config.loss.backend == "auto",
            "keep": config.loss.keep == "none",
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
    assert advised(Machine("replay", chunk=1.1, checkpointing=1.3), run(), 64)[0] == ("model.grad_checkpointing=true",)


def test_only_settings_that_change_the_highest_phase_are_tried() -> None:
    machine = Machine("loss", fixed=0.1, loss=1.5)
    assert advised(machine, run(), 64) == [("loss=infcl",)]
    assert len(machine.tried) == 2, "the run, and the run with another loss"


def test_kept_exponentials_are_given_up() -> None:
    assert advised(Machine("loss", keep=1.5), run(loss=LossConfig(keep="8G"))) == [("loss.keep=none",)]


def test_settings_that_suffice_only_together_are_combined() -> None:
    assert advised(Machine("loss", loss=0.4, fsdp=0.7), run()) == [("launch.parallel=fsdp", "loss=infcl")]


def test_nothing_is_advised_where_nothing_suffices() -> None:
    assert advised(Machine("loss", loss=0.4), run()) == advised(Machine("loss"), run()) == []


def test_settings_that_the_program_refuses_are_not_tried() -> None:
    config = run()
    config.optim.name = "adafactor"
    assert advised(Machine("optim", fsdp=1.5), config) == [], "its state does not fit shards"
    assert advised(Machine("optim", fsdp=1.5), run()) == [("launch.parallel=fsdp",)]


def test_host_memory_has_its_own_settings() -> None:
    def measure(config: PlanConfig) -> Needs:
        return Needs(0.5, 2.0 - 1.2 * (config.offload == "disk") - 0.5 * (config.data.buffers == 1))

    config = run()
    assert [remedy.words for remedy in remedies(config, measure(config), measure)] == [("offload=disk",)]
