"""IP addresses of this host, and by which of them another host reaches it."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Collection

import psutil


def own_addresses() -> set[str]:
    """IP addresses of this host, but for those that mean every host itself."""
    families = (socket.AF_INET, socket.AF_INET6)
    found = (each for addresses in psutil.net_if_addrs().values() for each in addresses if each.family in families)
    return {plain(each.address) for each in found} - {"127.0.0.1", "::1"}


def address_towards(others: Collection[str]) -> str | None:
    """The address with which this host speaks to another one; None if it knows no way there. Nothing is sent.

    What a host's own name resolves to is no use to others: on many it is a loopback address.

    Args:
        others: addresses of the other. Those that both have are of bridges within each, and those of a link need its
            name: neither says anything.
    """
    known = [ipaddress.ip_address(each) for each in set(others) - own_addresses()]
    for other in sorted(known, key=lambda each: (each.version, each.packed)):
        if other.is_loopback or other.is_link_local:
            continue
        with socket.socket(socket.AF_INET if other.version == 4 else socket.AF_INET6, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((str(other), 9))
            except OSError:
                continue
            found = plain(probe.getsockname()[0])
        if not ipaddress.ip_address(found).is_loopback:
            return found
    return None


def plain(address: str) -> str:
    """Without the name of an interface, and IPv4 as such."""
    return address.partition("%")[0].removeprefix("::ffff:")
