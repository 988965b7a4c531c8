"""What an engine and the workers that encode for it say to each other, and over which sockets.

An engine connects, says `Hello` twice a second, and is answered with `Welcome`: each tells whose
rows it means. `EncodeItem` is answered with `EncodedItem`, or `NotEncoded`. Frames are those of
`codec.py`. An address of another host takes a key (CURVE, of libzmq), which both ends have.
"""

import hmac
import ipaddress
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import zmq
from blake3 import blake3
from zmq.auth.thread import ThreadAuthenticator

from mmjax.errors import ConfigError
from mmjax.transport.codec import Buffer, pack_frames, unpack_frames
from mmjax.transport.wire import unpack

MAX_OUTSTANDING = 64
"""Items that one engine may wait for at one worker."""
HELLO_INTERVAL_S = 0.5
SPARE_BYTES = 2**20
"""Room in a frame for what is not an item's arrays."""

_KEY_BYTES = 81
"""Of a key's file: two keys of 40 letters, and a line's end between them."""


class Hello(msgspec.Struct, tag=True, frozen=True):
    """An engine asks whether a worker is alive, and whose."""

    parts: Mapping[str, str]
    """What all rows that it takes depend on, by what it is."""


class Welcome(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """A worker answers."""

    parts: Mapping[str, str]
    num_encoded: int = 0
    """Items that it has encoded since its start, ..."""
    num_found: int = 0
    """... and that it had already when they were asked for."""


class EncodeItem(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """An engine asks for the rows of an item."""

    number: int
    """Of the answer."""
    key: bytes
    """As `make_row_key` makes it of the three below."""
    identifier: str
    units: dict[str, np.ndarray]
    rows: np.ndarray | None = None


class EncodedItem(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The rows of an item."""

    number: int
    key: bytes
    digest: bytes
    """As `digest_rows` makes it."""
    rows: np.ndarray
    """[rows, D]"""


class NotEncoded(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """A worker refuses an item."""

    number: int
    reason: str


ToWorker = Hello | EncodeItem
ToEngine = Welcome | EncodedItem | NotEncoded

_TO_WORKER = msgspec.msgpack.Decoder(ToWorker, dec_hook=unpack)
_TO_ENGINE = msgspec.msgpack.Decoder(ToEngine, dec_hook=unpack)


def pack(message: ToWorker | ToEngine) -> list[Buffer]:
    """Return a message's frames, which share memory with its arrays."""
    return pack_frames(message, has_arrays=isinstance(message, EncodeItem | EncodedItem))


def unpack_to_worker(frames: list[Buffer]) -> ToWorker:
    """Return a message; WireError for anything else."""
    return unpack_frames(frames, _TO_WORKER)


def unpack_to_engine(frames: list[Buffer]) -> ToEngine:
    """Return a message; WireError for anything else."""
    return unpack_frames(frames, _TO_ENGINE)


def digest_rows(key: bytes, rows: np.ndarray) -> bytes:
    """Return a digest of an item's rows, and of what they are of."""
    hasher = blake3(key)
    hasher.update(np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data)
    return hasher.digest()


# ---- sockets ------------------------------------------------------------------------------------


class Key(NamedTuple):
    """A pair of CURVE's keys, which engines and workers share: who has it is let in."""

    public: bytes
    secret: bytes


def make_key(path: Path) -> None:
    """Write a new key to a file that is not there yet, for this user alone."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise ConfigError(
            f"a key cannot be written to `{path}`: {error.strerror}; name a file that is not there"
        ) from error
    with os.fdopen(fd, "wb") as file:
        file.write(b"\n".join(zmq.curve_keypair()))


def read_key(path: Path) -> Key:
    """Read a key; ConfigError for what is none, or what others may read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"the key `{path}` cannot be read: {error.strerror}") from error
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(file.fileno())
        is_own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
        if not is_own or stat.S_IMODE(status.st_mode) & 0o077:
            raise ConfigError(
                f"the key `{path}` belongs to user {status.st_uid} with mode "
                f"{stat.S_IMODE(status.st_mode):o}; it must be a file of {os.geteuid()} that "
                "nobody else may read: change its mode to 600"
            )
        parts = file.read(_KEY_BYTES + 1).split(b"\n")
    try:
        if len(parts) != 2 or zmq.curve_public(parts[1]) != parts[0]:
            raise ValueError
    except (ValueError, zmq.ZMQError) as error:
        raise ConfigError(
            f"`{path}` is no key; make one by `mmjax encode-worker --make-key FILE`"
        ) from error
    return Key(*parts)


def find_endpoint(address: str, *, has_key: bool) -> str:
    """Return ZMQ's name of an address; ConfigError for one that is none, or open to others."""
    scheme, _, place = address.partition("://")
    if scheme == "unix" and place.startswith("/"):
        if (num_bytes := len(os.fsencode(place))) > zmq.IPC_PATH_MAX_LEN:
            raise ConfigError(
                f"`{address}` has a path of {num_bytes} bytes, and a socket's has at most "
                f"{zmq.IPC_PATH_MAX_LEN}; give a shorter one"
            )
        return f"ipc://{place}"
    host, _, port = place.rpartition(":")
    if scheme != "tcp" or not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ConfigError(
            f"`{address}` is no address of an encode-worker; give unix:///PATH or tcp://HOST:PORT"
        )
    if not has_key and not _is_loopback(host):
        raise ConfigError(
            f"`{address}` can be reached from other hosts, and there is no key: make one by "
            "`mmjax encode-worker --make-key FILE`, and give it to the engine "
            "(`--encoder-workers-key`) and to the worker (`--key`)"
        )
    return address


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def connect(context: Any, address: str, key: Key | None, *, max_bytes: int) -> Any:
    """Return an engine's end, which takes frames of at most `max_bytes`.

    ConfigError where the socket's file is another user's.
    """
    endpoint = find_endpoint(address, has_key=key is not None)
    path = Path(endpoint.removeprefix("ipc://"))
    if endpoint != address and path.exists() and path.stat().st_uid != os.geteuid():
        raise ConfigError(
            f"`{path}` belongs to user {path.stat().st_uid}; a worker must run as the engine's "
            f"user, {os.geteuid()}"
        )
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    # Nothing is queued for who is not there.
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
    socket.setsockopt(zmq.RECONNECT_IVL, 200)
    if ":[" in address:
        socket.setsockopt(zmq.IPV6, 1)
    if key is not None and endpoint == address:
        socket.curve_serverkey = socket.curve_publickey = key.public
        socket.curve_secretkey = key.secret
    socket.connect(endpoint)
    return socket


@contextmanager
def listening(context: Any, address: str, key: Key | None, *, max_bytes: int) -> Iterator[Any]:
    """Yield a worker's end; only this user, or who has the key, can connect."""
    endpoint = find_endpoint(address, has_key=key is not None)
    is_tcp = endpoint == address
    guard = None
    if is_tcp and key is not None:
        guard = ThreadAuthenticator(context)
        guard.start()
        guard.configure_curve_callback("*", _Doorkeeper(key))
    socket = context.socket(zmq.ROUTER)
    mask = os.umask(0o177)
    try:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
        if is_tcp and key is not None:
            socket.curve_server = True
            socket.curve_publickey, socket.curve_secretkey = key
        if ":[" in address:
            socket.setsockopt(zmq.IPV6, 1)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"cannot listen at {address} ({error.strerror}); is it in use? give another "
                "`--listen`"
            ) from error
        finally:
            os.umask(mask)
        yield socket
    finally:
        socket.close()
        if guard is not None:
            guard.stop()
        if not is_tcp:
            Path(endpoint.removeprefix("ipc://")).unlink(missing_ok=True)


class _Doorkeeper:
    """Lets in who has the same key, as libzmq asks."""

    def __init__(self, key: Key) -> None:
        self._key = key

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a client's public key is the one."""
        return hmac.compare_digest(key, self._key.public)
