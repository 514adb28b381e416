"""TCP connections of this process, by the address at their other end: whoever made them."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Collection, Generator

from pdjax.net.addresses import plain


def remote_addresses() -> set[str]:
    """Of all connections."""
    with contextlib.closing(_connections()) as connections:
        return {address for _, address in connections}


def shut_down(addresses: Collection[str]) -> None:
    """End all connections with these addresses, both ways: what comes over them from now on is refused, and who uses
    them finds them at their end."""
    with contextlib.closing(_connections()) as connections:
        for connection, address in connections:
            if address in addresses:
                with contextlib.suppress(OSError):  # it has ended by itself
                    connection.shutdown(socket.SHUT_RDWR)


def _connections() -> Generator[tuple[socket.socket, str]]:
    """Each is a descriptor of its own for as long as it is the newest, so that no other takes its number meanwhile."""
    for name in os.listdir("/proc/self/fd"):
        try:
            copy = os.dup(int(name))
        except OSError:
            continue  # it was closed since
        try:
            connection = socket.socket(fileno=copy)
        except OSError:
            os.close(copy)  # no socket
            continue
        with connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                with contextlib.suppress(OSError):  # not connected
                    yield connection, plain(connection.getpeername()[0])
