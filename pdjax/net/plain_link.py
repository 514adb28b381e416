"""A link whose messages go over its TCP connection itself, for two processes whose MPI worlds must not meet again.

MPI keeps one connection between two processes, whichever links they make. Once a host was out of reach that connection
is dead, MPICH over UCX crashes when it is used, and MPI cannot be told to make another one. So such a pair's next links
do without it.
"""

from __future__ import annotations

import socket
from collections import deque

from pdjax.net.handshake import Peer
from pdjax.net.link import CLOSING, MAX_BODY, RING, TAKEN, WINDOW, Link, LinkBroken

_LENGTH_BYTES = 4


class PlainLink(Link):
    """As `Link`; after the byte that rings comes the message, with its length in front."""

    _read_bytes = 1 << 18

    def __init__(self, name: str, peer: Peer, connection: socket.socket, *, incoming: bool, now: float) -> None:
        super().__init__(name, peer, None, connection, incoming=incoming, now=now)
        self._input = bytearray()
        self._arrived: deque[bytes] = deque()
        self._problem: str | None = None

    @property
    def urgent(self) -> bool:
        """Whether the next call moves something."""
        return bool(self._arrived or (self._outbox and self._untaken < WINDOW))

    def release(self) -> None:
        """Let go of the connection."""
        self.connection.close()

    def _hear(self, data: bytes, now: float) -> None:
        self._input += data
        while self._problem is None and self._take_one(now):
            continue

    def _take_one(self, now: float) -> bool:
        """Take the next word from what has come. False: it is not whole yet."""
        word = bytes(self._input[:1])
        end = 1
        if word == RING:
            end += _LENGTH_BYTES
            size = int.from_bytes(self._input[1:end], "little")
            if size > MAX_BODY:
                self._problem = f"the peer sent a message of {size} bytes; at most {MAX_BODY} are taken"
                return False
            if len(self._input) < end + size:
                return False
            self._arrived.append(bytes(self._input[end : end + size]))
            end += size
        elif word == TAKEN:
            self._untaken -= 1
            self._taken_at = now
        elif word == CLOSING:
            self._peer_closing = True
        elif word:
            self._problem = "the peer broke the protocol of links"
        del self._input[:end]
        return bool(word)

    def _start_sends(self, now: float) -> None:
        if not self._untaken:
            self._taken_at = now
        while self._outbox and self._untaken < WINDOW:
            body = self._outbox.popleft()
            self._queued -= len(body)
            self._rings += RING + len(body).to_bytes(_LENGTH_BYTES, "little") + body
            self._untaken += 1

    def _receive_due(self, now: float) -> list[bytes]:
        if self._problem is not None and not self._arrived:
            raise LinkBroken(self._problem)
        arrived = list(self._arrived)
        self._arrived.clear()
        self._take(len(arrived), now)
        return arrived

    def _poke(self) -> None:
        """TCP moves by itself."""
