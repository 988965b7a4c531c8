"""The API's OpenAPI schema: what routes take and answer that FastAPI does not read itself."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from mmjax.server.openai.errors import ErrorBody

_SCHEMAS = "#/components/schemas/"

_ERRORS: Mapping[int, str] = {
    400: "A field is wrong, or not supported; `param` names it.",
    401: "The API key is missing or wrong.",
    404: "There is no such model, adapter, response or route.",
    408: "The request, or its body, was not finished in time.",
    409: "A media id was given with other content before.",
    413: "The body is too large.",
    422: "A medium could not be fetched or decoded.",
    429: "The server has as many requests as it takes; see `Retry-After`.",
    431: "The headers are too many or too large.",
    500: "A fault of the server's; the message has the request's id, and the log says more.",
    503: "Nothing is computed at present; see `Retry-After`.",
}


def error_responses() -> dict[int | str, dict[str, Any]]:
    """Return the errors of all routes."""
    body = {"application/json": {"schema": {"$ref": f"{_SCHEMAS}{ErrorBody.__name__}"}}}
    return {status: {"description": text, "content": body} for status, text in _ERRORS.items()}


def stream_responses() -> dict[int | str, dict[str, Any]]:
    """Return what a route answers with `stream`, beside JSON."""
    text = "The answer; with `stream`, as server-sent events."
    events = {"text/event-stream": {"schema": {"type": "string"}}}
    return {200: {"description": text, "content": events}}


def takes(model: type[BaseModel], media_type: str = "application/json") -> dict[str, Any]:
    """Return the schema of a body that FastAPI does not read."""
    schema = {"$ref": f"{_SCHEMAS}{model.__name__}"}
    return {"requestBody": {"required": True, "content": {media_type: {"schema": schema}}}}


def describe(app: FastAPI, bodies: Sequence[type[BaseModel]]) -> None:
    """Let the application's schema hold `bodies` and the body of errors."""

    def make() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
            app.openapi_schema = schema
            schemas = schema.setdefault("components", {}).setdefault("schemas", {})
            template = f"{_SCHEMAS}{{model}}"
            _, definitions = models_json_schema(
                [(body, "validation") for body in bodies], ref_template=template
            )
            schemas.update(definitions["$defs"])
            _, errors = msgspec.json.schema_components(
                [ErrorBody], ref_template=template.replace("model", "name")
            )
            schemas.update(errors)
        return app.openapi_schema

    app.openapi = make
