"""What stands before every route: the key, and the size of the body."""

import hashlib
import hmac
from collections.abc import Iterable

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mmjax.server.errors import plain_error_response

OPEN_PATHS = frozenset({"/health", "/ready", "/version"})
"""All that is served without a key, when keys are set."""


API_KEY_STATE = "api_key_digest"
"""Where in a request's state the key that it bore is found: its digest, never the key."""


class KeyMiddleware:
    """Denies by default: every path needs a key but the open ones, whether it exists or not."""

    def __init__(self, app: ASGIApp, api_keys: Iterable[str]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or answer 401."""
        if scope["type"] == "lifespan" or self._is_allowed(scope):
            await self._app(scope, receive, send)
            return
        response = plain_error_response(
            401,
            "the API key is missing or wrong; send `Authorization: Bearer <key>`",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await response(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        if scope["type"] != "http":
            return False
        # The path that routes are matched by; never one rebuilt from the Host header.
        if scope["path"].removeprefix(scope.get("root_path", "")) in OPEN_PATHS:
            return True
        headers = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(headers) != 1:
            return False
        scheme, _, key = headers[0].partition(b" ")
        digest = _digest(key.strip())
        # All keys are compared, and digests of one length: time tells nothing of them.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        scope.setdefault("state", {})[API_KEY_STATE] = digest.hex()
        return scheme.lower() == b"bearer" and any(matches)


class BodyLimitMiddleware:
    """Refuses bodies over a limit: by their header at once, else as soon as they pass it."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, counting, or answer 413."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if _declared_length(scope) > self._max_bytes:
            response = plain_error_response(
                413,
                f"the body is larger than {self._max_bytes} bytes; send smaller or fewer images",
                code="http_413",
                headers={"Connection": "close"},
            )
            await response(scope, receive, send)
            return
        num_bytes = 0

        async def count() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise HTTPException(413)
            return message

        await self._app(scope, count, send)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _declared_length(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            # More digits than any body has are as good as too many.
            return int(value[:20])
    return 0
