"""Chunk sizes by measurement: the fastest, or the smallest that is nearly as fast where the memory left over keeps graphs."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from clipscale import checkpoint
from clipscale.common.errors import UserError
from clipscale.config.sections import CacheConfig, CheckpointConfig, ModelConfig
from clipscale.step import chunk_sizes as autotune
from clipscale.step.chunk_sizes import CHUNKS, save_chunk_sizes, saved_chunk_sizes
from clipscale.train import train
from tests.support.runs import ARCHITECTURE, settings

GPU = torch.device("cuda")
RATES = {16: 50.0, 32: 80.0, 64: 96.0, 128: 100.0, 256: 99.0, 512: 90.0, 1024: 70.0}


def measured(monkeypatch: pytest.MonkeyPatch, fits: int, rates: dict[int, float]) -> Callable[[bool], int]:
    """`find_chunk` on a device that runs chunks at these samples a second, up to `fits` samples."""

    def rate(tower: nn.Module, inputs: Tensor) -> float:
        if len(inputs) > fits:
            raise torch.OutOfMemoryError
        return rates[len(inputs)]

    monkeypatch.setattr(autotune, "samples_per_second", rate)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return lambda keep: autotune.find_chunk(nn.Linear(1, 1), torch.empty, 4096, GPU, keep=keep)


def test_without_kept_graphs_the_fastest_chunk_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    find = measured(monkeypatch, fits=4096, rates=RATES)
    assert find(False) == 128
    assert find(True) == 64, "96 % of the speed, and memory for graphs"


def test_the_largest_chunk_that_fits_leaves_no_memory_and_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    rising = {16 * 2**i: 100.0 * 2**i for i in range(8)}
    assert measured(monkeypatch, fits=256, rates=rising)(False) == 128
    with pytest.raises(UserError, match="not even 16 samples fit"):
        measured(monkeypatch, fits=8, rates=rising)(False)


def test_chunks_found_on_another_device_are_found_anew(
    demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They may be too large for it. Without dropout the curve stays the same to rounding; with it, a line says that it does not."""
    for rate, said in ((0.0, False), (0.3, True)):
        run = tmp_path / f"run{rate}"
        model = ModelConfig(name="test", architecture=ARCHITECTURE, patch_dropout=rate)
        config = settings(
            demo, run, samples=128, model=model, cache=CacheConfig(), checkpoint=CheckpointConfig(every=1)
        )
        train(replace(config, samples=64))
        card = {"image": 16, "text": 16, "device": "NVIDIA H200, 140 GiB"}
        save_chunk_sizes(run, card)
        checkpoint.save(run, 1, checkpoint.load(checkpoint.path_of(run, 1)) | {"chunks": card}, keep=0)
        capsys.readouterr()
        train(config)
        out = " ".join(capsys.readouterr().out.split())
        assert (
            "cache.chunk=auto: 16 and 16 samples were found on NVIDIA H200, 140 GiB; on cpu they are 64 and 64" in out
        )
        assert ("resumed with chunks of [64, 64] samples instead of [16, 16]: the towers draw other" in out) == said, (
            out
        )
        assert saved_chunk_sizes(run) == {"image": 64, "text": 64, "device": "cpu"}


def test_chunk_sizes_are_replaced_atomically_while_other_ranks_read_them(tmp_path: Path) -> None:
    save_chunk_sizes(tmp_path, {"image": 64, "text": 128})
    with (tmp_path / CHUNKS).open() as reading:
        save_chunk_sizes(tmp_path, {"image": 32, "text": 32})
        assert json.load(reading) == {"image": 64, "text": 128}
    assert saved_chunk_sizes(tmp_path) == {"image": 32, "text": 32}
    assert [path.name for path in tmp_path.iterdir()] == [CHUNKS]
