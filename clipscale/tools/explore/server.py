"""The page's answers. A Host other than this machine's loopback is refused: foreign names may point here."""

import json
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from clipscale.common.record import Record
from clipscale.common.terminal import printable
from clipscale.data.sample import BrokenSampleError
from clipscale.tools.embed.settings import IMAGE, TEXT
from clipscale.tools.explore.search import Explorer

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


def application(explorer: Explorer) -> Starlette:
    """The page and its answers. The model and files work in threads."""

    def describe(request: Request) -> Response:
        """The model, and what its set holds."""
        return answer({"title": explorer.title, "samples": len(explorer.embedded)})

    def small(request: Request) -> Response:
        """A picture of the set, for the page."""
        return Response(explorer.small(**request.path_params), media_type="image/jpeg")

    async def search(request: Request) -> Response:
        """The pictures nearest to a text; the captions and pictures nearest to a picture, sent or of the set."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind == "application/octet-stream":
            question = await body_of(request, explorer.data.max_bytes)
        elif kind == "application/json":
            question = await asked(request)
        else:  # what a form of another page may send
            raise HTTPException(415, "send application/json or application/octet-stream")
        return answer(await run_in_threadpool(found, explorer, question))

    routes = [
        Route("/model", describe),
        Route("/small/{part}/{row:int}", small),
        Route("/search", search, methods=["POST"]),
        Mount("/", StaticFiles(directory=Path(__file__).with_name("page"), html=True)),
    ]
    middleware = [
        Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"]),
        Middleware(BaseHTTPMiddleware, dispatch=refuse_other_pages),
    ]
    return Starlette(routes=routes, middleware=middleware, exception_handlers={BrokenSampleError: unusable})


async def refuse_other_pages(request: Request, following: RequestResponseEndpoint) -> Response:
    """Other pages may not ask: their browser says where a request comes from."""
    own = f"{request.url.scheme}://{request.headers['host']}"
    if request.headers.get("origin", own) != own or request.headers.get("sec-fetch-site") not in OWN:
        return PlainTextResponse("another page asks", 403)
    response = await following(request)
    response.headers.update(HEADERS)
    return response


async def unusable(request: Request, error: Exception) -> Response:
    return PlainTextResponse(printable(f"this picture cannot be used ({error})"), 422)


def answer(value: Any) -> Response:
    """JSON in ASCII: captions may hold lone surrogates."""
    return Response(json.dumps(value, allow_nan=False), media_type="application/json")


async def body_of(request: Request, most: int) -> bytes:
    """The body of a request. Refuses more than `most` bytes, before they are in memory."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > most:
            raise HTTPException(413, f"more than {most} bytes")
    return bytes(body)


async def asked(request: Request) -> Any:
    """The question in the JSON of a request; None if it is no JSON."""
    try:
        return json.loads(await body_of(request, MOST_TEXT))
    except (ValueError, RecursionError):
        return None


def found(explorer: Explorer, question: Any) -> Record:
    """The samples nearest to a question: the bytes of a picture, or {text}, or {part, row} of a picture of the set."""
    kinds = [TEXT, IMAGE]
    match question:
        case bytes():
            query = explorer.encode_image(question)
        case {"part": str(part), "row": int(row)}:
            query = explorer.encode_image(explorer.picture(part, row))
        case {"text": str(text)}:
            query = explorer.encode_text(text)
            kinds = [IMAGE]
        case _:
            raise HTTPException(400, "give text, or part and row")
    return {f"{kind}s": explorer.matches(query, kind, RESULTS) for kind in kinds}
