"""The ``jax`` backend: `jax.experimental.transfer` moves the bytes, as arrays that the destination pulls.

A pull of what is not on offer, or from a process that is stopped or was never reached, does not end, whatever its
`timeout`, and an offer cannot be taken back. So no thread that matters waits for one. A source puts an array over its
memory on offer and then says so on a connection of its own; the destination pulls, and once a thread that does nothing
else has seen the pull end (to ask an array whether it is ready costs memory for good, 54 bytes a time), the courier's
thread copies what came to where it belongs and answers. When that connection ends, its pulls are forgotten: only the
courier's thread writes into memory, so nothing of a peer that is gone lands. What an offer that nobody pulls leaves
behind is a small object, since an array over aligned memory is no copy.
"""

from __future__ import annotations

import ctypes
import hmac
import secrets
import socket
import struct
import threading
from collections import deque
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import jax
import msgspec
import numpy as np
from jax.experimental import transfer
from jax.sharding import SingleDeviceSharding

from pdjax.transfer.backend import BackendOptions, EventSink, TransferError
from pdjax.transfer.courier import CourierBackend

_BOUND = 5.0  # seconds to connect
_TOKEN = 16
_LENGTH = struct.Struct("<H")


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """A source's first word: the destination's token, and where its arrays can be pulled from."""

    token: bytes
    address: str


