"""What only UCX promises: straight into mapped memory on one host, and deaths told in its own words."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from pdjax.transfer.ucx import description
from tests.jobs import Job
from tests.transfer.conftest import PATHS, SMALL, both_paths, connect, needs_emulated_gpu

pytestmark = pytest.mark.e2e


@both_paths
def test_the_path_says_how_bytes_move(start: Callable[..., Job], mode: str) -> None:
    assert connect(start(mode, SMALL), start(mode, SMALL)).startswith(PATHS[mode])


@needs_emulated_gpu
def test_only_who_moves_a_gpus_memory_writes_into_it(start: Callable[..., Job]) -> None:
    gpu = start("cuda", SMALL)
    refused = start("mapped", SMALL).ask("connect", peer="gpu", description=gpu.ask("describe")["description"])
    assert "the peer's slots are in a GPU's memory" in refused["error"]


def test_a_put_over_tcp_is_not_emulated_by_copies(start: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_PROTO_INFO", "y")
    monkeypatch.setenv("UCX_LOG_LEVEL", "info")
    source, target = start("put", SMALL), start("put", SMALL)
    connect(source, target)
    source.do("write", id=1, peer="target", offset=0, peer_offset=0, nbytes=SMALL, notice="n")
    source.event("done", id=1)
    _, about_puts = source.noise().split("remote memory write by ucp_put* from host memory", 1)
    assert "zero-copy" in about_puts and "emulation" not in about_puts


@both_paths
def test_the_death_of_a_peer_is_told_without_any_write(start: Callable[..., Job], mode: str) -> None:
    source, victim = start(mode, SMALL), start(mode, SMALL)
    connect(source, victim)
    source.do("write", id=1, peer="target", offset=0, peer_offset=0, nbytes=1000, notice="n")
    source.event("done", id=1)
    victim.kill()
    source.event("lost", peer="target", timeout=5)


def test_what_is_stored_in_mapped_memory_is_there_when_a_write_of_no_bytes_tells_of_it(
    start: Callable[..., Job],
) -> None:
    source, target = start("mapped", SMALL), start("mapped", SMALL)
    connect(source, target)
    sent = source.ask("fill", seed=3, offset=64, nbytes=5000)["digest"]
    for nowhere in ({"peer": "nobody"}, {"peer_region": 9}, {"peer_offset": SMALL - 4999}, {"peer_offset": -1}):
        assert not source.ask("hold", **({"peer": "target"} | nowhere))["mapped"]
    assert source.ask("hold", peer="target", peer_offset=100)["mapped"]
    source.ask("store", offset=64, nbytes=5000)
    source.do("write", id=1, peer="target", offset=0, peer_offset=0, nbytes=0, notice="#100,5000")
    assert target.event("landed")["digest"] == sent
    source.event("done", id=1)
    source.ask("let_go")
    over_the_network = start("put", SMALL)
    connect(over_the_network, target)
    assert not over_the_network.ask("hold", peer="target")["mapped"]


@pytest.mark.parametrize("how", ["killed", "disconnected"])
def test_mapped_memory_stays_until_it_is_let_go_though_its_peer_is_gone(start: Callable[..., Job], how: str) -> None:
    source, target = start("mapped", SMALL), start("mapped", SMALL)
    connect(source, target)
    assert source.ask("hold", peer="target")["mapped"]
    if how == "killed":
        target.kill()
        source.event("lost", peer="target")
    else:
        source.do("disconnect", peer="target")
    source.ask("store", offset=0, nbytes=5000)
    source.do("write", id=1, peer="target", offset=0, peer_offset=0, nbytes=0, notice="n")
    assert "no peer named 'target'" in source.event("write_failed", id=1)["cause"]
    source.ask("store", offset=0, nbytes=5000)
    source.ask("let_go")
    assert not source.ask("hold", peer="target")["mapped"]


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
