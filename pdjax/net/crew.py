"""The connections between an instance's leader and its workers: whole frames both ways, and the news of an end.

A frame is its length (4 bytes, little endian) and that many bytes.
"""

from __future__ import annotations

import contextlib
import select
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping

from pdjax.net.tcp import prepare_tcp

MEET_SECONDS = 60.0  # in which all processes of an instance connect
SEND_SECONDS = 10.0  # a process that takes nothing for this long is stuck
MAX_FRAME = 64 << 20


class Gone(Exception):
    """The other end has closed the connection or broken its protocol; the sentence says which."""


class Crew:
    """The leader's end. Frames are sent on the caller's thread; what comes in is told on a thread of its own.

    Args:
        connections: one a worker, by rank.
        names: what to call each, by rank.
    """

    def __init__(self, connections: Mapping[int, socket.socket], names: Mapping[int, str]) -> None:
        self.names = names
        self._connections = dict(connections)
        self._inputs = {rank: _Frames(connection) for rank, connection in self._connections.items()}
        self._on_frame: Callable[[int, bytes], None] = lambda rank, body: None
        self._on_lost: Callable[[int, str], None] = lambda rank, reason: None
        self._closing = False
        self._left = set(self._connections)
        self._thread = threading.Thread(target=self._watch, name="pdjax-crew", daemon=True)

    def watch(self, *, on_frame: Callable[[int, bytes], None], on_lost: Callable[[int, str], None]) -> None:
        """Begin to listen.

        Args:
            on_frame: called with each frame that a worker sends.
            on_lost: called once for a worker whose connection ends before `forgive`, with a sentence.
        """
        self._on_frame, self._on_lost = on_frame, on_lost
        self._thread.start()

    def tell(self, body: bytes) -> None:
        """Send a frame to every worker. One that can't be sent is dropped: the connection's end is told anyway."""
        frame = len(body).to_bytes(4, "little") + body
        for rank, connection in self._connections.items():
            try:
                connection.sendall(frame)
            except BlockingIOError:  # what a socket with a send timeout raises
                self._on_lost(rank, f"{self.names[rank]} has taken no order for {SEND_SECONDS:g} s")
            except OSError:
                continue

    def forgive(self) -> None:
        """Workers that leave from now on are no loss."""
        self._closing = True

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, connection in self._connections.items():
                selector.register(connection, selectors.EVENT_READ, rank)
            while self._left:
                for key, _ in selector.select():
                    self._read(selector, key.data)

    def _read(self, selector: selectors.BaseSelector, rank: int) -> None:
        try:
            for body in self._inputs[rank].read():
                self._on_frame(rank, body)
        except Gone as end:
            selector.unregister(self._connections[rank])
            self._left.discard(rank)
            if not self._closing:
                self._on_lost(rank, f"{self.names[rank]} {end}")


class Worker:
    """A worker's end. `receive` belongs to one thread; `send` may be called from any."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._input = _Frames(connection)
        self._ready: list[bytes] = []
        self._sending = threading.Lock()

    def watch(self, on_end: Callable[[], None]) -> None:
        """Have `on_end` called, on a thread of its own, when the leader is gone, whatever this process does then."""

        def wait() -> None:
            poll = select.poll()
            poll.register(self._connection, select.POLLRDHUP)
            poll.poll()
            on_end()

        threading.Thread(target=wait, name="pdjax-leader-watch", daemon=True).start()

    def receive(self, timeout: float | None) -> bytes | None:
        """The next frame, asleep until it is there; None if none came within `timeout` seconds.

        Raises:
            Gone: the leader is gone.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._ready:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._connection], [], [], left)[0]:
                return None
            self._ready = self._input.read()
        return self._ready.pop(0)

    def send(self, body: bytes) -> None:
        """Send a frame; one that can't be sent is dropped, because the leader is gone then, and `watch` says so."""
        with self._sending, contextlib.suppress(OSError):
            self._connection.sendall(len(body).to_bytes(4, "little") + body)


class _Frames:
    """Cuts what comes in on a connection into frames."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._pending = bytearray()

    def read(self) -> list[bytes]:
        """Read once what is there, and return the frames that are whole now. Raises `Gone`."""
        try:
            data = self._connection.recv(1 << 18)
        except OSError:
            data = b""
        if not data:
            raise Gone("is gone")
        self._pending += data
        frames = []
        while len(self._pending) >= 4:
            count = int.from_bytes(self._pending[:4], "little")
            if count > MAX_FRAME:
                raise Gone(f"has sent a frame of {count} bytes, over the limit of {MAX_FRAME}")
            if len(self._pending) < 4 + count:
                break
            frames.append(bytes(self._pending[4 : 4 + count]))
            del self._pending[: 4 + count]
        return frames


def prepare(connection: socket.socket) -> socket.socket:
    """Frames leave at once, a send has a bound, and a host that has vanished is noticed within seconds."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(SEND_SECONDS), 0))
    if connection.family != socket.AF_UNIX:
        prepare_tcp(connection, idle=2, interval=1, unacknowledged=5)
    return connection
