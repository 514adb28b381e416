"""A backend that moves no bytes and keeps everything else: regions, checks, notices, deadlines and the death of peers.

Notices travel over loopback TCP. For measuring what everything but the transfer costs, and for machines without UCX;
the state that arrives is whatever the destination's memory held.
"""

from __future__ import annotations

import hmac
import mmap
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from ctypes import addressof, c_char
from dataclasses import dataclass, field

import msgspec

from pdjax.transfer.backend import (
    MAX_NOTICE,
    Drained,
    EventSink,
    Notice,
    PeerLost,
    TransferError,
    Write,
    WriteDone,
    WriteFailed,
)

_LENGTH = struct.Struct("<H")
_TOKEN = 16
_CONNECT_BOUND = 5.0
_DRY = 0.1  # seconds without anything to receive


class _Description(msgspec.Struct, frozen=True, tag="fake"):
    port: int
    token: bytes
    regions: dict[int, int]  # bytes by region


@dataclass
class _Peer:
    """A connection that notices leave by. `open` holds writes and how many bytes must leave until each is done."""

    name: str
    connection: socket.socket
    regions: dict[int, int]
    outgoing: bytearray = field(default_factory=bytearray)
    open: deque[tuple[Write, int]] = field(default_factory=deque)
    queued: int = 0  # bytes ever queued
    sent: int = 0  # bytes ever sent


