"""The page at `/`: static files, the same for everybody. Its requests carry the API key."""

import hashlib
from collections.abc import Mapping
from importlib.resources import files
from types import MappingProxyType

from starlette.requests import Request
from starlette.responses import Response

_MEDIA_TYPES: Mapping[str, str] = {
    "css": "text/css",
    "html": "text/html",
    "js": "text/javascript",
    "svg": "image/svg+xml",
}
_HEADERS: Mapping[str, str] = {
    # Pictures that a user gives are shown from memory.
    "Content-Security-Policy": (
        "default-src 'self'; img-src 'self' blob:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'; object-src 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    # Asked for again each time, so that a page and its scripts are of one version.
    "Cache-Control": "no-cache",
}


def _read_files() -> dict[str, bytes]:
    contents = {}
    for file in files("mmjax.server").joinpath("page").iterdir():
        path = "/" if file.name == "index.html" else f"/page/{file.name}"
        contents[path] = file.read_bytes()
    return contents


PAGE_FILES: Mapping[str, bytes] = MappingProxyType(_read_files())
"""The content of each path of the page."""


async def serve_page(request: Request) -> Response:
    """Return the file at the request's path, which is one of `PAGE_FILES`."""
    path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
    content = PAGE_FILES[path]
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {**_HEADERS, "ETag": etag}
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers=headers)
    media_type = _MEDIA_TYPES[path.rpartition(".")[2] if path != "/" else "html"]
    return Response(content, headers=headers, media_type=media_type)
