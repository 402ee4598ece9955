"""The page's connections. A connection that sends no request is closed, so that others are accepted."""

from typing import Any, ClassVar

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

# Most connections, and most requests, at a time. Further ones are answered with status 503.
MAX_CONNECTIONS = 128
# Most connections that have not asked yet. A browser opens some in advance.
MAX_SILENT = 64
# Seconds that a connection has for its first request.
ASK_S = 10.0


class Connection(H11Protocol):
    """A connection that is closed if it has sent no request after ASK_S, or if it is the oldest of too many such."""

    # Connections that have not asked yet, the oldest first.
    silent: ClassVar[dict["Connection", None]] = {}

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.silent[self] = None
        self.loop.call_later(ASK_S, self.end_if_silent)
        while len(self.silent) > MAX_SILENT:
            next(iter(self.silent)).end_if_silent()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None:  # a whole request, not only its first bytes
            self.silent.pop(self, None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.silent.pop(self, None)
        super().connection_lost(exc)

    def end_if_silent(self) -> None:
        if self in self.silent:
            del self.silent[self]
            self.transport.close()


def server(application: Starlette) -> uvicorn.Server:
    """A server of an application. It ends within two seconds."""
    options = uvicorn.Config(
        application,
        http=Connection,
        log_level="warning",
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=2,
    )
    return uvicorn.Server(options)
