from __future__ import annotations

import queue
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from pdjax.transfer.backend import (
    BackendOptions,
    Drained,
    Notice,
    PeerLost,
    TransferError,
    TransferEvent,
    Write,
    WriteDone,
    WriteFailed,
)
from pdjax.transfer.fake import create

PATIENCE = 30


class Side:
    def __init__(self) -> None:
        self.events: queue.SimpleQueue[TransferEvent] = queue.SimpleQueue()
        self.backend = create(self.events.put, BackendOptions())
        self.backend.allocate(1, 1000)
        self.backend.register(2, 4096, 1000)

    def next(self) -> TransferEvent:
        return self.events.get(timeout=PATIENCE)


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    target, source = Side(), Side()
    source.backend.connect("target", target.backend.describe())
    yield target, source
    target.backend.close()
    source.backend.close()


def write(id: int = 1, **changes: Any) -> Write:
    fields: dict[str, Any] = dict(
        peer="target", region=2, offset=0, peer_region=1, peer_offset=0, nbytes=10, notice=b"hello"
    )
    return Write(id=id, deadline=time.monotonic() + PATIENCE, **(fields | changes))


def test_writes_end_and_their_notices_come_in_order(sides: tuple[Side, Side]) -> None:
    target, source = sides
    for id in range(500):
        source.backend.write(write(id, notice=b"%d" % id))
    assert [target.next() for _ in range(500)] == [Notice(b"%d" % id) for id in range(500)]
    assert [source.next() for _ in range(500)] == [WriteDone(id) for id in range(500)]


@pytest.mark.parametrize(
    "wrong",
    [
        {"peer": "nobody"},
        {"region": 9},
        {"peer_region": 2},
        {"offset": 991},
        {"peer_offset": -1},
        {"notice": bytes(1025)},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_an_impossible_write_fails(sides: tuple[Side, Side], wrong: dict) -> None:
    _, source = sides
    source.backend.write(write(7, **wrong))
    event = source.next()
    assert isinstance(event, WriteFailed) and event.id == 7


def test_the_end_of_a_peer_is_told_and_fails_what_comes_after(sides: tuple[Side, Side]) -> None:
    target, source = sides
    target.backend.close()
    event = source.next()
    assert isinstance(event, PeerLost) and event.peer == "target"
    source.backend.write(write(3))
    assert isinstance(source.next(), WriteFailed)


def test_a_drain_is_answered(sides: tuple[Side, Side]) -> None:
    target, _ = sides
    target.backend.drain(4)
    assert target.next() == Drained(4)


def test_strangers_on_its_port_are_dropped(sides: tuple[Side, Side]) -> None:
    target, source = sides
    port = target.backend._listener.getsockname()[1]
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert stranger.recv(10) == b""
    source.backend.write(write())
    assert target.next() == Notice(b"hello")


def test_a_description_of_something_else_is_refused(sides: tuple[Side, Side]) -> None:
    _, source = sides
    with pytest.raises(TransferError, match="damaged"):
        source.backend.connect("other", b"no description")
