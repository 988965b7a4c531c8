"""Fetch one file over HTTP(S). The only module that opens connections to hosts that clients name.

Each connection resolves its host once, checks every address of the answer, and dials one of these.

Which addresses media may be fetched from: those of the public internet.

Whatever is not known to be public is refused: addresses of this machine and its networks, of cloud
providers' metadata, and IPv6 forms that hold an IPv4 address, which a router would unwrap.
"""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import cached_property
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Any

import httpcore2

from mmjax import __version__
from mmjax.config.engine_config import MultiModalConfig
from mmjax.errors import MediaError, RequestError, RequestValueError
from mmjax.frontend.media.urls import HttpUrl, check_domain, refuse_url

# https://www.iana.org/assignments/iana-ipv4-special-registry, and multicast.
_SPECIAL_V4 = tuple(
    ip_network(text)
    for text in (
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",
        "127.0.0.0/8",
        "168.63.129.16/32",  # Azure's own services, in every virtual machine
        "169.254.0.0/16",
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.31.196.0/24",
        "192.52.193.0/24",
        "192.88.99.0/24",
        "192.168.0.0/16",
        "192.175.48.0/24",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/3",
    )
)

# Unicast addresses that are routed are of this network alone: neither local, nor mapped IPv4
# (::ffff:0:0/96), nor translated (64:ff9b::/96, 64:ff9b:1::/48).
_GLOBAL_V6 = ip_network("2000::/3")

# https://www.iana.org/assignments/iana-ipv6-special-registry.
_SPECIAL_V6 = tuple(
    ip_network(text)
    for text in (
        "2001::/23",  # Teredo, ORCHID, benchmarks
        "2001:db8::/32",
        "2002::/16",  # 6to4
        "2620:4f:8000::/48",
        "3fff::/20",
    )
)
_ISATAP = frozenset({0x00005EFE, 0x02005EFE})
"""The third 32 bits of an address that ends with an IPv4 address."""


def is_public_address(text: str) -> bool:
    """Return whether an address, as `getaddrinfo` writes it, is of the public internet."""
    try:
        address = ip_address(text)
    except ValueError:
        return False
    if isinstance(address, IPv4Address):
        return not any(address in network for network in _SPECIAL_V4)
    return _is_public_v6(address)


def _is_public_v6(address: IPv6Address) -> bool:
    return (
        address in _GLOBAL_V6
        and not any(address in network for network in _SPECIAL_V6)
        and int(address) >> 32 & 0xFFFFFFFF not in _ISATAP
    )


MAX_REDIRECTS = 5

_MAX_DIALLED = 3
"""Addresses of one host."""
_NUM_RESOLVERS = 16
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_HEADERS = (
    (b"User-Agent", f"mmjax/{__version__}".encode()),
    (b"Accept", b"image/*, video/*;q=0.9, */*;q=0.5"),
    # What is compressed could be a bomb; pictures are compressed already.
    (b"Accept-Encoding", b"identity"),
)


class _RefusedAddressError(Exception):
    """A host has an address that is not public, or none."""


