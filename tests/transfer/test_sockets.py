"""Which connections a process has, and the end of those with one host."""

from __future__ import annotations

import os
import socket

import pytest

from pdjax.transfer.ucx import sockets


def connection(host: str, own: str = "") -> tuple[socket.socket, socket.socket]:
    with socket.create_server((host, 0)) as listener:
        one = socket.create_connection(listener.getsockname()[:2], source_address=(own, 0) if own else None)
        return one, listener.accept()[0]


def test_only_connections_with_the_addresses_end_and_no_descriptor_is_left_behind() -> None:
    near, far = connection("127.0.0.1"), connection("127.0.0.2", own="127.0.0.3")
    with near[0], near[1], far[0], far[1], socket.socket() as unconnected, socket.socketpair()[0] as unix:
        before = len(os.listdir("/proc/self/fd"))
        assert {"127.0.0.1", "127.0.0.2", "127.0.0.3"} <= sockets.remote_addresses()
        far[0].sendall(b"sent before")
        sockets.shut_down({"127.0.0.3", "10.0.0.9"})
        assert far[1].recv(100) == b"sent before" and far[1].recv(100) == b"", "what has come is there, and the end"
        with pytest.raises(OSError):
            far[1].send(b"x")
        near[0].sendall(b"still")
        assert near[1].recv(100) == b"still"
        assert unconnected.fileno() >= 0 and unix.fileno() >= 0
        assert len(os.listdir("/proc/self/fd")) == before
