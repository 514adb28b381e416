"""Ports for what is started here and told where to listen."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")  # that the kernel gives out
_LOWEST = 10_000
_TRIES = 1000


def free_ports(count: int) -> list[int]:
    """Different ports of the loopback that nothing listens on.

    They lie below those that the kernel gives out by itself, if there are enough such: one from there may be somebody
    else's before its instance listens, or while that is started again.
    """
    ports: list[int] = []
    below = range(_LOWEST, _first_given_out())
    for port in random.sample(below, min(_TRIES, len(below))):
        if len(ports) < count and _is_free(port):
            ports.append(port)
    with contextlib.ExitStack() as opened:
        while len(ports) < count:
            ports.append(opened.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1])
    return ports


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def _first_given_out() -> int:
    try:
        return int(_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return _LOWEST
