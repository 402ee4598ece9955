"""Searches exactly in the features that `clipscale embed` has written, with their model, and shows the pictures.

D: feature width.
"""

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch

from clipscale.common.errors import UserError
from clipscale.common.ranks import OnRank0
from clipscale.data.sample import BrokenSampleError
from clipscale.distributed.agreement import run_on_rank0_with_heartbeat
from clipscale.distributed.join import init_world
from clipscale.models.towers import ClipModel
from clipscale.run_folder.paths import existing_run
from clipscale.tools.embed.arrays import EmbeddedSet, Sample, open_embedded_set
from clipscale.tools.embed.feature_encoder import FeatureEncoder, feature_encoder
from clipscale.tools.embed.pictures import stored_picture, thumbnail
from clipscale.tools.embed.settings import IMAGE
from clipscale.tools.explore.settings import ExploreConfig
from clipscale.tools.trained_model import load_run_or_weights

SIDE = 320  # pixels of the longer side of a picture on the page


def nearest_rows(arrays: Iterable[np.ndarray], query_D: np.ndarray, count: int) -> list[tuple[int, float]]:
    """The `count` rows with the largest dot products, and the products, best first. Only finite rows count.

    arrays: (rows, D) each, of any float type. Row numbers go on from array to array. One array at a time is in memory.
    """
    products = [array.astype(np.float32) @ query_D for array in arrays if len(array)]
    scores = torch.from_numpy(np.concatenate([np.empty(0, np.float32), *products])).nan_to_num(-torch.inf, -torch.inf)
    best = scores.topk(min(count, len(scores)))
    return [(row, score) for row, score in zip(best.indices.tolist(), best.values.tolist()) if score > -torch.inf]


@dataclass(frozen=True)
class Explorer:
    """A model, a set that it has embedded, and the set's pictures. `open_explorer` makes it.

    Queries come from several threads. A lock lets one picture be decoded at a time, since a large one takes 268 MB.
    """

    # The model's name on the page.
    title: str
    embedded: EmbeddedSet
    encoder: FeatureEncoder
    lock: threading.Lock = field(default_factory=threading.Lock)

    def text_feature(self, text: str) -> np.ndarray:
        """The unit feature (D,) of a text."""
        with self.lock:
            return self.encoder.encode(self.encoder.model.text, self.encoder.model.tokenizer, [text])[0]

    def picture_feature(self, number: int) -> np.ndarray:
        """The stored feature of a picture of the set. Raises BrokenSampleError if there is no such picture."""
        self.check_number(number)
        return self.embedded.feature(number, IMAGE).astype(np.float32)

    def check_number(self, number: int) -> None:
        """Raise BrokenSampleError if there is no such sample."""
        if number >= len(self.embedded):
            raise BrokenSampleError("no_such_sample", str(number))

    def sample(self, number: int) -> Sample:
        self.check_number(number)
        return {**self.embedded.sample(number), "number": number}

    def matches(self, query_D: np.ndarray, side: str, count: int) -> list[Sample]:
        """The samples whose features of that side are nearest to a query, with their similarity, best first."""
        matches = nearest_rows(self.embedded.features(side), query_D, count)
        return [{**self.sample(number), "score": score} for number, score in matches]

    def thumbnail(self, number: int) -> bytes:
        """A sample's picture as a JPEG. Raises BrokenSampleError, also for no such sample and an unreadable shard."""
        data = stored_picture(self.embedded, self.sample(number))
        with self.lock:
            return thumbnail(data, SIDE)


def open_explorer(config: ExploreConfig) -> Explorer:
    """Load what the settings name. Raises UserError if the set has features of another model."""
    world = init_world(config.device)
    model, title, embedded = load_matching(config, partial(run_on_rank0_with_heartbeat, world))
    return Explorer(title, embedded, feature_encoder(model, world.device, config.precision, config.data))


def load_matching(config: ExploreConfig, on_rank0: OnRank0) -> tuple[ClipModel, str, EmbeddedSet]:
    """The model, its name on the page, and the set. Raises UserError if the set has features of another model."""
    (folder,) = config.data.train or []
    embedded = open_embedded_set(Path(folder).expanduser())
    embedded.warn_of_unfinished()
    run = existing_run(config.run) if config.run else None
    model, _, step = load_run_or_weights(run, config.which, config.weights, config.model, on_rank0)
    title = f"{run.name}, step {step}" if run else str(config.model.weights)
    expected = {
        "weights": model.image.digest(),
        "text": model.text.digest(),
        "width": model.embed_dim,
        "image_size": model.image_size,
        "resize": model.pixels.resize_mode,
    }
    if any(embedded.note.get(name, value) != value for name, value in expected.items()):
        raise UserError(f"data={folder}: has no features of {title}; embed the set with that model")
    return model, title, embedded
