"""The user's own pipeline as the source of training: webdataset's samples, resumed, on workers and ranks, and its mistakes."""

import io
import os
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import webdataset as wds
from PIL import Image

from clipscale.common.errors import UserError
from clipscale.config.data import AugmentConfig, DataConfig
from clipscale.data.loader.stream import BatchShare, TrainStream, merge_positions, open_stream
from tests.data.files import SIDE, Letters, picture, write_shards
from tests.data.streams import flat, ids

pytestmark = pytest.mark.timeout(60)
HERE = __name__


def tars(stream: int, streams: int, epoch: int) -> Iterable[dict[str, Any]]:
    """webdataset's pipeline over the shards of $SHARDS, which only this process sees."""
    shards = sorted(map(str, Path(os.environ["SHARDS"]).glob("*.tar")))[stream::streams]
    return wds.DataPipeline(  # type: ignore[no-any-return]
        wds.SimpleShardList(shards, seed=epoch), wds.tarfile_to_samples(), wds.shuffle(4, seed=epoch)
    )


def decoded(stream: int, streams: int, epoch: int) -> Iterator[dict[str, Any]]:
    """PIL images and text, as after webdataset's decode("pil")."""
    for number in range(stream, 40, streams):
        image = Image.open(io.BytesIO(picture(number)))
        yield {"__key__": f"{number}", "png": image, "txt": f"{number}", "other": object()}


def tuples(stream: int, streams: int, epoch: int) -> list[Any]:
    return [(b"", "")]


def arrays(stream: int, streams: int, epoch: int) -> list[Any]:
    return [{"png": torch.zeros(3, 4, 4), "txt": ""}]


def nothing(stream: int, streams: int, epoch: int) -> list[Any]:
    return []


def stream(function: Callable[..., Any] | str, rank: int = 0, world: int = 1, **options: Any) -> TrainStream:
    name = function if isinstance(function, str) else f"{HERE}:{function.__name__}"
    position, backend = options.pop("position", None), options.pop("backend", "host")
    config = DataConfig(**{"pipeline": name, "workers": 0, "shard_streams": 2, **options})
    return open_stream(
        config,
        BatchShare(8, rank, world),
        backend=backend,
        image_size=SIDE,
        tokenizer=Letters(),
        seed=1,
        position=position,
    )


@pytest.fixture
def shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_shards(tmp_path / "shards", [9, 6, 7, 11])
    monkeypatch.setenv("SHARDS", str(tmp_path / "shards"))
    return tmp_path / "shards"


def test_every_sample_of_a_webdataset_pipeline_comes_once_an_epoch(shards: Path) -> None:
    with (
        stream(tars) as found,
        open_stream(
            DataConfig(train=[str(shards)], workers=0), BatchShare(33), image_size=SIDE, tokenizer=Letters(), seed=1
        ) as plain,
    ):
        assert found.samples_per_epoch is None
        first = flat(ids(found, 10))
        assert len(set(first[0::8] + first[1::8] + first[2::8] + first[3::8])) == 16, (
            "stream 0 has 16 of the 33 samples"
        )
        pixels, tokens = found.next_batch(), plain.next_batch()
        assert pixels.pixels(0, 8).shape == (8, 3, SIDE, SIDE)
        assert set(tokens.tokens(0, 33)[:, 0].tolist()) == set(pixels.tokens(0, 8)[:, 0].tolist()) == {ord("c")}


@pytest.mark.parametrize("backend", ["host", "encoded"])
@pytest.mark.parametrize(("function", "workers", "stop"), [(tars, 0, 1), (decoded, 2, 6)], ids=["tars", "decoded"])
def test_a_resumed_run_goes_on_where_the_pipeline_was(
    shards: Path, backend: str, function: Callable[..., Any], workers: int, stop: int
) -> None:
    with stream(function, backend=backend) as whole:
        wanted = ids(whole, 9)
        with stream(function, backend=backend) as first:
            ids(first, stop)
            position = merge_positions([first.position()])
        with stream(function, position=position, workers=workers, backend=backend) as second:
            assert ids(second, 9 - stop) == wanted[stop:]


def test_ranks_share_the_streams(shards: Path) -> None:
    with stream(tars) as alone, stream(tars, 0, 2) as one, stream(tars, 1, 2) as two:
        parts = [a + b for a, b in zip(ids(one, 3), ids(two, 3), strict=True)]
        assert parts == ids(alone, 3)


def test_decoded_images_keep_their_pixels() -> None:
    with stream(decoded, augment=AugmentConfig(scale=(1.0, 1.0), ratio=(1.0, 1.0))) as found:
        batch = found.next_batch()
        for row, letters in enumerate(batch.tokens(0, 8).tolist()):
            number = int("".join(map(chr, letters)))
            plain = torch.frombuffer(
                bytearray(Image.open(io.BytesIO(picture(number))).tobytes()), dtype=torch.uint8
            ).reshape(SIDE, SIDE, 3)
            assert torch.equal(batch.pixels(row, row + 1)[0], plain.permute(2, 0, 1))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("nowhere.at.all:f", "cannot be imported .*PYTHONPATH"),
        (f"{HERE}:HERE", "is no function"),
        (f"{HERE}:tuples", "gave tuple, where a sample is a mapping"),
        (f"{HERE}:arrays", "member 'png' of a sample is Tensor; give bytes, text or a PIL image"),
        (
            nothing,
            "no sample for stream 0 of 2 in epoch 0; give each stream some of the data, or lower data.shard_streams",
        ),
    ],
    ids=["module", "no function", "tuples", "arrays", "nothing"],
)
def test_a_mistake_is_named(function: str, message: str) -> None:
    with pytest.raises(UserError, match=f"data.pipeline=.*{message}"), stream(function) as found:
        found.next_batch().ids()


def test_the_streams_share_is_not_lost_in_a_batch(shards: Path) -> None:
    """Four samples of every batch are of each of the two streams."""
    with stream(tars) as found:
        own = {sample for batch in ids(found, 4) for sample in batch[:4]}
        other = {sample for batch in ids(found, 4) for sample in batch[4:]}
    assert own and other and not own & other
    assert len(list(islice(own, 99))) == 16
