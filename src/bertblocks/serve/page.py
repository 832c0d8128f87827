"""The page at `/`, on which every loaded model can be tried by hand. It loads nothing from elsewhere."""

from __future__ import annotations

import hashlib
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

#: The page runs its own script and style, talks to this server, and can be framed by nobody.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
#: By path: the type and the files, one after another.
FILES = {
    "/": ("text/html", ("index.html",)),
    "/page.css": ("text/css", ("page.css",)),
    "/page.js": ("text/javascript", ("results.js", "page.js")),
}


def page_routes() -> list[Route]:
    """The routes of the page. A browser keeps the files and asks each time whether they changed."""
    return [_make_route(path, kind, names) for path, (kind, names) in FILES.items()]


def _make_route(path: str, kind: str, names: tuple[str, ...]) -> Route:
    folder = resources.files(__package__).joinpath("page")
    body = b"".join(folder.joinpath(name).read_bytes() for name in names)
    tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    headers = {
        "ETag": tag,
        "Cache-Control": "no-cache",
        "Content-Security-Policy": POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }

    async def send(request: Request) -> Response:
        known = [value.strip().removeprefix("W/") for value in request.headers.get("If-None-Match", "").split(",")]
        if tag in known or "*" in known:
            return Response(status_code=304, headers=headers)
        return Response(body, headers=headers, media_type=kind)

    return Route(path, send, methods=["GET"], include_in_schema=False)
