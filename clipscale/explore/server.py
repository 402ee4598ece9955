"""The page's server. It answers this machine's browser: other hosts, other pages and large bodies are refused."""

import asyncio
import hashlib
import json
import socket
from collections.abc import Callable, Sequence
from functools import partial
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from clipscale.common.units import whole_number
from clipscale.config.tools import IMAGE, TEXT, ExploreConfig
from clipscale.data.sample import BrokenSampleError
from clipscale.explore.embedded import Sample
from clipscale.explore.pictures import LRUCache, Pictures
from clipscale.explore.search_model import SearchModel

PAGE = {"": "text/html", "page.css": "text/css", "page.js": "text/javascript"}
MOST_TEXT, MOST_LABELS, MOST_RESULTS = 1 << 16, 1000, 200
"""Bytes of a request without a picture, labels of one, and results of one."""
KEPT_QUERIES = 256
"""Dropped pictures whose features are kept, so that labels can be changed without sending the picture again."""
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


def serve(taken: socket.socket, models: Sequence[SearchModel], pictures: Pictures, config: ExploreConfig) -> None:
    """Answer at a socket until SIGINT or SIGTERM."""
    import uvicorn

    page = application(models, pictures, config)
    settings = uvicorn.Config(page, log_level="error", access_log=False, server_header=False, limit_concurrency=128)
    settings.timeout_graceful_shutdown = 2
    asyncio.run(uvicorn.Server(settings).serve(sockets=[taken]))


def application(models: Sequence[SearchModel], pictures: Pictures, config: ExploreConfig) -> ASGIApp:
    """The page and its answers."""
    answers = _Answers(models, pictures, config)
    routes = [Route(f"/{name}", partial(_file, name or "page.html", kind)) for name, kind in PAGE.items()]
    routes += [Route("/about", answers.about), Route("/small/{part}/{row:int}", answers.small)]
    for asked in (answers.some, answers.search, answers.picture, answers.sample, answers.classes):
        routes.append(Route(f"/{asked.__name__}", asked, methods=["POST"]))
    problems = dict.fromkeys((HTTPException, BrokenSampleError, OSError), _problem)
    return Guard(Starlette(routes=routes, exception_handlers=problems), config.host)


async def _file(name: str, kind: str, request: Request) -> Response:
    return Response(Path(__file__).with_name(name).read_bytes(), media_type=kind)


