"""Steps and whole runs on a CUDA device, with its copies, random numbers and memory.

tests/support/device.py: they run without one too, to see that the tests themselves are right.
"""

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from clipscale import checkpoint
from clipscale.config.data import DataConfig
from clipscale.config.sections import CacheConfig, OptimConfig, ScheduleConfig
from clipscale.data.loader.to_device import ChunkLoader
from clipscale.distributed.join import destroy_world
from clipscale.distributed.parallel import wrap
from clipscale.distributed.world import World
from clipscale.loss.api import contrastive_loss
from clipscale.loss.reference import dense_contrastive_loss
from clipscale.models.towers import ClipModel
from clipscale.run.train_loop import TrainLoop
from clipscale.run_folder.paths import checkpoints_of
from clipscale.step.cache.cast_weights import CastWeights
from clipscale.step.cache.grad_cache import GradCache
from clipscale.step.compiled import compile_towers
from clipscale.tools.data.demo_folder import train_shards
from clipscale.train import train
from tests.step.cache.encoders import batch, models, one_graph
from tests.support.device import CUDA, DEVICE, on_device, only_on_cuda
from tests.support.gradients import assert_same, gradients
from tests.support.runs import curve, records, ten_step_config
from tests.support.towers import samples, small_model
from tests.test_exactness import Case, inputs_of, model_of

pytestmark = on_device


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("keep", [0, 4000, math.inf])
def test_the_gradient_is_that_of_one_graph_with_the_devices_dropout(keep: float, compiled: bool) -> None:
    inputs = tuple(x.to(DEVICE) for x in batch(13))
    actual = []
    for cached in (False, True):
        model = models(0.4).to(DEVICE)
        towers = [model["image"], model["text"]]
        if compiled:
            for tower in towers:
                tower.compile()
        torch.manual_seed(5)
        if cached:
            GradCache(towers, model["head"], chunks=[4, 5], keep_bytes=keep).step(*inputs)
        else:
            one_graph(towers, model["head"], inputs, [4, 5])
        actual.append(gradients(model))
    assert_same(actual[1], actual[0], 1e-10)


@pytest.mark.parametrize("compiled", [False, True])
def test_chunks_in_bf16_with_weights_cast_once_are_no_farther_from_float64_than_autograd(compiled: bool) -> None:
    model = small_model().to(DEVICE)
    exact = copy.deepcopy(model).double()
    pixels, tokens = (x.to(DEVICE) for x in samples(24))

    def step(model: ClipModel, autocast: Callable[[], AbstractContextManager[object]]) -> torch.Tensor:
        def loss(u: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return contrastive_loss(u, v, model.logit_scale.exp())

        model.zero_grad()
        GradCache([model.image, model.text], loss, chunks=8, autocast=autocast).step(pixels, tokens)
        return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])

    half = partial(torch.autocast, DEVICE, torch.bfloat16)
    expected = step(exact, nullcontext)
    with patch.object(CastWeights, "start_step", lambda *arguments: None):
        by_autograd = (step(model, half) - expected).norm()
    if compiled:
        compile_towers(model, lengths_vary=False)
    assert (step(model, half) - expected).norm() <= 1.05 * by_autograd


@pytest.fixture
def world() -> Iterator[World]:
    """A group of one process, over NCCL on a CUDA device. It passes for two, so that towers are under DDP."""
    device = torch.device(DEVICE, 0)
    backend, bound = ("nccl", device) if CUDA else ("gloo", None)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, device_id=bound)
    yield World(0, 2, device)
    destroy_world()


def test_a_process_group_does_not_change_the_gradient(world: World) -> None:
    actual = []
    for wrapped in (nn.Sequential, partial(wrap, world, parallel="ddp", dtype=torch.float32)):
        model = models().to(DEVICE)
        towers = [wrapped(model["image"]), wrapped(model["text"])]
        GradCache(towers, model["head"], chunks=[4, 5]).step(*(x.to(DEVICE) for x in batch(13)))
        actual.append(gradients(model))
    assert_same(actual[1], actual[0], 1e-10)


