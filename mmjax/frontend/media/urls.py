"""The URLs of media, parsed once, by one strict grammar: what is checked is what is dialled."""

import re
from collections.abc import Collection
from ipaddress import AddressValueError, IPv4Address, IPv6Address
from typing import NamedTuple
from urllib.parse import quote, urljoin

from mmjax.errors import RequestError, RequestValueError

MAX_URL_CHARS = 8192

_DEFAULT_PORTS = {"http": 80, "https": 443}
_FIRST_UNPRIVILEGED_PORT = 1024
# https://fetch.spec.whatwg.org/#bad-port, from 1024 on: services that answer to anything.
_REFUSED_PORTS = frozenset(
    {1719, 1720, 1723, 2049, 3659, 4045, 4190, 5060, 5061, 6000, 6566, 6679, 6697, 10080}
) | frozenset(range(6665, 6670))

_URL = re.compile(
    r"(?P<scheme>https?)://"
    r"(?:(?P<host>[A-Za-z0-9._-]+)|\[(?P<v6>[0-9A-Fa-f:.]+)\])"
    r"(?::(?P<port>[0-9]{1,5}))?"
    r"(?P<path>/[^?#]*)?(?P<query>\?[^#]*)?(?:\#.*)?",
    re.IGNORECASE | re.ASCII,
)
_LABEL = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0[xX][0-9A-Fa-f]*")
_TARGET_CHARS = "/?:@!$&'()*+,;=-._~%#[]"
"""What RFC 3986 allows in a path or a query, and what servers take all the same."""


class HttpUrl(NamedTuple):
    """An `http:` or `https:` URL; every part is lower case where case says nothing."""

    scheme: str
    host: str
    """A name, or an address without brackets."""
    port: int
    target: str
    """Path and query."""

    @property
    def authority(self) -> str:
        """Return the Host header's value."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"

    def join(self, location: str, *, param: str) -> "HttpUrl":
        """Return where a redirect leads; never from `https` to `http`."""
        here = f"{self.scheme}://{self.authority}{self.target}"
        _check_characters(location, param)
        target = parse_http_url(_joined(here, location, param), param=param)
        if self.scheme == "https" and target.scheme == "http":
            raise refuse_url(param, "is redirected from `https` to `http`")
        return target


def _joined(here: str, location: str, param: str) -> str:
    try:
        return urljoin(here, location)
    except ValueError:
        raise refuse_url(param, "is redirected to no URL") from None


def parse_http_url(url: str, *, param: str) -> HttpUrl:
    """Parse a URL; RequestValueError for whatever two parsers could read in two ways."""
    _check_characters(url, param)
    found = _URL.fullmatch(url)
    if found is None:
        raise refuse_url(
            param, "is no URL of the form `https://host[:port]/path`, without user or password"
        )
    scheme = found["scheme"].lower()
    host = _parse_v6(found["v6"], param) if found["v6"] else _parse_host(found["host"], param)
    port = int(found["port"] or _DEFAULT_PORTS[scheme])
    is_refused = port in _REFUSED_PORTS or port > 65_535
    if is_refused or (port < _FIRST_UNPRIVILEGED_PORT and port not in _DEFAULT_PORTS.values()):
        raise refuse_url(param, f"has the port {port}, which media are not fetched from")
    target = quote((found["path"] or "/") + (found["query"] or ""), safe=_TARGET_CHARS)
    return HttpUrl(scheme, host, port, target)


def check_domain(url: HttpUrl, allowed_domains: Collection[str], *, param: str) -> None:
    """Refuse a host that is not one of `allowed_domains`; none of them: all are allowed."""
    if allowed_domains and url.host not in allowed_domains:
        raise refuse_url(
            param, "has a host that is not one of this server's `--allowed-media-domains`"
        )


def refuse_url(param: str, reason: str) -> RequestError:
    """Return the error of a URL that is not fetched."""
    return RequestValueError.about(param, f"{reason}; send the file itself as a base64 `data:` URL")


def _check_characters(url: str, param: str) -> None:
    if len(url) > MAX_URL_CHARS:
        raise refuse_url(param, f"is a URL of more than {MAX_URL_CHARS} characters")
    if not url.isprintable() or any(char in ' \\"<>^`{|}' for char in url):
        raise refuse_url(param, "is a URL with spaces, backslashes or other forbidden characters")


def _parse_v6(text: str, param: str) -> str:
    try:
        return str(IPv6Address(text))
    except AddressValueError:
        raise refuse_url(param, "has an invalid address as its host") from None


def _parse_host(text: str, param: str) -> str:
    host = text.lower().removesuffix(".")
    labels = host.split(".")
    if len(host) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise refuse_url(param, "has an invalid host")
    if _NUMBER.fullmatch(labels[-1]):
        # Others read 127.1, 0x7f000001 and 2130706433 as addresses, too.
        try:
            return str(IPv4Address(host))
        except AddressValueError:
            raise refuse_url(param, "has an invalid address as its host") from None
    return host