class FakeBackend:
    """See `TransferBackend` and the module's docstring. `on_event` is called on the backend's thread."""

    name = "fake"

    def __init__(self, on_event: EventSink) -> None:
        self._on_event = on_event
        self._regions: dict[int, int] = {}
        self._memory: dict[int, mmap.mmap] = {}
        self._peers: dict[str, _Peer] = {}
        self._incoming: dict[socket.socket, bytearray] = {}
        self._drains: list[tuple[int, float]] = []
        self._commands: deque[Callable[[], None]] = deque()
        self._closing = False
        self._token = secrets.token_bytes(_TOKEN)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_fd, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._loop, name="pdjax-fake", daemon=True)
        self._thread.start()

    def register(self, region: int, address: int, nbytes: int) -> None:
        """Note a source of writes. Raises `TransferError`."""
        if region in self._regions or nbytes <= 0:
            raise TransferError(f"region {region} of {nbytes} bytes exists already or is empty")
        self._regions[region] = nbytes

    def allocate(self, region: int, nbytes: int) -> int:
        """Allocate zeroed memory. Returns its address. Raises `TransferError`."""
        self.register(region, 0, nbytes)
        self._memory[region] = mmap.mmap(-1, nbytes)
        return addressof(c_char.from_buffer(self._memory[region]))

    def describe(self) -> bytes:
        """Where notices are taken, and the allocated regions."""
        regions = {region: self._regions[region] for region in self._memory}
        return msgspec.msgpack.encode(_Description(self._listener.getsockname()[1], self._token, regions))

    def connect(self, peer: str, description: bytes) -> None:
        """Connect to a described peer on this host. Raises `TransferError`."""
        if peer in self._peers:
            raise TransferError(f"a peer named {peer!r} is connected already")
        try:
            described = msgspec.msgpack.decode(description, type=_Description)
            connection = socket.create_connection(("127.0.0.1", described.port), timeout=_CONNECT_BOUND)
            connection.sendall(described.token)
        except (msgspec.DecodeError, OSError) as error:
            raise TransferError(f"the peer of the fake backend cannot be reached: {error}") from error
        connection.setblocking(False)
        self._peers[peer] = _Peer(peer, connection, described.regions)
        self._post(lambda: self._watch(peer))

    def disconnect(self, peer: str) -> None:
        """Close the path; its open writes fail. An unknown peer is ignored."""
        self._post(lambda: self._end(peer, "the peer was disconnected", lost=False))

    def write(self, write: Write) -> None:
        """Check a write and send its notice."""
        self._post(lambda: self._start(write))

    def drain(self, id: int) -> None:
        """Report `Drained` after a moment in which nothing came."""
        self._post(lambda: self._drains.append((id, time.monotonic() + _DRY)))

    def path(self, peer: str) -> str:
        """In words."""
        return "fake: nothing is moved" if peer in self._peers else "not connected"

    def close(self) -> None:
        """Close everything. Memory stays until the backend is gone. Idempotent."""
        self._closing = True
        self._post(lambda: None)
        self._thread.join(_CONNECT_BOUND)

    def _post(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        os.eventfd_write(self._wake_fd, 1)

    def _loop(self) -> None:
        while not self._closing:
            for key, mask in self._selector.select(self._pause()):
                if key.fileobj == self._wake_fd:
                    os.eventfd_read(self._wake_fd)
                elif key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.data, str):
                    self._attend(key.data, mask)
                elif isinstance(key.fileobj, socket.socket):
                    self._receive(key.fileobj)
            while self._commands:
                self._commands.popleft()()
            self._fire(time.monotonic())
        for name in list(self._peers):
            self._end(name, "the backend was closed", lost=False)
        for connection in self._incoming:
            connection.close()
        self._listener.close()
        self._selector.close()

    def _pause(self) -> float | None:
        times = [until for _, until in self._drains]
        times += [write.deadline for peer in self._peers.values() for write, _ in peer.open]
        return max(min(times) - time.monotonic(), 0.001) if times else None

    def _fire(self, now: float) -> None:
        for drain in [drain for drain in self._drains if now >= drain[1]]:
            self._drains.remove(drain)
            self._on_event(Drained(drain[0]))
        for peer in list(self._peers.values()):
            if any(now > write.deadline for write, _ in peer.open):
                self._end(peer.name, "a write was not done by its deadline", lost=True)

    def _watch(self, name: str) -> None:
        self._selector.register(self._peers[name].connection, selectors.EVENT_READ, name)

    def _start(self, write: Write) -> None:
        problem = self._problem_with(write)
        if problem is not None:
            self._on_event(WriteFailed(write.id, problem))
            return
        peer = self._peers[write.peer]
        frame = _LENGTH.pack(len(write.notice)) + write.notice
        peer.outgoing += frame
        peer.queued += len(frame)
        peer.open.append((write, peer.queued))
        self._attend(write.peer, selectors.EVENT_WRITE)

    def _problem_with(self, write: Write) -> str | None:
        peer = self._peers.get(write.peer)
        if peer is None:
            return f"no peer named {write.peer!r} is connected"
        for offset, size, whose in (
            (write.offset, self._regions.get(write.region, 0), "the source's"),
            (write.peer_offset, peer.regions.get(write.peer_region, 0), "the peer's"),
        ):
            if offset < 0 or write.nbytes < 0 or offset + write.nbytes > size:
                return f"[{offset}, +{write.nbytes}) is not within {whose} region of {size} bytes"
        if len(write.notice) > MAX_NOTICE:
            return f"a notice of {len(write.notice)} bytes is over the limit of {MAX_NOTICE}"
        return None

    def _attend(self, name: str, mask: int) -> None:
        """Send what waits, and notice the end of a peer, which itself sends nothing on this connection."""
        peer = self._peers.get(name)
        if peer is None:
            return
        try:
            if mask & selectors.EVENT_READ and not peer.connection.recv(1):
                raise ConnectionError("the peer has ended")
            sent = peer.connection.send(peer.outgoing) if peer.outgoing else 0
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self._end(name, str(error), lost=True)
            return
        del peer.outgoing[:sent]
        peer.sent += sent
        while peer.open and peer.open[0][1] <= peer.sent:
            self._on_event(WriteDone(peer.open.popleft()[0].id))
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.outgoing else 0)
        self._selector.modify(peer.connection, events, name)

    def _end(self, name: str, cause: str, *, lost: bool) -> None:
        peer = self._peers.pop(name, None)
        if peer is None:
            return
        self._selector.unregister(peer.connection)
        peer.connection.close()
        for write, _ in peer.open:
            self._on_event(WriteFailed(write.id, cause))
        if lost:
            self._on_event(PeerLost(name, cause))

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return  # it has gone again before we looked
        connection.setblocking(False)
        self._incoming[connection] = bytearray()
        self._selector.register(connection, selectors.EVENT_READ)

    def _receive(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(65536)
        except OSError:
            data = b""
        buffer = self._incoming[connection]
        if not data or not self._take(buffer, data):
            del self._incoming[connection]
            self._selector.unregister(connection)
            connection.close()

    def _take(self, buffer: bytearray, data: bytes) -> bool:
        """Take in bytes of a peer: the token first, which stays at the head, then notices. False: not a peer."""
        buffer += data
        if len(buffer) < _TOKEN:
            return True
        if not hmac.compare_digest(bytes(buffer[:_TOKEN]), self._token):
            return False
        while len(buffer) >= _TOKEN + _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, _TOKEN)
            end = _TOKEN + _LENGTH.size + length
            if len(buffer) < end:
                break
            self._on_event(Notice(bytes(buffer[_TOKEN + _LENGTH.size : end])))
            del buffer[_TOKEN:end]
        return True
