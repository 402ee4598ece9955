"""Predicted memory equals measured memory, in every phase of real steps on the CPU."""

from dataclasses import replace
from pathlib import Path

import pytest

from clipscale.common import files
from clipscale.config.train_config import TrainConfig
from clipscale.tools.plan.dry_run import dry_run
from clipscale.tools.plan.memory_tracker import ROUND
from clipscale.tools.plan.step_memory import PHASES, StepEstimate, StepMemory
from tests.support.cases import slow_except
from tests.support.ranks import run_ranks
from tests.tools.plan.measure import measured, measured_config, measured_on_a_rank

# Relative error allowed; usual errors are below one per cent.
BAR = 0.10
# Error in bytes that is always allowed: CPU kernels take memory themselves, for packed operands of a product, say.
SMALL = 256 * 1024


def predicted(config: TrainConfig, ranks: int = 1, capability: int | None = None) -> StepMemory:
    """A step with what `cache.keep` bytes hold."""
    chunk = int(config.cache.chunk[0])
    with dry_run(config, ranks, capability) as run:
        return StepEstimate(run, config.batch // ranks, (chunk, chunk)).memory_within(config.cache.keep_bytes or 0)


def figures(step: StepMemory, growth: bool, peaks: bool) -> dict[str, float]:
    """Each phase's peak and, with `growth`, its peak beyond the memory before it."""
    compared = {}
    for phase in PHASES:
        if peaks:
            compared[phase] = step.phase(phase)
        if growth:
            compared[f"beyond, {phase}"] = step.phase(phase) - step.before[phase]
    return compared


def assert_agree(
    ours: StepMemory, real: StepMemory, *, growth: bool = True, peaks: bool = True, small: int = SMALL
) -> None:
    predicted = figures(ours, growth, peaks)
    actual = figures(real, growth, peaks)
    print(f"predicted {predicted}\nmeasured {actual}")
    assert predicted == pytest.approx(actual, rel=BAR, abs=small)


CASES, DEEP = files.read_yaml(Path(__file__).with_name("memory.yaml")).values()


@pytest.mark.timeout(1200)  # ViT-B/32 on two busy cores
@pytest.mark.parametrize("name", ["float32", *(pytest.param(name, marks=pytest.mark.slow) for name in list(CASES)[1:])])
def test_every_phase_takes_the_predicted_memory(name: str) -> None:
    config = measured_config(**CASES[name])
    assert_agree(predicted(config), measured(config))


@pytest.mark.parametrize(
    ("name", "share", "kept"),
    [
        ("float32", 0.5, 5),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("float32", 1.5, 12), ("captioner", 0.5, 3), ("captioner", 1.5, 6))
        ),
    ],
)
def test_the_memory_of_kept_graphs_is_predicted(name: str, share: float, kept: int) -> None:
    """It keeps a share of all graphs' bytes. Growth is too large where a kept chunk finds no gradients yet."""
    config = measured_config(**CASES[name] | {"batch": 96})
    with dry_run(config, 1, None) as run:
        model = StepEstimate(run, 96, (16, 16))
        budget = int(share * 6 * sum(each.graph for each in model.passes))
        step = model.memory_within(budget)
    config = replace(config, cache=replace(config.cache, keep=str(budget)))
    assert_agree(step, measured(config), growth=False)
    assert sum(step.kept) >= kept


