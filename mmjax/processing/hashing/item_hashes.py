"""The identity of every item of a request: its content's hash, or the uuid that stands for it.

Remembers what encoded bytes were once hashed to: a repeated image is not decoded again. Holds
no media and no tensors. An id that a client gives never is an identity, but a claim, good in its
client's own domain alone: it leads to the content that came with it, whose hash is one.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, TypeVar

from mmjax.errors import MediaIdConflictError, RequestError, RequestValueError
from mmjax.processing.hashing.hasher import ContentHasher, MultiModalHasher
from mmjax.processing.items.items import MultiModalDataItems
from mmjax.processing.media.encoded import EncodedAudio, EncodedFrames, EncodedImage, EncodedVideo

MAX_REMEMBERED = 65_536
"""Contents, and ids, of which the hash is remembered: some 20 MB."""

MAX_MEDIA_ID_LENGTH = 128

UUIDS_PARAM = "multi_modal_uuids"


K = TypeVar("K")
V = TypeVar("V")


class RecentMap(Generic[K, V]):
    """A memory of at most `capacity` entries; what was not used for longest goes first.

    Safe for threads.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}; give at least 1")
        self.capacity = capacity
        self._entries: OrderedDict[K, V] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K) -> V | None:
        """Return what is known under `key`, now the last to go."""
        with self._lock:
            if key not in self._entries:
                return None
            self._entries.move_to_end(key)
            return self._entries[key]

    def put(self, key: K, value: V) -> None:
        """Remember `value`."""
        with self._lock:
            self._entries[key] = value
            self._entries.move_to_end(key)
            if len(self._entries) > self.capacity:
                self._entries.popitem(last=False)


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


_SCOPE_BY_MODALITY = {"image": "images_kwargs", "video": "videos_kwargs", "audio": "audio_kwargs"}


class _Factors(NamedTuple):
    """What decides, beside its content, what an item is processed to."""

    kwargs: Mapping[str, object]
    """For the hasher: `{"mm_processor_kwargs": ...}`, or nothing."""
    key: str
    """A digest of them; empty for none."""


_NO_FACTORS = _Factors({}, "")


class _Entry(NamedTuple):
    """One item of a request."""

    modality: str
    place: int
    item: Any
    """None: only its uuid was given."""
    uuid: str | None
    factors: _Factors

    def name(self, request_id: str) -> str:
        return f"{request_id}-{self.modality}-{self.place}"


class HashedItems(NamedTuple):
    """The hashes of a request's items, and what its ids claim."""

    by_modality: dict[str, list[str]]
    """One hash per item."""
    id_domain: str | None
    claims: Sequence[MediaClaim]
    """For `ItemHasher.bind`, once the items have proved sound."""


