"""The verb `clipscale explore`: loads a model and its embedded set, and serves the page."""

from clipscale.common.errors import UserError
from clipscale.common.terminal import doing, say
from clipscale.tools.explore.search import Explorer
from clipscale.tools.explore.settings import ExploreConfig


def main(config: ExploreConfig) -> None:
    """Serve the page until it is interrupted. Raises UserError."""
    try:
        import uvicorn

        from clipscale.tools.explore.server import application
    except ImportError as error:
        raise UserError(f"explore needs {error.name}; pip install 'clipscale[explore]'") from error
    doing("loading the model and the features")
    explorer = Explorer(config)
    say(f"http://127.0.0.1:{config.port} searches {len(explorer.embedded)} pictures; Ctrl-C ends it")
    page = application(explorer)
    uvicorn.run(page, port=config.port, log_level="warning", limit_concurrency=128, timeout_graceful_shutdown=2)
