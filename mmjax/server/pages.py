"""The pages: `/`, a playground of static files, and `/docs`, made from the OpenAPI schema.

Neither takes anything from other hosts; `/docs` has no scripts, and the requests of `/` carry the
API key.
"""

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping
from html import escape
from importlib.resources import files
from importlib.resources.abc import Traversable
from types import MappingProxyType
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from mmjax.server.openai.errors import route_path

_MEDIA_TYPES: Mapping[str, str] = {
    "css": "text/css",
    "html": "text/html",
    "js": "text/javascript",
    "svg": "image/svg+xml",
}
_HEADERS: Mapping[str, str] = {
    # Pictures and videos that a user gives are shown from memory.
    "Content-Security-Policy": (
        "default-src 'self'; img-src 'self' blob:; media-src 'self' blob:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; object-src 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    # Asked for again each time, so that a page and its scripts are of one version.
    "Cache-Control": "no-cache",
}


def _read_files(folder: Traversable, address: str) -> dict[str, bytes]:
    contents = {}
    for file in folder.iterdir():
        if file.is_dir():
            contents |= _read_files(file, f"{address}{file.name}/")
        else:
            path = "/" if file.name == "index.html" else f"{address}{file.name}"
            contents[path] = file.read_bytes()
    return contents


PAGE_FILES: Mapping[str, bytes] = MappingProxyType(
    _read_files(files("mmjax.server").joinpath("page"), "/page/")
)
"""The content of each path of the page."""


async def serve_page(request: Request) -> Response:
    """Return the file at the request's path, which is one of `PAGE_FILES`."""
    path = route_path(request.scope)
    content = PAGE_FILES[path]
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {**_HEADERS, "ETag": etag}
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers=headers)
    media_type = _MEDIA_TYPES[path.rpartition(".")[2] if path != "/" else "html"]
    return Response(content, headers=headers, media_type=media_type)


# ---- /docs --------------------------------------------------------------------------------------

_STYLE = """
:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem}h2{font-size:1.1rem;margin-top:2.5rem;font-family:ui-monospace,monospace}
table{border-collapse:collapse;width:100%;display:block;overflow-x:auto}
th,td{text-align:left;vertical-align:top;padding:.25rem .75rem .25rem 0;
border-bottom:1px solid #8884}
code,pre{font-family:ui-monospace,monospace;font-size:.9em}
pre{padding:.75rem;overflow-x:auto;border:1px solid #8884}
"""
_STYLE_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()

_POLICY = (
    f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)

_METHODS = ("get", "post", "delete")


def api_page(schema: Mapping[str, Any], root_path: str) -> HTMLResponse:
    """Return the page."""
    info = schema["info"]
    title = f"{escape(info['title'])} {escape(info['version'])}"
    body = "".join(_operations(schema))
    page = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<style>{_STYLE}</style></head><body><h1>{title}</h1>"
        f'<p>The same for programs: <a href="{escape(root_path)}/openapi.json">openapi.json</a>.'
        f"</p>{body}</body></html>"
    )
    return HTMLResponse(
        page,
        headers={"Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff"},
    )


def _operations(schema: Mapping[str, Any]) -> Iterator[str]:
    for path, item in schema["paths"].items():
        for method in _METHODS:
            if method in item:
                yield f"<h2>{method.upper()} {escape(path)}</h2>"
                yield from _operation(item[method], schema)


def _operation(operation: Mapping[str, Any], schema: Mapping[str, Any]) -> Iterator[str]:
    summary = operation.get("description") or operation.get("summary") or ""
    yield f"<p>{escape(summary)}</p>"
    content = operation.get("requestBody", {}).get("content", {})
    # JSON, or a form.
    model = next(iter(content.values()), {}).get("schema")
    if model is None:
        return
    fields = _resolve(model, schema)
    required = set(fields.get("required", ()))
    yield "<table><thead><tr><th>field</th><th>values</th><th>default</th></tr></thead><tbody>"
    for name, field in fields.get("properties", {}).items():
        default = "required" if name in required else _default(field)
        yield (
            f"<tr><td><code>{escape(name)}</code></td><td>{escape(_kind(field, schema))}</td>"
            f"<td><code>{escape(default)}</code></td></tr>"
        )
    yield "</tbody></table>"


def _default(field: Mapping[str, Any]) -> str:
    return json.dumps(field["default"]) if "default" in field else ""


def _kind(field: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    """Return what a field may hold, in words."""
    for union in ("anyOf", "oneOf"):
        if union in field:
            return " or ".join(dict.fromkeys(_kind(one, schema) for one in field[union]))
    if "$ref" in field:
        return field["$ref"].rpartition("/")[2]
    if "const" in field:
        return json.dumps(field["const"])
    if "enum" in field:
        return " or ".join(json.dumps(one) for one in field["enum"])
    kind = field.get("type", "anything")
    if kind == "array":
        return f"list of {_kind(field.get('items', {}), schema)}"
    limits = [
        f"{word} {field[key]}"
        for key, word in _LIMIT_WORDS.items()
        if key in field and abs(field[key]) < _SHOWN_LIMIT
    ]
    return f"{kind}, {', '.join(limits)}" if limits else kind


_SHOWN_LIMIT = 2**30
_LIMIT_WORDS = {
    "minimum": "at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "exclusiveMaximum": "below",
    "maxLength": "characters up to",
}


def _resolve(model: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    if "$ref" in model:
        return schema["components"]["schemas"][model["$ref"].rpartition("/")[2]]
    return model