class ItemHasher:
    """Computes the `mm_hash` of a model's items; many threads may share it, and should."""

    def __init__(
        self, model_id: str, algorithm: str = "blake3", *, max_remembered: int = MAX_REMEMBERED
    ) -> None:
        self.model_id = model_id
        self._hasher = MultiModalHasher(algorithm)
        self._content_hasher = ContentHasher(algorithm)
        # (modality, content's digest, factors' key, is an image's own id trusted) -> mm_hash
        self._known: RecentMap[tuple[str, bytes, str, bool], str] = RecentMap(max_remembered)
        self._media_ids = MediaIds(max_remembered)

    def identify(
        self,
        mm_items: MultiModalDataItems,
        mm_uuids: Mapping[str, Sequence[str | None]],
        mm_kwargs: Mapping[str, object],
        *,
        id_domain: str | None = None,
        cache_salt: str | None = None,
        request_id: str | None = None,
    ) -> HashedItems:
        """Return one hash per item; each has data, a uuid, or both. Decodes no image.

        Claims are checked, not yet bound: an image that turns out to be broken takes no id.

        Args:
            mm_items: The parsed items.
            mm_uuids: Per modality, a uuid or None for each item.
            mm_kwargs: The request's own kwargs for the HF processor.
            id_domain: Whose uuids these are: claims, which lead to the content that came with
                them. None: they are trusted, and are the identity themselves.
            cache_salt: Whose caches these are: only callers with the same salt meet the names.
            request_id: Given where nothing is kept by its content: an item without a uuid is
                then named after the request, and not hashed.
        """
        entries = self._to_entries(mm_items, mm_uuids, mm_kwargs)
        claims: list[MediaClaim] = []
        if id_domain is None:
            hashes = [self._hash_trusted(entry, request_id) for entry in entries]
        else:
            hashes = self._hash_claimed(entries, id_domain, request_id, claims)
        by_modality: dict[str, list[str]] = {modality: [] for modality in mm_items}
        for entry, mm_hash in zip(entries, hashes, strict=True):
            name = mm_hash if cache_salt is None else self._salt(mm_hash, cache_salt)
            by_modality[entry.modality].append(name)
        return HashedItems(by_modality, id_domain, claims)

    def name_on_disk(self, mm_hash: str, item: Any) -> bytes:
        """Return what an item is kept by beyond this process.

        By its content as well: a uuid may stand for another one the next day.
        """
        return f"{mm_hash} {self._content_hasher.hash_kwargs(item=item)}".encode()

    def find_names(self, modality: str, item: Any, cache_salt: str | None = None) -> list[str]:
        """Return what an encoded item that was in a request before is called, without kwargs."""
        digest = self._digest_encoded(item)
        keys = [(modality, digest or b"", "", is_trusted) for is_trusted in (False, True)]
        names = [name for key in keys if (name := self._known.get(key)) is not None]
        return names if cache_salt is None else [self._salt(name, cache_salt) for name in names]

    def bind(self, hashed: HashedItems) -> None:
        """Note what the ids of a request stand for; MediaIdConflictError notes none."""
        if hashed.id_domain is not None:
            self._media_ids.bind(hashed.id_domain, hashed.claims)

    def _salt(self, mm_hash: str, cache_salt: str) -> str:
        return self._hasher.hash_kwargs(cache_salt=cache_salt, mm_hash=mm_hash)

    def _to_entries(
        self,
        mm_items: MultiModalDataItems,
        mm_uuids: Mapping[str, Sequence[str | None]],
        mm_kwargs: Mapping[str, object],
    ) -> list[_Entry]:
        entries: list[_Entry] = []
        for modality, items in mm_items.items():
            factors = self._to_factors(modality, mm_kwargs)
            uuids = mm_uuids.get(modality) or [None] * len(items)
            for index, uuid in enumerate(uuids):
                if uuid is not None:
                    _check_text(uuid, modality, index)
                item = items.get_item_for_hash(index)
                entries.append(_Entry(modality, index, item, uuid, factors))
        return entries

    def _to_factors(self, modality: str, mm_kwargs: Mapping[str, object]) -> _Factors:
        if not mm_kwargs:
            return _NO_FACTORS
        try:
            scoped = scope_mm_kwargs(modality, mm_kwargs)
        except RecursionError as error:
            raise RequestValueError(
                "mm_processor_kwargs are nested too deep, or hold themselves; flatten them",
                param="mm_processor_kwargs",
            ) from error
        if not scoped:
            return _NO_FACTORS
        kwargs = {"mm_processor_kwargs": scoped}
        with _at("mm_processor_kwargs"):
            return _Factors(kwargs, self._hasher.hash_kwargs(**kwargs))

    # ---- trusted ids ----------------------------------------------------------------------------

    def _hash_trusted(self, entry: _Entry, request_id: str | None) -> str:
        if entry.uuid is None:
            if request_id is not None:
                return entry.name(request_id)
            return self._hash_content(entry, self._digest_encoded(entry.item), is_trusted=True)
        uuid = str(entry.uuid)
        if not entry.factors.kwargs:
            return uuid
        return self._hasher.hash_kwargs(
            model_id=self.model_id, **{entry.modality: uuid}, **entry.factors.kwargs
        )

    # ---- ids that are claims --------------------------------------------------------------------

    def _hash_claimed(
        self,
        entries: Sequence[_Entry],
        domain: str,
        request_id: str | None,
        claims: list[MediaClaim],
    ) -> list[str]:
        hashes: list[str | None] = []
        for entry in entries:
            if entry.uuid is not None:
                check_media_id(entry.uuid, entry.modality, entry.place)
            if entry.item is None:
                hashes.append(None)
            elif entry.uuid is None and request_id is not None:
                hashes.append(entry.name(request_id))
            else:
                digest = self._digest_encoded(entry.item)
                if entry.uuid is not None:
                    digest = digest or self._digest_decoded(entry)
                    claims.append(MediaClaim(entry.modality, entry.place, entry.uuid, digest))
                hashes.append(self._hash_content(entry, digest, is_trusted=False))
        bound = self._media_ids.check(domain, claims)
        # Last: an id may stand beside its content in the same request.
        return [
            self._look_up(entry, domain, bound) if mm_hash is None else mm_hash
            for entry, mm_hash in zip(entries, hashes, strict=True)
        ]

    def _look_up(
        self, entry: _Entry, domain: str, bound: Mapping[tuple[str, str, str], bytes]
    ) -> str:
        modality, place, _, uuid, factors = entry
        digest = bound.get((domain, modality, str(uuid)))
        digest = digest or self._media_ids.find(domain, modality, uuid or "")
        mm_hash = None
        if digest is not None:
            mm_hash = self._known.get((modality, digest, factors.key, False))
        if mm_hash is None:
            raise RequestValueError(
                f"Cache miss for {modality} at index {place} but data is not provided; "
                "send the data with its uuid again",
                param="multi_modal_data" if uuid is None else param_of(uuid),
            )
        return mm_hash

    # ---- contents -------------------------------------------------------------------------------

    def _digest_encoded(self, item: Any) -> bytes | None:
        """Return what encoded bytes are known by; None for an item that has none."""
        if isinstance(item, EncodedImage):
            digest = self._hasher.digest_file(item)
            # Of fixed length first: no file and range can be taken for another.
            scaled = repr(tuple(item.pixel_range)).encode() if item.pixel_range else b""
            return digest + scaled
        if isinstance(item, EncodedVideo):
            digest = self._hasher.digest_file(item)
            return digest + repr(tuple(item.sampling)).encode()
        if isinstance(item, EncodedAudio):
            return self._hasher.digest_file(item) + b"audio"
        if isinstance(item, EncodedFrames):
            digests = [self._digest_encoded(frame) or b"" for frame in item.frames]
            speed = b"" if item.fps is None else repr(item.fps).encode()
            return self._hasher.digest_bytes(b"".join(digests)) + b"frames" + speed
        return None

    def _digest_decoded(self, entry: _Entry) -> bytes:
        with _at(f"multi_modal_data.{entry.modality}[{entry.place}]"):
            return bytes.fromhex(self._content_hasher.hash_kwargs(item=entry.item))

    def _hash_content(self, entry: _Entry, digest: bytes | None, *, is_trusted: bool) -> str:
        key = None if digest is None else (entry.modality, digest, entry.factors.key, is_trusted)
        known = None if key is None else self._known.get(key)
        if known is not None:
            return known
        hasher = self._hasher if is_trusted else self._content_hasher
        with _at(f"multi_modal_data.{entry.modality}[{entry.place}]"):
            mm_hash = hasher.hash_kwargs(
                model_id=self.model_id, **{entry.modality: entry.item}, **entry.factors.kwargs
            )
        if key is not None:
            self._known.put(key, mm_hash)
        return mm_hash