class HttpFetcher:
    """Fetches files as the settings allow it; used by one event loop."""

    def __init__(self, mm: MultiModalConfig) -> None:
        self._mm = mm
        # Resolving cannot be cancelled: slow name servers get threads of their own.
        self._resolvers = ThreadPoolExecutor(_NUM_RESOLVERS, thread_name_prefix="mmjax-resolve")
        self._backend = _CheckedBackend(self._resolvers, mm.allow_private_media_addresses)

    async def fetch(
        self, url: HttpUrl, max_bytes: int, *, param: str, take: Callable[[int], None]
    ) -> bytes:
        """Return the file; RequestValueError where it is refused, MediaError where it fails.

        `take` is called with the number of bytes before they are kept; what it raises is raised.
        """
        try:
            async with asyncio.timeout(self._mm.media_fetch_timeout_s):
                return await self._follow(url, max_bytes, param, take)
        except TimeoutError:
            reason = f"did not arrive within {self._mm.media_fetch_timeout_s:g} s"
        except _RefusedAddressError:
            reason = "has a host that cannot be found, or that has no public address"
            raise refuse_url(param, reason) from None
        except (httpcore2.NetworkError, httpcore2.ProtocolError, httpcore2.TimeoutException):
            reason = "could not be fetched: the connection failed"
        except OSError:  # of TLS, too
            reason = "could not be fetched: the connection failed"
        raise _failed(param, reason)

    def close(self) -> None:
        """Start no more threads."""
        self._resolvers.shutdown(wait=False, cancel_futures=True)

    async def _follow(
        self, url: HttpUrl, max_bytes: int, param: str, take: Callable[[int], None]
    ) -> bytes:
        for _ in range(MAX_REDIRECTS + 1):
            check_domain(url, self._mm.allowed_media_domains, param=param)
            async with self._get(url) as response:
                if response.status not in _REDIRECTS:
                    return await _read(response, max_bytes, param, take)
                if not self._mm.media_url_allow_redirects:
                    raise refuse_url(param, "is redirected, which this server does not follow")
                url = url.join(_header(response, b"location"), param=param)
        raise refuse_url(param, f"is redirected more than {MAX_REDIRECTS} times")

    @asynccontextmanager
    async def _get(self, url: HttpUrl) -> AsyncIterator[httpcore2.Response]:
        """Yield the response; over a connection of its own, so that nothing is left of it."""
        context = None
        if url.scheme == "https":
            loop = asyncio.get_running_loop()
            context = await loop.run_in_executor(self._resolvers, lambda: self._ssl_context)
        pool = httpcore2.AsyncConnectionPool(
            ssl_context=context, max_connections=1, network_backend=self._backend
        )
        address = httpcore2.URL(
            scheme=url.scheme, host=url.host, port=url.port, target=url.target.encode("ascii")
        )
        headers = [(b"Host", url.authority.encode("ascii")), *_HEADERS, (b"Connection", b"close")]
        async with pool, pool.stream("GET", address, headers=headers) as response:
            yield response

    @cached_property
    def _ssl_context(self) -> ssl.SSLContext:
        return httpcore2.default_ssl_context()


class _CheckedBackend(httpcore2.AsyncNetworkBackend):
    """Connects to public addresses alone."""

    def __init__(self, resolvers: ThreadPoolExecutor, are_private_addresses_allowed: bool) -> None:
        self._resolvers = resolvers
        self._are_private_addresses_allowed = are_private_addresses_allowed
        self._dialler: Any = httpcore2.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        """Resolve `host`, check all of its addresses, and connect to the first that answers."""
        addresses = await self._resolve(host, port)
        error: Exception = _RefusedAddressError()
        for address in addresses[:_MAX_DIALLED]:
            try:
                return await self._dialler.connect_tcp(
                    address, port, timeout, local_address, socket_options
                )
            except httpcore2.ConnectError as failure:
                error = failure
        raise error

    async def _resolve(self, host: str, port: int) -> list[str]:
        def resolve() -> list[str]:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            return list(dict.fromkeys(str(entry[4][0]) for entry in found))

        loop = asyncio.get_running_loop()
        try:
            addresses = await loop.run_in_executor(self._resolvers, resolve)
        except (OSError, UnicodeError):
            raise _RefusedAddressError from None
        if not self._are_private_addresses_allowed and not all(map(is_public_address, addresses)):
            raise _RefusedAddressError
        return addresses


async def _read(
    response: httpcore2.Response, max_bytes: int, param: str, take: Callable[[int], None]
) -> bytes:
    if response.status != 200:
        raise _failed(param, f"could not be fetched: its host answered {response.status}")
    if _header(response, b"content-encoding").lower() not in ("", "identity"):
        raise _failed(param, "came compressed, which was not asked for")
    declared = _header(response, b"content-length")
    if declared.isdigit() and int(declared[:20]) > max_bytes:
        raise _too_large(param, f"{int(declared[:20])}", max_bytes)
    body = bytearray()
    async for chunk in response.aiter_stream():
        if (num_bytes := len(body) + len(chunk)) > max_bytes:
            raise _too_large(param, f"{num_bytes} or more", max_bytes)
        take(len(chunk))
        body += chunk
    return bytes(body)


def _header(response: httpcore2.Response, name: bytes) -> str:
    values = [value for key, value in response.headers if key.lower() == name]
    return values[0].decode("latin-1") if values else ""


def _failed(param: str, reason: str) -> RequestError:
    return MediaError.about(
        param, f"{reason}; check the URL, or send the file itself as a base64 `data:` URL"
    )


def _too_large(param: str, num_bytes: str, max_bytes: int) -> RequestError:
    size = f"{num_bytes} bytes, at most {max_bytes} are accepted"
    return RequestValueError.about(param, f"leads to a file of {size}; give a smaller one")
