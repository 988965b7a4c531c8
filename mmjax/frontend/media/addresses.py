"""Which addresses media may be fetched from: those of the public internet.

Whatever is not known to be public is refused: addresses of this machine and its networks, of cloud
providers' metadata, and IPv6 forms that hold an IPv4 address, which a router would unwrap.
"""

from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

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
