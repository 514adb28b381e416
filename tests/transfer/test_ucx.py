"""What only UCX promises: straight into mapped memory on one host, and deaths told in its own words."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from pdjax.transfer.ucx import description
from tests.jobs import Job
from tests.transfer.conftest import PATHS, SMALL, both_paths, connect

pytestmark = pytest.mark.e2e


@both_paths
def test_the_path_says_how_bytes_move(start: Callable[..., Job], mode: str) -> None:
    assert connect(start(mode, SMALL), start(mode, SMALL)).startswith(PATHS[mode])


@both_paths
def test_the_death_of_a_peer_is_told_without_any_write(start: Callable[..., Job], mode: str) -> None:
    source, victim = start(mode, SMALL), start(mode, SMALL)
    connect(source, victim)
    source.do("write", id=1, peer="target", offset=0, peer_offset=0, nbytes=1000, notice="n")
    source.event("done", id=1)
    victim.kill()
    source.event("lost", peer="target", timeout=5)


def test_a_drain_ends_also_while_others_write_and_after_a_peers_death(start: Callable[..., Job]) -> None:
    target, dying, busy = start("put"), start("put"), start("put")
    connect(dying, target)
    connect(busy, target)
    target.ask("quiet", quiet=True)
    for id in range(30):
        busy.do("write", id=id, peer="target", offset=0, peer_offset=0, nbytes=8 << 20, notice="n")
        dying.do("write", id=id, peer="target", offset=0, peer_offset=0, nbytes=8 << 20, notice="n")
    dying.event("done", id=0)
    dying.kill()
    target.do("drain", id=77)
    target.event("drained", id=77)
    busy.event("done", id=29)


def test_a_key_and_an_address_that_are_no_such_thing_are_refused(start: Callable[..., Job]) -> None:
    target, source = start("mapped", SMALL), start("mapped", SMALL)
    true = description.decode(bytes.fromhex(target.ask("describe")["description"]))
    key = msgspec.structs.replace(true.regions[0], rkey=b"\xff" * 36)
    for wrong, sentence in (
        ({"regions": [key]}, "UCX could not use the peer's key"),
        ({"worker": b"\xff" * len(true.worker)}, "in another form than ours"),
        ({"worker": true.worker[:5]}, "UCX could not reach the peer"),
    ):
        sealed = description.encode(msgspec.structs.replace(true, **wrong))
        assert sentence in source.ask("connect", peer="other", description=sealed.hex())["error"]
    connect(source, target)
    source.do("write", id=1, peer="target", offset=0, peer_offset=0, nbytes=10, notice="unharmed")
    assert target.event("notice")["payload"] == "unharmed"
