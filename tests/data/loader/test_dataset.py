"""The stream as an iterable dataset: the order of training, resumed at any sample, and a stage of a webdataset pipeline."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import webdataset as wds
from torch.utils.data import DataLoader

from clipscale.common.errors import UserError
from clipscale.config.data import DataConfig
from clipscale.data.loader.dataset import ShardDataset
from tests.data.files import SIDE, Letters, write_shards
from tests.data.streams import flat, ids, open_stream

pytestmark = pytest.mark.timeout(60)


def dataset(folder: Path, **options: Any) -> ShardDataset:
    config = DataConfig(**{"train": [str(folder)], "workers": 0, "shuffle": 8, **options})
    return ShardDataset(config, tokenizer=Letters(), image_size=SIDE, batch=8)


def keys(samples: Any, count: int) -> list[str]:
    return [sample["__key__"] for sample in islice(samples, count)]


def test_samples_come_in_the_order_of_training_with_its_pixels_and_tokens(tmp_path: Path) -> None:
    write_shards(tmp_path, [20, 13])
    samples = list(islice(dataset(tmp_path), 40))
    stream = open_stream(tmp_path, batch=8)
    for start in range(0, 40, 8):
        batch = stream.next_batch()
        part = samples[start : start + 8]
        assert [int(sample["__key__"], 16) for sample in part] == [name % 2**64 for name in batch.ids().tolist()]
        assert torch.equal(torch.stack([sample["image"] for sample in part]), batch.pixels(0, 8))
        assert torch.equal(torch.stack([sample["tokens"] for sample in part]), batch.tokens(0, 8))


@pytest.mark.parametrize("workers", [0, 2])
def test_it_goes_on_at_any_sample_from_a_saved_state(tmp_path: Path, workers: int) -> None:
    write_shards(tmp_path, [20, 13])
    whole = keys(dataset(tmp_path), 60)
    for stop in (0, 3, 8, 29):
        first = dataset(tmp_path)
        assert keys(first, stop) == whole[:stop]
        second = dataset(tmp_path, workers=workers)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert keys(second, 60 - stop) == whole[stop:], f"after {stop} samples"


def test_a_new_iteration_goes_on_after_the_last_sample(tmp_path: Path) -> None:
    write_shards(tmp_path, [20])
    samples = dataset(tmp_path)
    assert keys(samples, 5) + keys(samples, 9) == keys(dataset(tmp_path), 14)


def test_it_is_a_stage_of_a_webdataset_pipeline(tmp_path: Path) -> None:
    write_shards(tmp_path, [20, 13])
    pipeline = wds.DataPipeline(dataset(tmp_path), wds.to_tuple("__key__", "image"), wds.batched(4))
    found = [(key, image) for key, image in islice(wds.WebLoader(pipeline, batch_size=None, num_workers=0), 6)]
    assert flat(list(key) for key, _ in found) == [
        f"{name % 2**64:016x}" for name in flat(ids(open_stream(tmp_path, batch=8), 3))
    ]
    assert found[0][1].shape == (4, 3, SIDE, SIDE)


def test_a_loaders_worker_processes_are_refused(tmp_path: Path) -> None:
    write_shards(tmp_path, [20])
    with pytest.raises(UserError, match="num_workers=0"):
        next(iter(DataLoader(dataset(tmp_path), batch_size=None, num_workers=1)))
