"""The verb `clipscale explore`: loads a model and its embedded set, and serves the page."""

from clipscale.common.errors import UserError
from clipscale.tools.explore.search import Explorer
from clipscale.tools.explore.settings import ExploreConfig


def main(config: ExploreConfig) -> None:
    """Serve the page until it is interrupted. Raises UserError."""
    try:
        import uvicorn

        from clipscale.tools.explore.server import application
    except ImportError as error:
        raise UserError(f"explore needs {error.name}; pip install 'clipscale[explore]'") from error
    page = application(Explorer(config))
    uvicorn.run(page, port=config.port, access_log=False, limit_concurrency=128, timeout_graceful_shutdown=2)