def scaled_loss(model: Any, u: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return dense_contrastive_loss(u, v, model.logit_scale.exp())


def pinned(x: torch.Tensor) -> torch.Tensor:
    return x.pin_memory() if CUDA else x


def without_noise(actual: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gradients but for the key biases, which softmax makes zero up to rounding; in_proj_bias is query, key, value."""
    return {
        k: torch.cat([g.chunk(3)[0], g.chunk(3)[2]]) if k.endswith("in_proj_bias") else g for k, g in actual.items()
    }


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("noise", ["dropout", "patch dropout"])
def test_open_clips_towers_from_pinned_memory_have_the_gradient_of_one_graph(noise: str, compiled: bool) -> None:
    """Chunks of 5 images and 3 texts, copied to the device while others are computed, half of their graphs kept."""
    case = Case(1, "none", (5, 3), noise, "host", 60e3, "softmax", "none", "as they come", True, dtype="float32")
    pixels, tokens = inputs_of(case, 0)
    actual = []
    for cached in (False, True):
        model = model_of(case).to(DEVICE)
        if compiled:
            model.image.compile(dynamic=False)
            model.text.compile()
        loss = partial(scaled_loss, model)
        torch.manual_seed(5)
        if cached:
            device = torch.device(DEVICE)
            hosts = [pinned(pixels), pinned(tokens)]
            rows = [ChunkLoader(HostRows(x, transient=False), len(x), device, stays_on_device=False) for x in hosts]
            towers = [model.image, model.text]
            cache = GradCache(towers, loss, chunks=case.chunks, keep_bytes=case.keep)
            cache.step(*rows)  # measures the graphs
            model.zero_grad()
            torch.manual_seed(5)
            cache.step(*rows)
        else:
            one_graph([model.image, model.text], loss, (pixels.to(DEVICE), tokens.to(DEVICE)), [*case.chunks])
        actual.append(without_noise(gradients(model)))
    assert_same(actual[1], actual[0], 1e-4)


class HostRows:
    """Rows of host memory; `transient`: pairs that are overwritten by the third request after theirs."""

    def __init__(self, host: torch.Tensor, transient: bool) -> None:
        self.host = pinned(host)
        self.asked = 0
        self.window = pinned(torch.empty(3, 2, host.shape[1], dtype=host.dtype)) if transient else None

    def __call__(self, start: int, stop: int) -> torch.Tensor:
        if self.window is None:
            return self.host[start:stop]
        self.asked += 1
        return self.window[self.asked % 3].copy_(self.host[start:stop])


@pytest.mark.parametrize("transient", [False, True])
@pytest.mark.parametrize("resident", [False, True])
def test_chunks_arrive_whole_and_device_memory_does_not_grow_with_them(resident: bool, transient: bool) -> None:
    device = torch.device(DEVICE)
    side = 2**18
    peaks = []
    for count in (8, 64):
        host = torch.arange(count, dtype=torch.int64)[:, None].expand(count, side).to(torch.uint8).contiguous()
        rows = HostRows(host, transient and CUDA)  # on a CPU nothing copies them
        source = ChunkLoader(rows, count, device, stays_on_device=resident)
        if CUDA:
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()  # 0 without a device
        for _ in range(2):
            sums = [source.chunk(i, i + 2).double().sum(1) for i in range(0, count, 2)]
            assert torch.cat(sums).tolist() == [float(i % 256) * side for i in range(count)]
        peaks.append(torch.cuda.max_memory_allocated() - before)
    if not resident:
        assert peaks[1] <= peaks[0] * 1.1, f"{peaks} bytes for 8 and 64 rows"


def run(demo: Path, folder: Path, **changes: Any) -> list[float]:
    data = DataConfig(train=[train_shards(demo)], workers=changes.pop("workers", 0))
    train(ten_step_config(demo, folder, device=DEVICE, data=data, **changes))
    return curve(folder)


@pytest.fixture(scope="module")
def plain(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return run(demo, tmp_path_factory.mktemp("runs") / "plain")


@pytest.mark.parametrize(
    ("changes", "most"),
    [
        ({"offload": "none"}, 1e-4),
        ({"offload": "host", "workers": 2}, 1e-4),
        ({"cache": CacheConfig(chunk=["auto"], keep="auto")}, 1e-3),
        ({"precision": "bf16"}, 0.1),
        ({"precision": "fp16"}, 0.1),
    ],
)
def test_where_pixels_wait_kept_graphs_found_chunks_and_half_precision_leave_the_curve(
    demo: Path, plain: list[float], tmp_path: Path, changes: dict[str, Any], most: float
) -> None:
    """Memory that is copied to the device is page-locked."""
    assert run(demo, tmp_path / "run", **changes) == pytest.approx(plain, rel=most)
    assert {line["host_pinned"] for line in records(tmp_path / "run")} == {CUDA}


def test_an_overflow_leaves_the_step_out_and_lowers_the_loss_scale(
    demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a loss scale of 2^40, where gradients in fp16 are infinite; half of it after each step that is left out."""
    first = 2.0**40
    monkeypatch.setattr(torch.amp, "GradScaler", partial(torch.amp.GradScaler, init_scale=first))
    data = {"precision": "fp16", "schedule": ScheduleConfig(warmup="0"), "samples": 64 * 40}
    run(demo, tmp_path / "run", optim=OptimConfig(lr=1e-3), **data)
    lines = records(tmp_path / "run")
    skipped = [line["step"] for line in lines if line["skipped"]]
    assert skipped == list(range(1, len(skipped) + 1)) and 1 <= len(skipped) < len(lines), skipped
    state = checkpoint.load(checkpoints_of(tmp_path / "run")[-1])
    assert state.scaler["scale"] == first * 0.5 ** len(skipped), (skipped, state.scaler)
    losses = [line["loss"] for line in lines]
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < losses[0], f"nothing learnt after {len(skipped)} of {len(lines)} steps were left out"


def test_a_resumed_run_goes_on_as_the_uninterrupted_one(demo: Path, tmp_path: Path) -> None:
    total = ScheduleConfig(name="constant", warmup="2")
    whole = run(demo, tmp_path / "whole", schedule=total)
    run(demo, tmp_path / "parts", schedule=total, samples=320)
    assert run(demo, tmp_path / "parts", schedule=total) == pytest.approx(whole, rel=1e-4)


@only_on_cuda
def test_the_host_waits_for_the_scale_of_the_loss_alone(
    demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It also waits for events: of the loss, of the norm, and of the records of the step before."""
    run_step = TrainLoop.run_step
    waited = []

    def watched(run: TrainLoop) -> None:
        with warnings.catch_warnings(record=True, action="always") as caught:
            torch.cuda.set_sync_debug_mode("warn" if run.step >= 2 else "default")  # the first steps measure graphs
            try:
                run_step(run)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        waited.extend(f"{Path(w.filename).name}: {w.message}" for w in caught if "synchronizing CUDA" in str(w.message))

    monkeypatch.setattr(TrainLoop, "run_step", watched)
    run(demo, tmp_path / "run", samples=64 * 5)
    assert waited and all(text.startswith("block.py") for text in waited), waited
