"""The connections of a `CourierBackend`: notices leave by one a peer, and come in by one a peer.

A frame is a kind (one byte), a length (two bytes, little-endian) and as many bytes. A connection starts with the
listener's token, which only those who were given its description know. Its end tells the peer's death.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pdjax.transfer.backend import MAX_NOTICE, TransferError, Write
from pdjax.transfer.checks import seal, unseal

VERSION = 1
BEGUN, NOTICE = 1, 2  # kinds: a write to you has begun; it has landed, and this is its notice
_HEAD = struct.Struct("<BH")
_TOKEN = 16
_CONNECT_BOUND = 5.0
_MAX_REGIONS = 64


class Described(msgspec.Struct, frozen=True):
    """A backend: where it takes notices, its allocated regions (base, bytes), and what its mover says of itself."""

    version: int
    backend: str
    host: str
    port: int
    token: bytes
    regions: dict[int, tuple[int, int]]
    mover: bytes


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Described)


def encode(described: Described) -> bytes:
    """Bytes for the registration record."""
    return seal(_encoder.encode(described))


def decode(data: bytes, backend: str) -> Described:
    """Parse and validate a peer's description. Raises `TransferError`."""
    try:
        described = _decoder.decode(unseal(data))
    except msgspec.DecodeError as error:
        raise TransferError(f"the peer's transfer description does not parse: {error}") from error
    if (described.backend, described.version) != (backend, VERSION):
        raise TransferError(
            f"the peer's backend is {described.backend} {described.version}, this is {backend} {VERSION}"
        )
    if not 0 < described.port < 1 << 16 or len(described.token) != _TOKEN or len(described.regions) > _MAX_REGIONS:
        raise TransferError("the peer's transfer description has no port or token, or too much in it")
    for region, (base, nbytes) in described.regions.items():
        if base <= 0 or nbytes <= 0 or base + nbytes >= 1 << 64:
            raise TransferError(f"the peer's region {region} has no memory")
    return described


@dataclass
class Open:
    """A write under way: its bytes move (`handle`), then its notice leaves (`leaves_at`, in bytes ever queued)."""

    write: Write
    handle: Any = None
    leaves_at: int | None = None


@dataclass
class Outgoing:
    """A connection that notices leave by, and the writes that use it."""

    name: str
    connection: socket.socket
    regions: dict[int, tuple[int, int]]
    waiting: deque[Write] = field(default_factory=deque)
    open: list[Open] = field(default_factory=list)
    _unsent: bytearray = field(default_factory=bytearray)
    _queued: int = 0
    _sent: int = 0

    @property
    def writes(self) -> list[Write]:
        """Writes that wait or are under way, oldest first."""
        return [*(item.write for item in self.open), *self.waiting]

    @property
    def full(self) -> bool:
        """Whether bytes wait for the connection to take them."""
        return bool(self._unsent)

    def queue(self, kind: int, payload: bytes = b"") -> int:
        """Queue a frame. Returns how many bytes must have left for it to have left."""
        self._unsent += _HEAD.pack(kind, len(payload)) + payload
        self._queued += _HEAD.size + len(payload)
        return self._queued

    def send(self) -> int:
        """Send what the connection takes. Returns how many bytes have ever left. Raises `OSError`."""
        if self._unsent:
            try:
                sent = self.connection.send(self._unsent)
            except BlockingIOError:
                sent = 0
            del self._unsent[:sent]
            self._sent += sent
        return self._sent

    def check_end(self) -> None:
        """The connection is readable, though nothing is ever sent back. Raises `OSError` if that is its end."""
        try:
            if self.connection.recv(1) == b"":
                raise ConnectionError("the peer has ended")
        except BlockingIOError:
            return
        raise ConnectionError("the peer broke the protocol")


class Incoming:
    """A connection that a peer's notices come in by. `begun` counts its writes that have not landed yet."""

    def __init__(self) -> None:
        self.begun = 0
        self._buffer = bytearray()
        self._admitted = False

    def take(self, data: bytes, token: bytes) -> list[bytes] | None:
        """Take in bytes. Returns the notices in them; None: this is no peer of ours."""
        self._buffer += data
        if not self._admitted:
            if len(self._buffer) < _TOKEN:
                return []
            if not hmac.compare_digest(bytes(self._buffer[:_TOKEN]), token):
                return None
            self._admitted = True
            del self._buffer[:_TOKEN]
        notices = []
        while len(self._buffer) >= _HEAD.size:
            kind, length = _HEAD.unpack_from(self._buffer)
            if kind not in (BEGUN, NOTICE) or length > MAX_NOTICE:
                return None
            if len(self._buffer) < _HEAD.size + length:
                break
            if kind == BEGUN:
                self.begun += 1
            else:
                self.begun = max(self.begun - 1, 0)
                notices.append(bytes(self._buffer[_HEAD.size : _HEAD.size + length]))
            del self._buffer[: _HEAD.size + length]
        return notices


def new_token() -> bytes:
    """For a listener."""
    return secrets.token_bytes(_TOKEN)


def call_on(described: Described) -> socket.socket:
    """Connect to a described backend. Raises `TransferError`."""
    try:
        connection = socket.create_connection((described.host, described.port), timeout=_CONNECT_BOUND)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(described.token)
    except OSError as error:
        where = f"{described.host}:{described.port}"
        raise TransferError(f"the peer's {described.backend} backend at {where} cannot be reached: {error}") from error
    connection.setblocking(False)
    return connection
