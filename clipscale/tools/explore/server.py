"""The page's answers. A Host other than this machine's loopback is refused: foreign names may point here."""

import json
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from clipscale.data.sample import BrokenSampleError
from clipscale.tools.embed.settings import IMAGE, TEXT
from clipscale.tools.explore.search import Pictures, SearchModel

PAGE = {"": "text/html", "page.css": "text/css", "page.js": "text/javascript"}
MOST_TEXT = 1 << 16
"""Bytes of a question without a picture."""
RESULTS = 96
"""Of a question. The page shows as many of them as its reader has chosen."""
OWN = ("same-origin", "none", None)
"""Sec-Fetch-Site of this page's requests; older browsers send none."""
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


def application(model: SearchModel, pictures: Pictures) -> Starlette:
    """The page and its answers."""
    page = Page(model, pictures)
    routes = [Route(f"/{name}", partial(file, name or "page.html", kind)) for name, kind in PAGE.items()]
    routes += [Route("/model", page.describe), Route("/small/{part}/{row:int}", page.small)]
    for question in (page.search, page.picture, page.sample):
        routes.append(Route(f"/{question.__name__}", question, methods=["POST"]))
    hosts = Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"])
    own = Middleware(BaseHTTPMiddleware, dispatch=refuse_other_pages)
    handlers = dict.fromkeys((HTTPException, BrokenSampleError), problem)
    return Starlette(routes=routes, middleware=[hosts, own], exception_handlers=handlers)


async def refuse_other_pages(request: Request, following: RequestResponseEndpoint) -> Response:
    """Other pages may not ask: their browser says where a request comes from."""
    origin = request.headers.get("origin")
    own = origin is None or origin == f"{request.url.scheme}://{request.headers['host']}"
    if not own or request.headers.get("sec-fetch-site") not in OWN:
        return answer({"error": "another page asks"}, 403)
    return await following(request)


async def file(name: str, kind: str, request: Request) -> Response:
    return Response(Path(__file__).with_name(name).read_bytes(), headers=HEADERS, media_type=kind)


async def problem(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        return answer({"error": error.detail}, error.status_code)
    return answer({"error": f"this picture cannot be used ({error})"}, 422)


def answer(value: Any, status: int = 200) -> Response:
    """JSON in ASCII: captions may hold lone surrogates."""
    return Response(json.dumps(value, allow_nan=False), status, headers=HEADERS, media_type="application/json")


class Page:
    """What the page asks for. The model and files work in threads."""

    def __init__(self, model: SearchModel, pictures: Pictures) -> None:
        self.model = model
        self.pictures = pictures

    async def describe(self, request: Request) -> Response:
        """The model, and what its set holds."""
        return answer({"title": self.model.title, "samples": len(self.model.embedded)})

    async def small(self, request: Request) -> Response:
        """A picture of the set, for the page."""
        picture = await run_in_threadpool(self.pictures.small, **request.path_params)
        return Response(picture, headers=HEADERS, media_type="image/jpeg")

    async def search(self, request: Request) -> Response:
        """The pictures nearest to a text."""
        (text,) = await asked(request, text=str)
        features = await run_in_threadpool(self.model.encode_texts, [text])
        return answer({"images": await run_in_threadpool(self.model.matches, features[0], IMAGE, RESULTS)})

    async def picture(self, request: Request) -> Response:
        """The captions and pictures nearest to a picture that the request holds."""
        return await self.near(await body_of(request, "application/octet-stream", self.pictures.data.max_bytes))

    async def sample(self, request: Request) -> Response:
        """The same for a picture of the set."""
        part, row = await asked(request, part=str, row=int)
        return await self.near(await run_in_threadpool(self.pictures.encoded, part, row))

    async def near(self, data: bytes) -> Response:
        features = await run_in_threadpool(self.model.encode_image, data)
        rows = {
            kind + "s": await run_in_threadpool(self.model.matches, features, kind, RESULTS) for kind in (TEXT, IMAGE)
        }
        return answer(rows)


async def body_of(request: Request, kind: str, most: int) -> bytes:
    """The body of a request, which must be of that media type.

    A form of another page cannot be. Refuses more than `most` bytes, before they are in memory.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != kind:
        raise HTTPException(415, f"send {kind}")
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > most:
            raise HTTPException(413, f"more than {most} bytes")
    return bytes(body)


async def asked(request: Request, **types: type) -> list[Any]:
    """The values of these names in the JSON object of a request."""
    try:
        question = json.loads(await body_of(request, "application/json", MOST_TEXT))
    except (ValueError, RecursionError):
        question = None
    values = question if isinstance(question, dict) else {}
    for name, kind in types.items():
        if type(values.get(name)) is not kind:
            raise HTTPException(400, f"give {name}, which is {kind.__name__}")
    return [values[name] for name in types]