def _check_text(uuid: str, modality: str, index: int) -> None:
    """Refuse a uuid that cannot be written: it goes to the engine, and into its hashes."""
    if not uuid:
        raise RequestValueError(
            f"the uuid of {modality} {index} is empty; give at least one character, or None",
            param=param_of(uuid),
        )
    try:
        uuid.encode()
    except UnicodeEncodeError as error:
        raise RequestValueError(
            f"the uuid of {modality} {index} has the lone surrogate {uuid[error.start]!r} at "
            f"character {error.start}; give valid Unicode",
            param=param_of(uuid),
        ) from error


def scope_mm_kwargs(modality: str, mm_kwargs: Mapping[str, object]) -> dict[str, object]:
    """Return the kwargs that bear on one modality, in one order; empty scopes are left out.

    A modality with no scope of its own keeps all.
    """
    scope = _SCOPE_BY_MODALITY.get(modality)
    others = set(_SCOPE_BY_MODALITY.values()) - {scope} if scope is not None else set()
    scopes = {"text_kwargs", *_SCOPE_BY_MODALITY.values()}
    return {
        key: _sorted(value)
        for key, value in sorted(mm_kwargs.items())
        if key not in others and not (key in scopes and not value)
    }


def _sorted(value: object) -> object:
    """Order a mapping by its keys: HF reads kwargs by name, and the hash reads them in order."""
    if not isinstance(value, Mapping):
        return value
    return {key: _sorted(value[key]) for key in sorted(value, key=str)}


@contextmanager
def _at(param: str) -> Iterator[None]:
    """Say where an error is, if it does not say so itself."""
    try:
        yield
    except RequestError as error:
        error.param = error.param or param
        raise
