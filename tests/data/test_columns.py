"""Columns: a new one is a declaration; keys follow the field that samples share, captions their sample."""

import json
from pathlib import Path

import pytest
import torch

from clipscale.config.data import DataConfig
from clipscale.data.columns import KEYS, Column, columns_of
from clipscale.data.decode import json_fields
from clipscale.data.sample import ChosenSample
from tests.data.files import SIDE, picture, write_tar
from tests.data.streams import content, open_stream
from tests.data.test_decode import SAMPLES
from tests.data.test_filters import raw


def test_keys_follow_the_field_and_texts_their_sample(tmp_path: Path) -> None:
    """Three samples in a row share a url, and have as many captions and hard negatives as their place among them."""
    members = []
    for i in range(30):
        captions = [f"{i:02d} {c}" for c in range(i % 3 + 1)]
        about = {"url": f"u{i // 3}", "captions": captions, "hard": [f"{text} no" for text in captions]}
        members += [(f"{i:02d}.png", picture(i)), (f"{i:02d}.json", json.dumps(about).encode())]
    write_tar(tmp_path / "0.tar", members)
    options = {"batch": 16, "shard_streams": 8, "same": "url", "captions": ["json:captions"]}
    several_texts = {"captions_per_step": 2, "negatives": "json:hard", "negatives_per_step": 2}
    one, several = (open_stream(tmp_path, **options, **more) for more in ({}, several_texts))
    by_key = {}
    for _ in range(6):
        (first, alone), (batch, both) = ((b, content(b)) for b in (one.next_batch(), several.next_batch()))
        assert (alone[0], alone[1], alone[3]) == (both[0], both[1], both[3]), "their number changes nothing else"
        assert first.tokens(0, 16).equal(batch.tokens(0, 32)[::2])
        texts = [bytes(row.tolist()).decode().strip() for row in batch.tokens(0, batch.texts)]
        captions, negatives = texts[:32], texts[32:]
        pairs = (captions[::2], captions[1::2], negatives[::2], negatives[1::2])
        for key, *own in zip(batch.column(KEYS).tolist(), *pairs, strict=True):
            assert len({text[:2] for text in own}) == 1, "of one sample"
            assert [text.endswith("no") for text in own] == [False, False, True, True]
            by_key.setdefault(key, set()).add(int(own[0][:2]) // 3)
    assert len(by_key) == 10 and all(len(urls) == 1 for urls in by_key.values())


def weight_of(sample: ChosenSample) -> list[float]:
    fields = json_fields(sample.raw.members["json"])
    return [fields["weight"], len(sample.captions[0])]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_column_is_one_declaration(tmp_path: Path, workers: int) -> None:
    """Its values are in the batch, each at its sample's place, and go to the loss."""
    members = []
    for i in range(30):
        about = json.dumps({"weight": i / 4}).encode()
        members += [(f"{i:02d}.png", picture(i)), (f"{i:02d}.json", about), (f"{i:02d}.txt", str(i).encode())]
    write_tar(tmp_path / "0.tar", members)
    column = Column("weight", (2,), "float32", weight_of, members=("json",), for_loss=True)
    with open_stream(tmp_path, batch=16, workers=workers, columns=(column,)) as stream:
        batch = stream.next_batch()
        numbers = [int(bytes(row.tolist()).decode()) for row in batch.tokens(0, 16)]
        weights = batch.targets(torch.device("cpu"))["weight"]
        assert weights.tolist() == [[i / 4, len(str(i))] for i in numbers] and len(set(numbers)) == 16


@pytest.mark.parametrize(("same", "one", "other", "equal"), SAMPLES["keys"])
def test_samples_with_the_same_value_have_the_same_key(same: str, one: dict, other: dict, equal: bool) -> None:
    (column,) = (column for column in columns_of(DataConfig(same=same), SIDE).beside if column.name == KEYS)

    def key(fields: dict, place: str) -> int:
        sample = raw(**fields)
        return int(column.read(ChosenSample(sample, [sample.members["txt"].decode()], place)))

    keys = [key(one, "0 0"), key(other, "0 1")]
    assert (keys[0] == keys[1]) == equal
    assert keys[0] == key(one, "0 0"), "the same sample twice in a batch"
    assert all(-(2**63) <= key < 2**63 for key in keys)
