"""One model with its embedded set: it computes features of texts, pictures and labels, and finds their nearest rows.

D: feature width, C: classes.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from clipscale.config.checks import existing_run
from clipscale.config.sections import ModelConfig
from clipscale.config.tools import EmbedConfig
from clipscale.data.sample import BrokenSampleError
from clipscale.distributed.world import World
from clipscale.embed.note import features_note
from clipscale.eval.zero_shot import class_embeddings
from clipscale.explore.embedded import EmbeddedSet, Sample, nearest
from clipscale.explore.pictures import DECODING
from clipscale.models.towers import ClipModel, load_any
from clipscale.step.precision import Precision


@dataclass
class SearchModel:
    """A model, its set, and what it computes. Queries come from several threads, and the model takes one at a time."""

    title: str
    model: ClipModel
    settings: ModelConfig
    config: EmbedConfig
    embedded: EmbeddedSet | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.note = features_note(self.config, self.model, self.settings, tables=True)
        """What the features are that it would compute of any set."""
        self.device = next(self.model.parameters()).device
        self.precision = Precision(self.config.precision, self.device)
        for tower in (self.model.image, self.model.text):
            self.precision.convert(tower)
        data = self.config.data
        self.transform = replace(self.model.eval_transform(), side=self.note["image_size"], max_pixels=data.max_pixels)

    def encode_text(self, text: str) -> Tensor:
        """The unit feature (D,) of a text."""
        return self._text(self.model.tokenizer([text]))[0]

    def encode_image(self, data: bytes) -> Tensor:
        """The unit feature (D,) of an encoded picture. Raises BrokenSampleError."""
        with DECODING:
            pixels = torch.from_numpy(self.transform(data))[None]
        pixels = pixels.to(self.device)
        with self.lock, torch.no_grad(), self.precision.autocast():
            found = F.normalize(self.model.image(pixels)[0].float(), dim=-1)
        if not bool(found.isfinite().all()):
            raise BrokenSampleError("unusable_features", f"{self.title} computes no numbers")
        return found

    def classes(self, picture_D: Tensor, labels: Sequence[str], template: str) -> list[tuple[float, float]]:
        """Probability and similarity of each label for a picture: the softmax over the labels, by the model's logit scale."""
        classes_CD = class_embeddings(self._text, self.model.tokenizer, labels, [template], batch=self.config.batch)
        scores = classes_CD.to(self.device) @ picture_D
        shares = (scores * self.model.logit_scale.detach().float().exp()).softmax(0)
        return list(zip(shares.tolist(), scores.tolist()))

    def found(self, query_D: Tensor, kind: str, count: int) -> list[tuple[Sample, float]]:
        """The samples whose feature of that kind is nearest to a query, with their similarity, best first."""
        assert self.embedded is not None
        matches = nearest(self.embedded.features(kind), query_D, count)
        return [(self.embedded.sample(row), score) for row, score in matches]

    def some(self, count: int) -> list[Sample]:
        """Samples at even distances."""
        assert self.embedded is not None
        total = len(self.embedded)
        shown = min(count, total)
        return [self.embedded.sample(n * total // shown) for n in range(shown)]

    def _text(self, tokens: Tensor) -> Tensor:
        with self.lock, torch.no_grad(), self.precision.autocast():
            return F.normalize(self.model.text(tokens.to(self.device)).float(), dim=-1)


def load(config: EmbedConfig, device: torch.device) -> SearchModel:
    """The model that `config` names, on a device, without a set. Raises UserError."""
    run = existing_run(config.run) if config.run else None
    world = World(0, 1, device)
    model, settings, step = load_any(run, config.checkpoint, config.weights, config.model, world, hub=config.hub)
    title = str(config.model.weights)
    if run:
        title = f"{run.name}, step {step}{', averaged' if config.weights == 'ema' else ''}"
    return SearchModel(title, model.to(device), settings, config)
