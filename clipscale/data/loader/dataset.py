"""The training samples in clipscale's order as an ordinary iterable dataset, for other trainers and for webdataset pipelines.

C: channels, S: side in pixels, T: tokens.
"""

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from clipscale.common.errors import UserError
from clipscale.config.data import DataConfig
from clipscale.data.loader.stream import BatchShare, open_stream


class ShardDataset(IterableDataset[dict[str, Any]]):
    """Endless samples: `image` (C, S, S) uint8, `tokens` (T,) int32, and `__key__`, as webdataset's stages expect.

    The order is that of a training run with the same `batch`, seed and settings, sample by sample. It decodes in its own worker processes
    (`data.workers`), so a loader over it takes `num_workers=0`:

        samples = ShardDataset(DataConfig(train=["/data/{00000..00099}.tar"]), tokenizer=tokenizer, image_size=224, batch=512)
        pipeline = wds.DataPipeline(samples, wds.to_tuple("image", "tokens"), wds.batched(64))
        loader = wds.WebLoader(pipeline, batch_size=None, num_workers=0)

    `state_dict` holds the place after the last sample given. A new iteration goes on from there.
    """

    def __init__(
        self,
        config: DataConfig,
        *,
        tokenizer: Callable[[list[str]], Any],
        image_size: int,
        batch: int,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self._config, self._tokenizer, self._image_size, self._seed = config, tokenizer, image_size, seed
        self._share = BatchShare(batch, rank, world)
        self._position: dict[str, Any] | None = None  # where the current batch begins
        self._given = 0  # samples of the current batch given so far

    def state_dict(self) -> dict[str, Any]:
        """This rank's place, plain and JSON-like."""
        return {"position": self._position, "given": self._given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there with the next iteration."""
        self._position, self._given = state["position"], state["given"]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Raises UserError for settings or shards that cannot work."""
        if get_worker_info() is not None:
            raise UserError(
                "ShardDataset: it has worker processes of its own (data.workers); give the loader num_workers=0"
            )
        stream = open_stream(
            self._config,
            self._share,
            image_size=self._image_size,
            tokenizer=self._tokenizer,
            seed=self._seed,
            position=self._position,
        )
        with stream:
            while True:
                batch = stream.next_batch()
                for row, name in enumerate(batch.ids().tolist()):
                    if row < self._given:
                        continue
                    self._given = row + 1
                    image, tokens = (rows(row, row + 1)[0].clone() for rows in (batch.pixels, batch.tokens))
                    yield {"__key__": f"{name & (2**64 - 1):016x}", "image": image, "tokens": tokens}
                self._position, self._given = stream.position(), 0
