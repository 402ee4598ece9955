"""The verb `clipscale explore`: loads models and their embedded sets, and serves the page."""

from dataclasses import replace
from pathlib import Path

from clipscale.common.errors import UserError
from clipscale.common.units import run_folder
from clipscale.config.sections import ModelConfig
from clipscale.tools.embed.arrays import EmbeddedSet
from clipscale.tools.explore.search import Pictures, SearchModel
from clipscale.tools.explore.settings import ExploreConfig, check_explore


def main(config: ExploreConfig) -> None:
    """Serve the page until it is interrupted. Raises UserError."""
    check_explore(config)
    try:
        import uvicorn

        from clipscale.tools.explore.server import application
    except ImportError as error:
        raise UserError(f"explore needs {error.name}; pip install 'clipscale[explore]'") from error
    page = application(*prepared(config))
    uvicorn.run(page, port=config.port, access_log=False, limit_concurrency=128, timeout_graceful_shutdown=2)


def prepared(config: ExploreConfig) -> tuple[list[SearchModel], Pictures]:
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
    listed = models[0].embedded.note.get("only_keys")  # rows are numbered as they were embedded
    return models, Pictures(sources, replace(config.data, only_keys=listed))
