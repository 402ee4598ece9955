"""The verb `clipscale explore`: loads a model and its embedded set, and serves the page."""

from pathlib import Path

from clipscale.common.errors import UserError
from clipscale.tools.embed.arrays import EmbeddedSet
from clipscale.tools.explore.search import Pictures, SearchModel
from clipscale.tools.explore.settings import ExploreConfig


def main(config: ExploreConfig) -> None:
    """Serve the page until it is interrupted. Raises UserError."""
    try:
        import uvicorn

        from clipscale.tools.explore.server import application
    except ImportError as error:
        raise UserError(f"explore needs {error.name}; pip install 'clipscale[explore]'") from error
    page = application(*prepared(config))
    uvicorn.run(page, port=config.port, access_log=False, limit_concurrency=128, timeout_graceful_shutdown=2)


def prepared(config: ExploreConfig) -> tuple[SearchModel, Pictures]:
    """The model with its set, and the pictures of the set. Raises UserError for features of another model."""
    (folder,) = config.data.train or []
    model = SearchModel(config, EmbeddedSet(Path(folder).expanduser()))
    return model, Pictures(model.embedded.sources, config.data)
