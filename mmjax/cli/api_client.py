"""A client of a running server's chat API, with nothing but the standard library."""

import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from http.client import HTTPException
from typing import Any

from mmjax.errors import ConfigError, MMJaxError

KEY_VARIABLE = "MMJAX_API_KEY"
_TIMEOUT_S = 600.0
_MAX_ERROR_BYTES = 65536


class ApiError(MMJaxError):
    """The server refused a request, or could not be reached."""


class ApiClient:
    """Talks to one server."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """`url`: with or without /v1; `api_key` None: that of the environment."""
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"`--url` is {url!r}; expected an address, as http://127.0.0.1:8000")
        self._root = url.rstrip("/").removesuffix("/v1")
        self._url = self._root + "/v1"
        self._headers = {"Content-Type": "application/json"}
        if key := api_key or os.environ.get(KEY_VARIABLE):
            self._headers["Authorization"] = f"Bearer {key}"

    def find_model(self) -> str:
        """Return the name of the model that the server serves."""
        try:
            with self._open("/models") as response:
                return json.load(response)["data"][0]["id"]
        except (ValueError, LookupError, TypeError) as error:
            raise ApiError(
                f"{self._url}/models names no model; is it the address of such a server?"
            ) from error

    def count_programs_left(self) -> int:
        """Return how many programs the server has still to compile; 0 where it does not say."""
        try:
            with urllib.request.urlopen(f"{self._root}/health", timeout=_TIMEOUT_S) as response:
                return int(json.load(response)["num_programs_left"])
        except (OSError, ValueError, KeyError, TypeError):
            return 0

    def stream_chat(self, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the events of a streamed chat; ApiError if one is an error, or it breaks off."""
        data = json.dumps({**body, "stream": True}).encode()
        with self._open("/chat/completions", data) as response:
            for line in self._read_lines(response):
                if line.strip() == b"data: [DONE]":
                    return
                if not line.startswith(b"data: "):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise ApiError(event["error"]["message"])
                yield event
        raise self._broken_off("it ended before the answer's end")

    def _read_lines(self, response: Any) -> Iterator[bytes]:
        try:
            yield from response
        except (OSError, HTTPException) as error:
            raise self._broken_off(repr(error)) from error

    def _broken_off(self, reason: str) -> ApiError:
        return ApiError(f"{self._url} broke its answer off ({reason}); does it still run?")

    def _open(self, path: str, data: bytes | None = None) -> Any:
        request = urllib.request.Request(self._url + path, data, self._headers)
        try:
            return urllib.request.urlopen(request, timeout=_TIMEOUT_S)
        except urllib.error.HTTPError as error:
            with error:
                raise ApiError(_message_of(error)) from error
        except OSError as error:
            raise ApiError(f"{self._url} cannot be reached ({error}); does it run?") from error


def _message_of(error: urllib.error.HTTPError) -> str:
    text = error.read(_MAX_ERROR_BYTES)
    mend = f", by `--api-key` or {KEY_VARIABLE}" if error.code == 401 else ""
    try:
        return f"{error.code}: {json.loads(text)['error']['message']}{mend}"
    except (ValueError, KeyError, TypeError):
        return f"{error.code} {error.reason}"
