"""What two instances say to each other on a fresh TCP connection before they join their MPI worlds.

First each side proves that it knows the shared secret (HMAC-SHA256 over both sides' nonces). Then they take turns: a
join needs both processes' MPI threads at once, and each has one. Every process has a random id, and of two processes
the one with the smaller id reserves its thread first. So reservations are always made in rising order, no cycle of
processes can wait for each other, and nobody needs to try again.

Blocking calls on a socket with a deadline: they run in a short-lived thread, never in the thread that calls MPI.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
import socket
import struct
import threading
import time
from typing import NamedTuple

import msgspec

VERSION = 3
_MAGIC = b"pdjax/link\n"
_LENGTH = struct.Struct("<H")
_MAX_MESSAGE = 1024
_MAX_NONCE = 64
_STAMP_BYTES = 16


class Refused(Exception):
    """The two do not come together; the sentence is for the one who asked."""


class NotAPeer(Exception):
    """What connected does not speak this protocol."""


class Peer(NamedTuple):
    """Who the other side is.

    Attributes:
        id: of its process.
        stamp: what the two write before every message of this link over MPI; no other link has it.
        patience: seconds that it is ready to wait for the join.
    """

    id: bytes
    stamp: bytes
    patience: float


class _Greeting(msgspec.Struct, frozen=True, tag="greeting"):
    version: int
    id: bytes
    nonce: bytes
    patience: float  # seconds that the sender is ready to wait for the join


class _Proof(msgspec.Struct, frozen=True, tag="proof"):
    mac: bytes


class _Reserved(msgspec.Struct, frozen=True, tag="reserved"):
    """The sender's MPI thread is set aside for this join. `plain`: messages had better go without MPI."""

    plain: bool


class _No(msgspec.Struct, frozen=True, tag="no"):
    reason: str


_Message = _Greeting | _Proof | _Reserved | _No
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Message)


class Wire:
    """Whole handshake messages over a connected socket, up to a deadline in seconds of `time.monotonic`."""

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self._socket = connection
        self.deadline = deadline

    def send(self, message: _Message) -> None:
        """Send one message. Raises `OSError`."""
        body = _encoder.encode(message)
        self._bound()
        self._socket.sendall(_MAGIC + _LENGTH.pack(len(body)) + body)

    def receive(self) -> _Message:
        """Wait for one message. Raises `NotAPeer`, `Refused` (the peer said no) and `OSError`."""
        if self._exactly(len(_MAGIC)) != _MAGIC:
            raise NotAPeer("it does not speak this protocol")
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        if length > _MAX_MESSAGE:
            raise NotAPeer(f"it sent a handshake message of {length} bytes, of at most {_MAX_MESSAGE}")
        try:
            message = _decoder.decode(self._exactly(length))
        except msgspec.DecodeError as error:
            raise NotAPeer(f"it sent a handshake message that does not parse: {error}") from error
        if isinstance(message, _No):
            raise Refused(message.reason)
        return message

    def _bound(self) -> None:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the handshake has taken too long")
        self._socket.settimeout(left)

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            self._bound()
            part = self._socket.recv(size - len(data))
            if not part:
                raise ConnectionError("the other side closed the connection during the handshake")
            data += part
            if len(data) < size and size == len(_MAGIC) and not _MAGIC.startswith(data):
                raise NotAPeer("it does not speak this protocol")
        return data


def introduce(wire: Wire, own_id: bytes, secret: bytes | None, patience: float) -> Peer:
    """The connecting side: prove the secret, check the acceptor's proof.

    Raises:
        Refused: the acceptor said no, or its proof is wrong.
        NotAPeer: what answered is no instance.
        OSError: the connection failed or the deadline passed.
    """
    mine = _Greeting(VERSION, own_id, secrets.token_bytes(32), patience)
    wire.send(mine)
    theirs = _greeting(wire.receive())
    wire.send(_Proof(_mac(secret, b"connect", mine, theirs)))
    if not _proves(wire.receive(), _mac(secret, b"accept", mine, theirs)):
        raise Refused("the other side does not know the shared secret")
    return _peer(theirs, secret, mine, theirs)


def admit(wire: Wire, own_id: bytes, secret: bytes | None, patience: float) -> Peer:
    """The accepting side. Raises as `introduce`.

    The connector proves itself first, so a stranger gets nothing to try secrets on.
    """
    theirs = _greeting(wire.receive())
    mine = _Greeting(VERSION, own_id, secrets.token_bytes(32), patience)
    if theirs.version != VERSION:
        raise _refuse(wire, f"this instance speaks version {VERSION} of the link protocol, not {theirs.version}")
    if theirs.id == own_id:
        raise _refuse(wire, "an instance cannot be linked to itself")
    wire.send(mine)
    if not _proves(wire.receive(), _mac(secret, b"connect", theirs, mine)):
        raise _refuse(wire, "the shared secret is not the one that this instance was started with")
    wire.send(_Proof(_mac(secret, b"accept", theirs, mine)))
    return _peer(theirs, secret, theirs, mine)


def take_turns(wire: Wire, own_id: bytes, peer_id: bytes, turn: threading.Lock, *, plain: bool) -> bool:
    """Reserve both sides' MPI threads. On return `turn` is held, and the peer has said or will say that its is.

    Args:
        plain: whether this side will not join the peer's MPI world.

    Returns:
        Whether either of them will not.

    Raises:
        Refused, NotAPeer, OSError: the peer did not; `turn` is not held then.
    """
    first = own_id < peer_id
    theirs = None if first else _expect_reserved(wire)
    if not turn.acquire(timeout=max(wire.deadline - time.monotonic(), 0)):
        raise _refuse(wire, "the instance was busy joining others all the time: try again")
    try:
        wire.send(_Reserved(plain))
        return (theirs or _expect_reserved(wire)).plain or plain
    except BaseException:
        turn.release()
        raise


def refuse(wire: Wire, reason: str) -> None:
    """Tell the peer why not, if it still listens."""
    try:
        wire.send(_No(reason))
    except OSError:
        return  # it has gone, and with it whoever would have read the reason


def of_this_host(connection: socket.socket) -> bool:
    """Whether the other end of a connection is on this machine: a loopback address, or the very address it called."""
    peer, own = connection.getpeername()[0], connection.getsockname()[0]
    address = ipaddress.ip_address(peer.split("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return peer == own or (mapped or address).is_loopback


def _refuse(wire: Wire, reason: str) -> Refused:
    refuse(wire, reason)
    return Refused(reason)


def _greeting(message: _Message) -> _Greeting:
    if not isinstance(message, _Greeting) or len(message.id) != 16 or not 16 <= len(message.nonce) <= _MAX_NONCE:
        raise NotAPeer("it did not greet as an instance does")
    return message


def _peer(who: _Greeting, secret: bytes | None, connector: _Greeting, acceptor: _Greeting) -> Peer:
    return Peer(who.id, _mac(secret, b"stamp", connector, acceptor)[:_STAMP_BYTES], who.patience)


def _mac(secret: bytes | None, side: bytes, connector: _Greeting, acceptor: _Greeting) -> bytes:
    said = side + b"".join(_encoder.encode(greeting) for greeting in (connector, acceptor))
    return hmac.new(secret or b"", said, hashlib.sha256).digest()


def _proves(message: _Message, mac: bytes) -> bool:
    return isinstance(message, _Proof) and hmac.compare_digest(message.mac, mac)


def _expect_reserved(wire: Wire) -> _Reserved:
    message = wire.receive()
    if not isinstance(message, _Reserved):
        raise NotAPeer("it did not take its turn")
    return message
