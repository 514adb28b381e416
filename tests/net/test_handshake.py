from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from pdjax.net import handshake
from pdjax.net.handshake import NotAPeer, Refused, Wire

ANNA, BERT, CARL = b"a" * 16, b"b" * 16, b"c" * 16


def wires(seconds: float = 20.0) -> tuple[Wire, Wire]:
    deadline = time.monotonic() + seconds
    left, right = socket.socketpair()
    return Wire(left, deadline), Wire(right, deadline)


def both(connect: Callable[[], Any], accept: Callable[[], Any]) -> tuple[Future, Future]:
    with ThreadPoolExecutor(2) as pool:
        return pool.submit(connect), pool.submit(accept)


@pytest.mark.parametrize("secret", [b"the same", None])
def test_instances_with_the_same_secret_learn_who_the_other_is_and_agree_on_a_stamp(secret: bytes | None) -> None:
    stamps = set()
    for _ in range(2):
        left, right = wires()
        connected, accepted = both(
            lambda left=left: handshake.introduce(left, ANNA, secret, 7.0),
            lambda right=right: handshake.admit(right, BERT, secret, 5.0),
        )
        ours, theirs = connected.result(), accepted.result()
        assert (ours.id, theirs.id, theirs.patience) == (BERT, ANNA, 7.0)
        assert ours.stamp == theirs.stamp
        stamps.add(ours.stamp)
    assert len(stamps) == 2


@pytest.mark.parametrize(("mine", "yours"), [(b"one", b"another"), (None, b"another"), (b"one", None)])
def test_a_wrong_secret_is_refused_and_the_one_who_asked_is_told(mine: bytes | None, yours: bytes | None) -> None:
    left, right = wires()
    ours, theirs = both(
        lambda: handshake.introduce(left, ANNA, mine, 7.0), lambda: handshake.admit(right, BERT, yours, 5.0)
    )
    with pytest.raises(Refused, match="shared secret is not the one"):
        ours.result()
    with pytest.raises(Refused):
        theirs.result()


def test_an_acceptor_that_does_not_know_the_secret_is_refused_even_if_it_lets_everybody_in() -> None:
    left, right = wires()

    def impostor() -> None:
        greeting = right.receive()
        right.send(handshake._Greeting(handshake.VERSION, BERT, b"n" * 32, 5.0))
        right.receive()
        assert isinstance(greeting, handshake._Greeting)
        right.send(handshake._Proof(b"trust me" * 4))

    ours, _ = both(lambda: handshake.introduce(left, ANNA, b"secret", 7.0), impostor)
    with pytest.raises(Refused, match="does not know the shared secret"):
        ours.result()


def test_an_instance_is_not_linked_to_itself() -> None:
    left, right = wires()
    ours, _ = both(lambda: handshake.introduce(left, ANNA, None, 7.0), lambda: handshake.admit(right, ANNA, None, 5.0))
    with pytest.raises(Refused, match="itself"):
        ours.result()


@pytest.mark.parametrize(
    "noise",
    [b"GET / HTTP/1.1\r\n\r\n", b"pdjax/link\n\xff\xff", b"pdjax/link\n\x03\x00abc", b"\x00" * 64],
    ids=["http", "oversized", "no message", "zeros"],
)
def test_what_is_no_instance_is_dropped(noise: bytes) -> None:
    left, right = wires()
    left._socket.sendall(noise)
    with pytest.raises(NotAPeer):
        handshake.admit(right, BERT, None, 5.0)


def test_a_silent_connection_is_given_up_at_the_deadline() -> None:
    _silent, right = wires(seconds=0.2)
    with pytest.raises(TimeoutError):
        handshake.admit(right, BERT, None, 5.0)


def test_a_ring_of_processes_that_all_join_at_once_takes_turns() -> None:
    turns = {name: threading.Lock() for name in (ANNA, BERT, CARL)}

    def join(wire: Wire, own: bytes, peer: bytes) -> None:
        assert handshake.take_turns(wire, own, peer, turns[own], plain=own == BERT) == (BERT in (own, peer))
        time.sleep(0.01)  # the join
        turns[own].release()

    for _ in range(10):
        with ThreadPoolExecutor(6) as pool:
            ends = []
            for connector, acceptor in ((ANNA, BERT), (BERT, CARL), (CARL, ANNA)):
                left, right = wires()
                ends += [pool.submit(join, left, connector, acceptor), pool.submit(join, right, acceptor, connector)]
            for end in ends:
                end.result()
    assert not any(turn.locked() for turn in turns.values())


def test_a_peer_that_goes_away_while_taking_turns_leaves_the_turn_free() -> None:
    left, right = wires()
    right._socket.close()
    turn = threading.Lock()
    with pytest.raises((OSError, NotAPeer)):
        handshake.take_turns(left, ANNA, BERT, turn, plain=False)
    assert not turn.locked()


@pytest.mark.parametrize(
    ("peer", "own", "expected"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("127.8.9.1", "127.0.0.1", True),
        ("::1", "::1", True),
        ("::ffff:127.0.0.1", "::ffff:127.0.0.1", True),
        ("192.0.2.7", "192.0.2.7", True),  # by the machine's own address
        ("192.0.2.8", "192.0.2.7", False),
        ("fe80::1%eth0", "fe80::2%eth0", False),
        ("2001:db8::1", "2001:db8::2", False),
    ],
)
def test_only_connections_from_this_host_pass_without_a_secret(peer: str, own: str, expected: bool) -> None:
    connection: Any = SimpleNamespace(getpeername=lambda: (peer, 1), getsockname=lambda: (own, 2))
    assert handshake.of_this_host(connection) is expected