@pytest.mark.parametrize("name", ["sharded", *(pytest.param(n, marks=pytest.mark.slow) for n in list(DEEP)[1:])])
def test_a_dry_run_of_few_blocks_tells_what_all_take(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A dry run of all blocks gives the same, in every stage."""
    layers = {"model__architecture__vision_cfg__layers": 5, "model__architecture__text_cfg__layers": 4}
    config = measured_config(batch=192, chunk=16, **DEEP[name] | layers)
    ranks = 1 if name == "some blocks train" else 4
    few = predicted(config, ranks, 90)
    monkeypatch.setattr("clipscale.tools.plan.block_meter.BLOCKS", 99)
    every = predicted(config, ranks, 90)
    assert few.peak == pytest.approx(every.peak, rel=0.01)
    assert few.before == pytest.approx(every.before, rel=0.01)


def lowest(ranks: list[StepMemory]) -> StepMemory:
    """The lowest of the ranks' figures."""
    befores = [rank.before for rank in ranks]
    peaks = [rank.peak for rank in ranks]
    return StepMemory(*({key: min(each[key] for each in every) for key in every[0]} for every in (befores, peaks)))


@pytest.mark.parametrize(
    ("name", "parallel"),
    [
        ("float32", "ddp"),
        pytest.param("float32", "zero3", marks=pytest.mark.slow),
        pytest.param("captioner, frozen image tower", "zero3", marks=pytest.mark.slow),
    ],
)
def test_the_memory_of_one_rank_of_two_is_predicted(name: str, parallel: str) -> None:
    """One rank of two: DDP's buckets and separate gradients, FSDP2's shards, and the ring's blocks.

    A rank is measured too high where gloo's thread is the last to hold what it has sent: torch's profiler does not see
    what another thread frees. So the lower rank counts.

    FSDP2's memory between steps differs by 1 to 2 MiB from one real run to the next, for an unknown reason, so only the
    growth in each phase is compared; that of `encode`, predicted 2.45 MiB, was 2.45 to 2.95.
    """
    changed = CASES[name] | {"batch": 192, "chunk": 32, "launch__parallel": parallel}
    real = lowest(run_ranks(measured_on_a_rank, 2, changed))
    step = predicted(measured_config(**changed), ranks=2)
    sharded = parallel == "zero3"
    assert_agree(step, real, peaks=not sharded, small=2**19 if sharded else SMALL)


@pytest.mark.parametrize("parallel", slow_except(["zero3"], ["zero2", "zero3"]))
@pytest.mark.parametrize(
    ("changed", "frozen"),
    [({"model__image__train": "none"}, "image"), ({"caption__weight": 0.0}, "decoder")],
    ids=["frozen image tower", "contrast alone"],
)
def test_what_does_not_train_is_whole_on_every_rank_of_a_captioner(parallel: str, changed: dict, frozen: str) -> None:
    """Each of so many ranks has next to nothing of what is divided."""
    config = measured_config(**CASES["captioner"] | changed, launch__parallel=parallel)
    with dry_run(config, 2**16, None) as run:
        whole = sum(p.nbytes for p in getattr(run.model, frozen).parameters())
        assert run.memory.state == pytest.approx(whole, rel=0.02)


def test_a_frozen_tower_has_no_second_pass_and_no_graph() -> None:
    memory = predicted(measured_config(batch=1024, model__image__train="none", cache__keep="1000G"), capability=90)
    assert "replay image" not in memory.peak
    assert memory.kept == (0, 64)


def test_checkpointing_on_a_gpu_takes_less_memory_in_the_second_pass() -> None:
    """Recomputed layer norms are float32 under autocast, as in the first pass; else torch refuses to go backward."""
    plain, checkpointed = (
        predicted(measured_config(model__grad_checkpointing=each, precision="fp16"), capability=90)
        for each in (False, True)
    )
    assert checkpointed.peak["replay image"] < plain.peak["replay image"]
    assert checkpointed.peak["encode image"] == plain.peak["encode image"]


@pytest.mark.parametrize(
    "name", ["adafactorbv", "adamw", *(pytest.param(name, marks=pytest.mark.slow) for name in ("muon", "lamb"))]
)
def test_an_update_of_one_parameter_of_each_shape_tells_what_all_take(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The state is the same to the byte, and so is the peak, but for the norms of the gradients, a scalar each."""
    config = measured_config(optim__name=name, optim__clip_norm=1.0, model__architecture__vision_cfg__layers=3)
    with dry_run(config, 1, 90) as run:
        few = run.memory
    monkeypatch.setattr(
        "clipscale.tools.plan.state_memory.one_of_each",
        lambda optimizer: [(p, 0) for group in optimizer.param_groups for p in group["params"]],
    )
    with dry_run(config, 1, 90) as run:
        norms = ROUND * sum(len(group["params"]) for group in run.step.optimizer.param_groups)
        assert few.state == run.memory.state
        assert few.update <= run.memory.update <= few.update + (2 * norms if name == "adamw" else 0)
        assert few.state > 2 * few.gradients[0]
