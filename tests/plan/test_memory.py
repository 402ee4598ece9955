"""Predicted memory is measured memory: every phase of real steps on the CPU, by torch's allocator."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from clipscale.config.tools import PlanConfig
from clipscale.config.train import TrainConfig
from clipscale.plan.memory import PHASES, Memory, Model, host
from clipscale.plan.rehearsal import rehearsed
from tests.plan.measure import measured, measured_on_a_rank, settings
from tests.ranks import run_ranks

BAR = 0.10
"""Of section 7 of the design; what is seen is below one per cent."""
SMALL = 256 * 1024
"""Bytes that a phase may be off by whatever its size: what a CPU's kernels take for themselves, such as packed operands of a product."""


def predicted(config: TrainConfig, ranks: int = 1) -> Memory:
    chunk = int(config.cache.chunk)
    keep = 0 if config.cache.activation_budget == "none" else float(config.cache.activation_budget)
    with rehearsed(config, ranks, None) as rehearsal:
        return Model(rehearsal).at(config.batch // ranks, (chunk, chunk), keep)


def assert_agree(foreseen: Memory, seen: Memory, *, growth: bool = True, peaks: bool = True) -> None:
    """Each phase's peak and, with `growth`, by how much it lies above what was there."""
    lines, worst = [""], 0.0
    for phase in PHASES:
        pairs = (
            (foreseen.phase(phase), seen.phase(phase)),
            (foreseen.phase(phase) - foreseen.before[phase], seen.phase(phase) - seen.before[phase]),
        )
        for what, (ours, theirs) in zip(("peak", "beyond"), pairs):
            error = abs(ours - theirs) / theirs if abs(ours - theirs) > SMALL else 0.0
            worst = max(worst, error if (peaks if what == "peak" else growth) else 0.0)
            lines.append(
                f"{phase:6s} {what:6s} predicted {ours / 2**20:8.3f} MiB, measured {theirs / 2**20:8.3f}: {ours / theirs - 1:+.2%}"
            )
    print("\n".join(lines))
    assert worst <= BAR, "\n".join(lines)


QUICK: dict[str, dict[str, Any]] = {
    "float32": {},
    "bf16": {"precision__name": "bf16", "chunk": 32},
    "checkpointing": {"model__grad_checkpointing": True},
    "frozen": {"model__freeze_image": True, "optim__name": "lion"},
    "resident": {"offload": "none", "model__patch_dropout": 0.5, "optim__name": "adafactorbv"},
    "sigmoid": {"loss__objective": "sigmoid", "model__init_bias": -10, "optim__name": "muon"},
    "many chunks": {"batch": 320, "chunk": 32, "optim__name": "lamb", "optim__clip_norm": 1.0},
}
SLOW: dict[str, dict[str, Any]] = {
    "fp16": {"precision__name": "fp16"},
    "one chunk": {"chunk": 64},
    "ragged": {"batch": 72, "chunk": 32},
    "frozen in bf16": {"model__freeze_image": True, "precision__name": "bf16"},
    "frozen text": {"model__freeze_text": True},
    "dense loss": {"batch": 512, "chunk": 64, "loss__backend": "dense"},
    "small tiles": {"batch": 512, "chunk": 64, "loss__tile": 64},
    "large chunk": {"batch": 2048, "chunk": 512},
    "ViT-B/32": {"model__name": "ViT-B-32", "model__architecture": {}, "chunk": 32, "precision__name": "bf16"},
}


@pytest.mark.parametrize("changed", QUICK.values(), ids=QUICK)
def test_every_phase_takes_what_was_predicted(changed: dict[str, Any]) -> None:
    config = settings(**changed)
    assert_agree(predicted(config), measured(config))


@pytest.mark.slow
@pytest.mark.parametrize("changed", SLOW.values(), ids=SLOW)
def test_and_in_rarer_settings(changed: dict[str, Any]) -> None:
    config = settings(**changed)
    assert_agree(predicted(config), measured(config))


def test_bf16_weights_with_masters() -> None:
    """The CPU's kernel adds a bf16 gradient to a float32 master by way of a float32 copy, a GPU's does not: no matter in bytes here."""
    config = settings(precision__name="bf16", precision__weights="bf16")
    foreseen = predicted(config)
    assert_agree(foreseen, measured(config))
    assert foreseen.fixed["master weights"] > 0.9 * 2 * foreseen.fixed["weights"] - 2**20


@pytest.mark.parametrize("share", [0.4, 1.5])
def test_kept_graphs(share: float) -> None:
    """Some chunks' graphs, and all of them. A kept chunk's backward pass may find no gradients yet: what it adds is foreseen too large."""
    config = settings(batch=96)
    with rehearsed(config, 1, None) as rehearsal:
        graphs = [rehearsal.graph(tower, 16) for tower in (0, 1)]
    config.cache.activation_budget = str(int(share * 6 * sum(graphs)))
    foreseen = predicted(config)
    assert_agree(foreseen, measured(config), growth=False)
    assert foreseen.kept == ((6, 6) if share > 1 else foreseen.kept)
    assert foreseen.kept[0] > 0


@pytest.mark.parametrize("parallel", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_two_ranks(parallel: str) -> None:
    """A rank of two: DDP's buckets and the gradients beside them; FSDP2's shards. The ring's blocks travel.

    What FSDP2 has at rest differs by 1 to 2 MiB from one real run to the next, and why is not known, so there
    only the growth in each phase is compared.
    """
    changed: dict[str, Any] = {"batch": 192, "chunk": 32, "launch__parallel": parallel}
    seen, _ = run_ranks(measured_on_a_rank, 2, changed)
    foreseen = predicted(settings(**changed), ranks=2)
    assert_agree(foreseen, seen, peaks=parallel == "ddp")
    assert ("DDP buckets" in foreseen.fixed) == (parallel == "ddp")


def test_more_chunks_and_larger_ones_follow_a_straight_line() -> None:
    """What is extrapolated from two chunks is what a rehearsal of twelve finds."""
    config = settings(offload="none", precision__name="bf16")
    with rehearsed(config, 1, 90) as rehearsal:
        model = Model(rehearsal)
        foreseen, direct = model.at(12 * 16, (16, 16)), rehearsal.step((16, 16), 12 * 16)
        assert foreseen.before == direct.before
        assert foreseen.peak == pytest.approx(direct.peak, rel=0.002)
        larger, direct = model.estimate(512, 128, 32), rehearsal.step((128, 128), 512)
        assert larger.peak == pytest.approx(direct.peak, rel=0.05)


def test_of_a_frozen_tower_there_is_no_second_pass_and_no_graph() -> None:
    with rehearsed(settings(model__freeze_image=True), 1, 90) as rehearsal:
        memory = Model(rehearsal).at(1024, (16, 16), keep=1e12)
    assert "replay image" not in memory.peak
    assert memory.kept == (0, 64)


def test_features_in_the_place_of_pictures_are_not_decoded_by_the_gpu() -> None:
    """Whatever data.decode says; and data.image_features=false is as if it were not set."""
    of_pictures: Any = SimpleNamespace(row=(3, 30, 30), row_type=torch.uint8, context_length=28)
    of_features: Any = SimpleNamespace(row=(128,), row_type=torch.float16, context_length=28)

    def batch(decode: str, features: str | None) -> int:
        config = PlanConfig(hardware="h100-80g", batch=64)
        config.data.decode, config.data.image_features = decode, features
        read = of_features if config.data.stored_member else of_pictures
        return host(config, read, 64, 64, cuda=True).process["batch"]

    assert batch("gpu", "false") == batch("gpu", None) != batch("exact", None)
    assert batch("gpu", "true") == batch("gpu", "emb") == batch("exact", "true") < batch("exact", None)
