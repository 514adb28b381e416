"""What every TCP connection between processes of ours is set to."""

from __future__ import annotations

import socket

_PROBES = 3


def prepare_tcp(connection: socket.socket, *, idle: int, interval: int, unacknowledged: int) -> None:
    """Words leave at once, and a host that has vanished is noticed.

    Args:
        idle, interval: seconds at rest until the first of three probes, and between them.
        unacknowledged: seconds that what was sent may go without a word; there are no probes meanwhile.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_KEEPIDLE, idle),
        (socket.TCP_KEEPINTVL, interval),
        (socket.TCP_KEEPCNT, _PROBES),
        (socket.TCP_USER_TIMEOUT, 1000 * unacknowledged),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
