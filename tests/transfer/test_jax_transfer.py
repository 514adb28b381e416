"""The ``jax`` backend's own connection: who may write here, and pulls that never end."""

from __future__ import annotations

import ctypes
import queue
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import msgpack
import numpy as np
import pytest

from pdjax.transfer.backend import BackendOptions, Drained, TransferError
from pdjax.transfer.courier import channel
from pdjax.transfer.jax_transfer import JaxMover, create

HELLO, OFFER, ANSWER = 0, 1, 2
PATIENCE = 30.0
NBYTES = 4096


@pytest.fixture
def mover() -> Iterator[JaxMover]:
    made = JaxMover("127.0.0.1")
    yield made
    made.close()


def framed(*message: Any) -> bytes:
    body: Any = msgpack.packb(message)
    return struct.pack("<H", len(body)) + body


class Stranger:
    """A client of a mover that speaks its protocol by hand."""

    def __init__(self, mover: JaxMover) -> None:
        described = msgpack.unpackb(mover.describe())
        self.mover, self.token = mover, described["token"]
        self.connection = socket.create_connection((described["host"], described["port"]), timeout=0.01)

    def say(self, *message: Any) -> None:
        self.connection.sendall(framed(*message))

    def hear(self) -> Any:
        """The mover's next word; None: it has hung up."""
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            self.mover.progress()
            try:
                head = self.connection.recv(2)
            except TimeoutError:
                continue
            except ConnectionError:
                return None
            return msgpack.unpackb(self.connection.recv(struct.unpack("<H", head)[0])) if head else None
        raise AssertionError("no word")


def memory(mover: JaxMover) -> np.ndarray:
    words = np.zeros(NBYTES, np.uint8)
    mover.register(words.ctypes.data, NBYTES)
    return words


def test_what_the_peer_offers_comes_only_into_memory_that_it_may_write_to(mover: JaxMover) -> None:
    words, other = memory(mover), JaxMover("127.0.0.1")
    stranger = Stranger(mover)
    stranger.say(HELLO, stranger.token, other._server.address())
    for id, address, nbytes in ((1, words.ctypes.data - 1, 10), (2, words.ctypes.data + 1, NBYTES), (3, 0, 1)):
        stranger.say(OFFER, id, address, nbytes)
        kind, answered, problem = stranger.hear()
        assert (kind, answered) == (ANSWER, id) and "not this backend's memory" in problem
    other.close()
    assert not words.any()


@pytest.mark.parametrize("first", [(OFFER, 1, 4096, 1), (HELLO, b"guessed", "127.0.0.1:1"), ("what",), (7, 7)])
def test_who_does_not_show_the_token_is_hung_up_on(mover: JaxMover, first: tuple) -> None:
    stranger = Stranger(mover)
    stranger.say(*first)
    assert stranger.hear() is None


def test_a_pull_that_never_ends_holds_nothing_up() -> None:
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    backend: Any = create(events.put, BackendOptions())
    address = backend.allocate(1, NBYTES)
    described = channel.decode(backend.describe(), "jax")
    inner = msgpack.unpackb(described.mover)
    nobody = socket.create_server(("127.0.0.1", 0))  # takes connections and never says a word
    source = socket.create_connection((inner["host"], inner["port"]))
    source.sendall(framed(HELLO, inner["token"], f"127.0.0.1:{nobody.getsockname()[1]}"))
    source.sendall(framed(OFFER, 1, address, NBYTES))
    backend.drain(5)
    assert events.get(timeout=PATIENCE) == Drained(5)
    source.close()
    backend.drain(6)
    assert events.get(timeout=PATIENCE) == Drained(6)
    assert not np.ctypeslib.as_array((ctypes.c_uint8 * NBYTES).from_address(address)).any()
    backend.close()
    with pytest.raises(TransferError, match="is closed"):
        backend.describe()
    nobody.close()