async def _problem(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        return _json({"error": error.detail}, error.status_code)
    if isinstance(error, BrokenSampleError):
        return _json({"error": f"this picture cannot be used ({error})"}, 422)
    return _json({"error": f"the set cannot be read ({error})"}, 500)


def _json(value: Any, status: int = 200) -> Response:
    """JSON in ASCII: captions may hold lone surrogates."""
    return Response(json.dumps(value, allow_nan=False), status, media_type="application/json")


class Guard:
    """Lets requests pass that name this machine, and come from its own page or from none. Every answer gets HEADERS.

    A foreign page could otherwise send requests, or read the set under a name that it lets point to this machine (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, host: str) -> None:
        self.app = app
        self.names = {"localhost", host.lower()}
        self.open = not _loopback(host)
        if self.open:
            self.names |= {socket.gethostname().lower(), socket.getfqdn().lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        if scope["type"] != "http" or (problem := self.problem(Request(scope))):
            refused = Response(problem if scope["type"] == "http" else "", 403)
            return await refused(scope, receive, guarded)
        return await self.app(scope, receive, guarded)

    def problem(self, request: Request) -> str:
        """Why a request is refused; empty if it is not."""
        host = request.headers.get("host", "")
        if not self.known(host):
            return "this page answers only under the address that clipscale explore has printed"
        origin, site = request.headers.get("origin"), request.headers.get("sec-fetch-site", "none")
        if (origin is not None and origin.partition("://")[2] != host) or site not in ("same-origin", "none"):
            return "requests of other pages are refused"
        return ""

    def known(self, host: str) -> bool:
        """Whether the Host header names this machine. A page elsewhere has a name, so any address of the right kind is good."""
        try:
            name = (urlsplit(f"//{host}").hostname or "").lower()
        except ValueError:
            return False
        return name in self.names or _loopback(name) or (self.open and _address(name) is not None)


def _address(name: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(name)
    except ValueError:
        return None


def _loopback(name: str) -> bool:
    address = _address(name)
    return name == "localhost" or (address is not None and address.is_loopback)


class _Answers:
    """What the page asks for. Models and files work in threads."""

    def __init__(self, models: Sequence[SearchModel], pictures: Pictures, config: ExploreConfig) -> None:
        self.models, self.pictures, self.most_bytes = models, pictures, config.data.max_bytes
        self.queries: LRUCache[list[torch.Tensor]] = LRUCache(KEPT_QUERIES)

    async def about(self, request: Request) -> Response:
        """The models, and what their sets hold."""
        return _json([{"title": one.title, "samples": len(one.embedded or ())} for one in self.models])

    async def small(self, request: Request) -> Response:
        """A picture of a set, for the page."""
        part, row = request.path_params["part"], request.path_params["row"]
        data = await run_in_threadpool(self.pictures.shown, part, row)
        return Response(data, media_type="image/jpeg")

    async def some(self, request: Request) -> Response:
        """Samples from everywhere in the first model's set."""
        count = _count(await _asked(request))
        found = await run_in_threadpool(self.models[0].some, count)
        return _json({"samples": [sample._asdict() for sample in found]})

    async def search(self, request: Request) -> Response:
        """The pictures nearest to a text, by each model."""
        asked = await _asked(request)
        text, count = _text(asked, "text"), _count(asked)

        def work(model: SearchModel) -> Any:
            return {"pictures": _rows(model.found(model.encode_text(text), IMAGE, count))}

        return await self.answer_by_model(work)

    async def picture(self, request: Request) -> Response:
        """The captions and pictures nearest to a picture that the request holds, by each model."""
        count = _count({"count": whole_number(request.query_params.get("count", "24"))})
        return await self.near(await _body(request, self.most_bytes), count)

    async def sample(self, request: Request) -> Response:
        """The same for a picture of the set."""
        asked = await _asked(request)
        part, row = asked.get("part"), asked.get("row")
        if not isinstance(part, str) or type(row) is not int:
            raise HTTPException(400, "give a part and a row")
        return await self.near(await run_in_threadpool(self.pictures.encoded, part, row), _count(asked))

    async def near(self, data: bytes, count: int) -> Response:
        key = hashlib.blake2b(data, digest_size=16).hexdigest()
        features = await run_in_threadpool(lambda: [model.encode_image(data) for model in self.models])
        self.queries.get(key, lambda: features)

        def work(model: SearchModel) -> Any:
            query = features[self.models.index(model)]
            return {kind + "s": _rows(model.found(query, kind, count)) for kind in (TEXT, IMAGE)}

        return await self.answer_by_model(work, picture=key)

    async def classes(self, request: Request) -> Response:
        """The probabilities of labels for a picture that was asked for before, by each model."""
        asked = await _asked(request)
        labels, template = asked.get("labels"), _text(asked, "template")
        if not isinstance(labels, list) or not labels or not {*map(type, labels)} <= {str} or len(labels) > MOST_LABELS:
            raise HTTPException(400, f"give 1 to {MOST_LABELS} labels")
        if "{}" not in template:
            raise HTTPException(400, "write {} where the label goes in the prompt")
        try:
            features = self.queries.get(str(asked.get("picture")))
        except KeyError as error:
            raise HTTPException(404, "this picture is no longer kept; give it again") from error

        def work(model: SearchModel) -> Any:
            found = model.classes(features[self.models.index(model)], labels, template.replace("{}", "{c}"))
            return [{"label": label, "share": share, "score": score} for label, (share, score) in zip(labels, found)]

        return await self.answer_by_model(work)

    async def answer_by_model(self, work: Callable[[SearchModel], Any], **more: Any) -> Response:
        """One answer of each model, one after another."""
        return _json({"answers": [await run_in_threadpool(work, model) for model in self.models], **more})


def _rows(found: Sequence[tuple[Sample, float]]) -> list[dict[str, Any]]:
    return [{**sample._asdict(), "score": score} for sample, score in found]


async def _body(request: Request, most: int) -> bytes:
    """The body of a request. Refuses more than `most` bytes, before they are in memory."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise HTTPException(413, f"more than {most} bytes")
        parts.append(part)
    return b"".join(parts)


async def _asked(request: Request) -> dict[str, Any]:
    """The JSON object in a request."""
    try:
        found = json.loads(await _body(request, MOST_TEXT))
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, "this is no JSON") from error
    if not isinstance(found, dict):
        raise HTTPException(400, "this is no JSON object")
    return found


def _text(asked: dict[str, Any], name: str) -> str:
    found = asked.get(name)
    if not isinstance(found, str) or not found.strip():
        raise HTTPException(400, f"give a {name}")
    return found.encode("utf-8", "replace").decode().strip()


def _count(asked: dict[str, Any]) -> int:
    found = asked.get("count", 24)
    if type(found) is not int or not 0 < found <= MOST_RESULTS:
        raise HTTPException(400, f"give a count of 1 to {MOST_RESULTS}")
    return found