class Offer(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """An array of uint8 [nbytes] stands ready, and belongs at an address of the destination's."""

    id: int
    address: int
    nbytes: int


class Answer(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """An offer's bytes have landed, or ("" no more) why they have not."""

    id: int
    problem: str


class Described(msgspec.Struct, frozen=True):
    """Where a destination is told of offers, and the token that they begin with."""

    host: str
    port: int
    token: bytes


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Hello | Offer | Answer)


class Connection:
    """Messages over a socket, without waiting. `ended` says why there will be no more of them."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._unsent, self._received = bytearray(), bytearray()
        self.ended = ""

    def send(self, message: Hello | Offer | Answer) -> None:
        """Send a message, or as much of all messages as the socket takes."""
        body = _encoder.encode(message)
        self._unsent += _LENGTH.pack(len(body)) + body
        self._flush()

    def receive(self) -> list[Hello | Offer | Answer]:
        """What has come."""
        self._flush()
        messages = []
        try:
            while data := self._socket.recv(65536):
                self._received += data
            self.end("the peer has ended")
        except BlockingIOError:
            pass
        except OSError as error:
            self.end(str(error))
        while len(self._received) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._received)[0]
            if len(self._received) < end:
                break
            try:
                messages.append(_decoder.decode(self._received[_LENGTH.size : end]))
            except msgspec.DecodeError as error:
                self.end(f"the peer broke the protocol: {error}")
                break
            del self._received[:end]
        return messages

    def close(self) -> None:
        """Hang up."""
        self.end("the peer was disconnected")
        self._socket.close()

    def _flush(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError as error:
            self.end(str(error))

    def end(self, why: str) -> None:
        """Take nothing more from the peer."""
        self.ended = self.ended or why


@dataclass
class Pulled:
    """What an offer has brought, once it is ready, or what is wrong."""

    offer: Offer
    array: jax.Array
    problem: str = ""


@dataclass
class Target:
    """A peer that is written to, and what it has answered to offers that are asked for."""

    connection: Connection
    answers: dict[int, str | None] = field(default_factory=dict)  # None: nothing yet


class Source:
    """A peer that writes here, once it has shown the token (`open`)."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.ready: deque[Pulled] = deque()
        self._server: Any = None  # a jax.experimental.transfer.TransferConnection
        self._pulls: SimpleQueue[Pulled | None] = SimpleQueue()

    @property
    def is_open(self) -> bool:
        """Whether it has shown the token."""
        return self._server is not None

    def open(self, server: Any) -> None:
        """Pull from here on from this server of the peer's."""
        self._server = server
        threading.Thread(target=self._await, name="pdjax-pulls", daemon=True).start()

    def pull(self, offer: Offer, device: Any) -> None:
        """Begin to pull what will be `ready`."""
        form = jax.ShapeDtypeStruct((offer.nbytes,), np.uint8, sharding=SingleDeviceSharding(device))
        self._pulls.put(Pulled(offer, self._server.pull(offer.id, [form])[0]))

    def close(self) -> None:
        """Hang up. A thread that waits for a pull that does not end is left to itself."""
        self.connection.close()
        self._pulls.put(None)

    def _await(self) -> None:
        while (pulled := self._pulls.get()) is not None:
            try:
                pulled.array.block_until_ready()
            except RuntimeError as error:
                pulled.problem = f"the peer could not pull: {error}"
            self.ready.append(pulled)


def create(on_event: EventSink, options: BackendOptions) -> CourierBackend:
    """Start it. Raises `TransferError`: nothing can listen at `options.host`."""
    return CourierBackend(on_event, lambda: JaxMover(options.host), host=options.host)


class JaxMover:
    """See `Mover`. A handle is a target and the number of an offer. The memory is the host's, whatever JAX runs on."""

    name = "jax"
    receives = True
    dry_s = 0.1

    def __init__(self, host: str) -> None:
        self._host = host
        self._token = secrets.token_bytes(_TOKEN)
        self._memory: list[range] = []
        self._targets: dict[str, Target] = {}
        self._sources: list[Source] = []
        self._offers = 0
        try:
            self._listener = socket.create_server((host, 0), backlog=128)
            self._device = jax.local_devices(backend="cpu")[0]
            numeric = f"{self._listener.getsockname()[0]}:0"
            self._server = transfer.start_transfer_server(self._device.client, numeric, [numeric])
        except (OSError, RuntimeError) as error:
            raise TransferError(f"jax.experimental.transfer cannot start at {host}: {error}") from error
        self._listener.setblocking(False)

    def register(self, address: int, nbytes: int) -> None:
        """Peers may have bytes put there."""
        self._memory.append(range(address, address + nbytes))

    def describe(self) -> bytes:
        """Where offers are taken."""
        return _encoder.encode(Described(self._host, self._listener.getsockname()[1], self._token))

    def connect(self, peer: str, description: bytes) -> None:
        """Open the connection for offers and answers. Raises `TransferError`."""
        try:
            described = msgspec.msgpack.decode(description, type=Described)
            connection = Connection(socket.create_connection((described.host, described.port), timeout=_BOUND))
        except msgspec.DecodeError as error:
            raise TransferError(f"the peer's description of its JAX transfers does not parse: {error}") from error
        except OSError as error:
            raise TransferError(f"the peer takes no offers of JAX transfers: {error}") from error
        connection.send(Hello(described.token, self._server.address()))
        self._targets[peer] = Target(connection)

    def disconnect(self, peer: str) -> None:
        """Hang up, which ends what the peer has not pulled."""
        target = self._targets.pop(peer, None)
        if target is not None:
            target.connection.close()

    def move(self, peer: str, source: int, destination: int, nbytes: int) -> tuple[Target, int]:
        """Offer the bytes, then say so."""
        self._offers += 1
        target, offer = self._targets[peer], Offer(self._offers, destination, nbytes)
        words = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(source))
        self._server.await_pull(offer.id, [jax.device_put(words, self._device)])
        target.answers[offer.id] = None
        target.connection.send(offer)
        return target, offer.id

    def outcome(self, handle: tuple[Target, int]) -> str | None:
        """What the peer has answered, if it has."""
        target, id = handle
        for answer in target.connection.receive():
            if isinstance(answer, Answer) and answer.id in target.answers:
                target.answers[answer.id] = answer.problem
        if target.answers[id] is None and not target.connection.ended:
            return None
        problem = target.answers.pop(id)
        return target.connection.ended if problem is None else problem

    def abandon(self, handle: tuple[Target, int]) -> None:
        """Forget an offer."""
        target, id = handle
        target.answers.pop(id, None)

    def progress(self) -> None:
        """Begin pulls, and put in place what they have brought."""
        try:
            while True:
                self._sources.append(Source(Connection(self._listener.accept()[0])))
        except BlockingIOError:
            pass
        for source in list(self._sources):
            for message in source.connection.receive():
                self._take(source, message)
            if source.connection.ended:
                self._sources.remove(source)
                source.close()
                continue
            while source.ready:
                pulled = source.ready.popleft()
                if not pulled.problem:
                    ctypes.memmove(pulled.offer.address, pulled.array.unsafe_buffer_pointer(), pulled.offer.nbytes)
                source.connection.send(Answer(pulled.offer.id, pulled.problem))

    def path(self) -> str:
        """In words."""
        return "jax.experimental.transfer"

    def close(self) -> None:
        """Hang up on everybody."""
        for peer in list(self._targets):
            self.disconnect(peer)
        for source in self._sources:
            source.close()
        self._listener.close()

    def _take(self, source: Source, message: Hello | Offer | Answer) -> None:
        match message:
            case Hello(token, address) if not source.is_open and hmac.compare_digest(token, self._token):
                source.open(self._server.connect(address))
            case Offer(id, address, nbytes) if source.is_open:
                if any(address in memory and address + nbytes <= memory.stop for memory in self._memory):
                    source.pull(message, self._device)
                else:
                    source.connection.send(Answer(id, f"{nbytes} bytes at {address:#x} are not this backend's memory"))
            case _:
                source.connection.end("it is no peer of this backend")
