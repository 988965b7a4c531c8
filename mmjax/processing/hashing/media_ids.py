"""Ids that clients give to media: claims, each good in its client's own domain alone.

A claim never is an identity: it leads to the content that came with it, whose hash is one.
"""

import threading
from collections.abc import Iterable
from typing import NamedTuple

from mmjax.errors import MediaIdConflictError, RequestValueError
from mmjax.processing.hashing.recent import RecentMap

MAX_MEDIA_ID_LENGTH = 128

UUIDS_PARAM = "multi_modal_uuids"


class MediaId(str):
    """A uuid that knows the field of the request that it stood in."""

    __slots__ = ("param",)

    def __new__(cls, text: str, param: str) -> "MediaId":
        """Return `text`, with its place."""
        media_id = super().__new__(cls, text)
        media_id.param = param
        return media_id

    param: str


def param_of(uuid: str) -> str:
    """Return the field of the request that a uuid stood in, as far as it is known."""
    return uuid.param if isinstance(uuid, MediaId) else UUIDS_PARAM


def is_media_id(text: str) -> bool:
    """Whether a client may use `text` as an id: 1 to 128 printable characters."""
    return 0 < len(text) <= MAX_MEDIA_ID_LENGTH and text.isprintable()


def check_media_id(uuid: str, modality: str, index: int) -> None:
    """Refuse an id that no client may use."""
    if not is_media_id(uuid):
        raise RequestValueError(
            f"the uuid of {modality} {index} has {len(uuid)} characters; it must have 1 to "
            f"{MAX_MEDIA_ID_LENGTH}, all printable",
            param=param_of(uuid),
        )


class MediaClaim(NamedTuple):
    """That `uuid` means the item with this content."""

    modality: str
    place: int
    uuid: str
    content: bytes
    """The content's digest, whatever the item is processed with."""


class MediaIds:
    """Which content every id stands for, by domain; as many as `capacity`, the latest used."""

    def __init__(self, capacity: int) -> None:
        self._contents: RecentMap[tuple[str, str, str], bytes] = RecentMap(capacity)
        self._lock = threading.Lock()

    def find(self, domain: str, modality: str, uuid: str) -> bytes | None:
        """Return the digest of the content that came with an id in this domain."""
        return self._contents.get((domain, modality, str(uuid)))

    def check(self, domain: str, claims: Iterable[MediaClaim]) -> dict[tuple[str, str, str], bytes]:
        """Return what ids would stand for; MediaIdConflictError where one means something else."""
        bound: dict[tuple[str, str, str], bytes] = {}
        for claim in claims:
            key = (domain, claim.modality, str(claim.uuid))
            known = bound.get(key) or self._contents.get(key)
            if known is not None and known != claim.content:
                raise MediaIdConflictError(
                    f"the uuid {str(claim.uuid)!r} of {claim.modality} {claim.place} came "
                    "with another content before; give other content another uuid",
                    param=param_of(claim.uuid),
                )
            bound[key] = claim.content
        return bound

    def bind(self, domain: str, claims: Iterable[MediaClaim]) -> None:
        """Note what ids stand for; where one stands for another content already, note none."""
        with self._lock:
            for key, content in self.check(domain, claims).items():
                self._contents.put(key, content)
