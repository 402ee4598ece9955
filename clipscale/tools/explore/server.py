"""Answers the page's requests. Refuses a Host other than this machine's loopback: foreign names may point here."""

import json
import re
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from clipscale.common.text import printable
from clipscale.data.sample import BrokenSampleError
from clipscale.tools.embed.settings import IMAGE, TEXT
from clipscale.tools.explore.search import Explorer

# Results of a query. The page shows as many of them as its reader has chosen.
RESULTS = 96
# Sec-Fetch-Site of this page's requests; older browsers send none.
OWN_PAGE = ("same-origin", "none", None)
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


def application(explorer: Explorer) -> Starlette:
    """The page and its answers. All requests are GET, and are answered in threads."""

    def describe(request: Request) -> Response:
        """The model, and what its set holds."""
        return answer({"title": explorer.title, "samples": len(explorer.embedded)})

    def thumbnail(request: Request) -> Response:
        """A picture of the set, for the page."""
        return Response(explorer.thumbnail(request.path_params["number"]), media_type="image/jpeg")

    def by_text(request: Request) -> Response:
        """The pictures nearest to a text."""
        text = request.query_params.get("text")
        if text is None:
            raise HTTPException(400, "give text")
        return answer({"images": explorer.matches(explorer.text_feature(text), IMAGE, RESULTS)})

    def by_picture(request: Request) -> Response:
        """A picture of the set, and the captions and pictures nearest to it."""
        number = picture_number(request, len(explorer.embedded))
        query = explorer.picture_feature(number)
        matches = {f"{side}s": explorer.matches(query, side, RESULTS) for side in (TEXT, IMAGE)}
        return answer({"sample": explorer.sample(number), **matches})

    routes = [
        Route("/model", describe),
        Route("/small/{number:int}", thumbnail),
        Route("/search", by_text),
        Route("/search/{number:path}", by_picture),
        Mount("/", StaticFiles(directory=Path(__file__).with_name("page"), html=True)),
    ]
    middleware = [
        Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"]),
        Middleware(BaseHTTPMiddleware, dispatch=refuse_other_pages),
    ]
    return Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={BrokenSampleError: unusable_picture, ValueError: unusable_picture},
    )


def picture_number(request: Request, samples: int) -> int:
    """The number that is asked for in the page's address. Raises HTTPException if no sample has it."""
    text = request.path_params["number"]
    if not re.fullmatch("[0-9]{1,18}", text) or int(text) >= samples:
        raise HTTPException(422, printable(f"picture={text[:80]}: the set's {samples} pictures are numbered from 0 on"))
    return int(text)


async def refuse_other_pages(request: Request, following: RequestResponseEndpoint) -> Response:
    """Refuse requests of other pages. Their browser says where a request comes from, and does not show them answers."""
    if request.headers.get("sec-fetch-site") not in OWN_PAGE:
        return PlainTextResponse("another page asks", 403)
    response = await following(request)
    response.headers.update(HEADERS)
    return response


async def unusable_picture(request: Request, error: Exception) -> Response:
    return PlainTextResponse(printable(f"this picture cannot be used ({error})"), 422)


def answer(value: object) -> Response:
    """JSON in ASCII: captions may hold lone surrogates."""
    return Response(json.dumps(value, allow_nan=False), media_type="application/json")
