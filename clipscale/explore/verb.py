"""The verb `clipscale explore`: loads models and their embedded sets, and serves the page. D: feature width."""

import socket
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipscale.common.errors import UserError
from clipscale.common.terminal import say
from clipscale.common.units import run_folder
from clipscale.config.checks import existing_run
from clipscale.config.sections import ModelConfig
from clipscale.config.tools import ExploreConfig, check_explore
from clipscale.distributed import world as distributed
from clipscale.embed.arrays import EmbeddedSet
from clipscale.explore.search import Pictures, nearest
from clipscale.models.trained import load_any
from clipscale.step.precision import Precision


def main(config: ExploreConfig) -> None:
    """Serve the page until it is interrupted. Raises UserError."""
    check_explore(config)
    try:
        import uvicorn

        from clipscale.explore.server import application
    except ImportError as error:
        raise UserError(f"explore needs {error.name}; pip install 'clipscale[explore]'") from error
    try:
        listener = socket.create_server(("127.0.0.1", config.port))  # before the long work
    except OSError as error:
        remedy = "give another port=, or port=0 for a free one"
        raise UserError(f"port={config.port}: {error.strerror}; {remedy}") from error
    with listener:
        page = application(*prepared(config))
        settings = uvicorn.Config(page, log_level="error", limit_concurrency=128, timeout_graceful_shutdown=2)
        say(f"http://127.0.0.1:{listener.getsockname()[1]}/ (Ctrl-C ends it)")
        with suppress(KeyboardInterrupt):
            uvicorn.Server(settings).run(sockets=[listener])


def prepared(config: ExploreConfig) -> tuple[list["SearchModel"], Pictures]:
    """The models with their sets, and the pictures of these. Raises UserError for a model that no set is of."""
    sets = [EmbeddedSet(Path(folder).expanduser()) for folder in config.data.train or []]
    models = [SearchModel(config, config.run, config.checkpoint, config.model, sets)]
    if config.against:
        run = config.against if (run_folder(config.against) / "checkpoints").is_dir() else ""
        other = ModelConfig(name="") if run else ModelConfig(name=config.model.name, weights=config.against)
        models.append(SearchModel(config, run, "latest", other, sets))
    sources: dict[str, str] = {}
    for part, source in (item for model in models for item in model.embedded.sources.items()):
        if sources.setdefault(part, source) != source:
            raise UserError(f"data: {part} is of {sources[part]} and of {source}; give features of the same shards")
    return models, Pictures(sources, config.data)


class SearchModel:
    """A model and its set. Queries come from several threads, and the model takes one at a time."""

    def __init__(
        self, config: ExploreConfig, run: str, checkpoint: str, model: ModelConfig, sets: list[EmbeddedSet]
    ) -> None:
        """The model of a run, or of weights from elsewhere. Raises UserError if none of the sets has its features."""
        world = distributed.start(config.device)
        folder = existing_run(run) if run else None
        self.model, _, step = load_any(folder, checkpoint, config.weights, model, world.on_main)
        self.title = f"{folder.name}, step {step}" if folder else str(model.weights)
        self.transform = replace(self.model.eval_transform(), max_pixels=config.data.max_pixels)
        digests = {"weights": self.model.image_digest(), "text": self.model.text_digest()}
        wanted = digests | {"image_size": self.model.image_size, "resize": self.model.resize, "transform": "eval"}
        fitting = [embedded for embedded in sets if wanted.items() <= (wanted | embedded.note).items()]
        if not fitting:
            raise UserError(f"data: no folder has features of {self.title}; embed the set with that model")
        self.embedded = fitting[0]
        self.device, self.lock, self.decoding = world.device, threading.Lock(), threading.Lock()
        self.precision = Precision(config.precision, world.device)
        for tower in (self.model.image, self.model.text):
            tower.to(world.device)

    def encode_texts(self, texts: list[str]) -> Tensor:
        """Unit features (texts, D)."""
        return self._encode(self.model.text, self.model.tokenizer(texts))

    def encode_image(self, data: bytes) -> Tensor:
        """The unit feature (D,) of an encoded picture. Raises BrokenSampleError."""
        with self.decoding:  # one at a time: a large picture takes 268 MB
            pixels = torch.from_numpy(self.transform(data))[None]
        return self._encode(self.model.image, pixels)[0]

    def _encode(self, tower: nn.Module, inputs: Tensor) -> Tensor:
        with self.lock, torch.no_grad(), self.precision.autocast():
            return F.normalize(tower(inputs.to(self.device)).float(), dim=-1)

    def classes(self, picture_D: Tensor, prompts: list[str]) -> list[tuple[float, float]]:
        """Probability (the softmax over the prompts, by the model's scale) and similarity of each for a picture."""
        scores = self.encode_texts(prompts) @ picture_D
        shares = (scores * self.model.logit_scale.detach().to(self.device).float().exp()).softmax(0)
        return list(zip(shares.tolist(), scores.tolist()))

    def matches(self, query_D: Tensor, kind: str, count: int) -> list[dict[str, Any]]:
        """The samples whose feature of that kind is nearest to a query, with their similarity, best first."""
        rows = nearest(self.embedded.features(kind), query_D, count)
        return [{**self.embedded.sample(row), "score": score} for row, score in rows]
