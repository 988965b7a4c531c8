"""The header by which a gateway learns what a request's media are called here."""

from collections.abc import Mapping, Sequence
from urllib.parse import quote

from mmjax.frontend.engine_client.request_stream import RequestStream

MEDIA_HASHES_HEADER = "x-media-hashes"
MAX_HASHES = 64
"""Of one response, so that its headers stay within what proxies take."""


def media_headers(streams: Sequence[RequestStream]) -> Mapping[str, str]:
    """Return the header with the hashes of a request's media, in the prompt's order."""
    hashes = [item.mm_hash for stream in streams for item in stream.request.items]
    if not hashes:
        return {}
    # A trusted id may hold any character.
    shown = [quote(mm_hash, safe="") for mm_hash in dict.fromkeys(hashes)]
    return {MEDIA_HASHES_HEADER: ",".join(shown[:MAX_HASHES])}
