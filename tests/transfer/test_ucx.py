"""Real processes that write into each other's memory, on both paths, and die."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable

import pytest

from tests.jobs import Job
from tests.transfer.conftest import PATHS, RING, SMALL, connect

pytestmark = pytest.mark.e2e
both_paths = pytest.mark.parametrize("mode", PATHS)


@both_paths
def test_every_byte_has_landed_when_the_notice_comes(start: Callable[..., Job], mode: str) -> None:
    target, source = start(mode), start(mode)
    assert connect(source, target).startswith(PATHS[mode])
    random.seed(5)
    for id, nbytes in enumerate((1, 2, 4095, 65536, 1 << 20, (8 << 20) + 1, 33 << 20, 64 << 20)):
        source.ask("fill", seed=id)
        here, there = random.randrange(RING - nbytes), random.randrange(RING - nbytes)
        source.do(
            "write", id=id, peer="target", offset=here, peer_offset=there, nbytes=nbytes, notice=f"#{there},{nbytes}"
        )
        assert target.event("landed")["digest"] == source.ask("digest", offset=here, nbytes=nbytes)["digest"]
        source.event("done", id=id)


@both_paths
def test_notices_of_many_writes_come_once_each(start: Callable[..., Job], mode: str) -> None:
    target, source = start(mode, SMALL), start(mode, SMALL)
    connect(source, target)
    for id in range(200):
        source.do("write", id=id, peer="target", offset=id, peer_offset=id, nbytes=1000, notice=f"{id}")
    assert sorted(int(target.event("notice")["payload"]) for _ in range(200)) == list(range(200))
    for id in range(200):
        source.event("done", id=id)
    assert not target.has("notice")


def test_a_notice_may_come_without_bytes(start: Callable[..., Job]) -> None:
    target, source = start("put", SMALL), start("put", SMALL)
    connect(source, target)
    source.do("write", id=1, peer="target", offset=0, peer_offset=0, nbytes=0, notice="only this")
    assert target.event("notice")["payload"] == "only this"


@both_paths
@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"region": 9}, "region 9 is not registered here"),
        ({"peer_region": 9}, "the peer has no region 9"),
        ({"peer_region": 2}, "the peer has no region 2"),  # a source is nobody's target
        ({"offset": SMALL - 10}, "is not within region 2"),
        ({"offset": -1}, "is not within region 2"),
        ({"peer_offset": SMALL}, "is not within the peer's region 1"),
        ({"nbytes": SMALL + 1}, "is not within region 2"),
        ({"notice": "x" * 1025}, "a notice of 1025 bytes"),
        ({"peer": "nobody"}, "no peer named 'nobody' is connected"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_an_impossible_write_fails_with_a_sentence(pair: dict, mode: str, wrong: dict, sentence: str) -> None:
    target, source = pair[mode]
    whole = {"id": 7, "peer": "target", "offset": 0, "peer_offset": 0, "nbytes": 100, "notice": "n"}
    source.do("write", **(whole | wrong))
    assert sentence in source.event("write_failed", id=7)["cause"]
    source.do("write", **(whole | {"id": 8, "notice": "fine"}))
    source.event("done", id=8)
    assert target.event("notice")["payload"] == "fine"


@pytest.mark.parametrize("damage", ["00", "ff" * 20, ""])
def test_a_description_that_cannot_be_trusted_is_refused(pair: dict, damage: str) -> None:
    target, source = pair["mapped"]
    description = target.ask("describe")["description"]
    answer = source.ask("connect", peer="other", description=damage + description[len(damage) or 2 :])
    assert "damaged" in answer["error"]


def test_a_peers_name_can_be_used_once_and_again_after_disconnect(pair: dict) -> None:
    target, source = pair["mapped"]
    description = target.ask("describe")["description"]
    assert "connected already" in source.ask("connect", peer="target", description=description)["error"]
    source.do("disconnect", peer="target")
    assert source.ask("connect", peer="target", description=description)["path"].startswith("mapped")
    source.do("write", id=1, peer="target", offset=0, peer_offset=0, nbytes=10, notice="again")
    assert target.event("notice")["payload"] == "again"


@both_paths
def test_new_memory_is_zero(pair: dict, mode: str) -> None:
    assert pair[mode][1].ask("describe")["zeroed"]


def test_kill_9_amid_writes_fails_them_in_words_and_other_peers_go_on(start: Callable[..., Job]) -> None:
    source, victim, other = start("put"), start("put"), start("put", SMALL)
    connect(source, victim, "victim")
    connect(source, other, "other")
    for id in range(20):
        source.do("write", id=id, peer="victim", offset=0, peer_offset=0, nbytes=RING, notice="n")
    source.event("done", id=0)
    killed = time.monotonic()
    victim.kill()
    failed = source.event("write_failed", id=19)
    assert failed["at"] - killed < 2
    assert "UCX says" in failed["cause"]
    assert source.event("lost", peer="victim")["at"] - killed < 2
    source.do("write", id=100, peer="other", offset=0, peer_offset=0, nbytes=1000, notice="still here")
    assert other.event("notice")["payload"] == "still here"
    source.event("done", id=100)


@both_paths
def test_the_death_of_a_peer_is_told_without_any_write(start: Callable[..., Job], mode: str) -> None:
    source, victim = start(mode, SMALL), start(mode, SMALL)
    connect(source, victim)
    source.do("write", id=1, peer="target", offset=0, peer_offset=0, nbytes=1000, notice="n")
    source.event("done", id=1)
    victim.kill()
    source.event("lost", peer="target", timeout=5)
    replacement = start(mode, SMALL)
    connect(source, replacement)
    source.do("write", id=2, peer="target", offset=0, peer_offset=0, nbytes=1000, notice="welcome")
    assert replacement.event("notice")["payload"] == "welcome"


def test_a_stopped_peer_fails_its_writes_at_their_deadline_and_no_others(start: Callable[..., Job]) -> None:
    source, stopped, other = start("put"), start("put"), start("put", SMALL)
    connect(source, stopped, "stopped")
    connect(source, other, "other")
    os.kill(stopped.pid, signal.SIGSTOP)
    began = time.monotonic()
    source.do("write", id=1, peer="stopped", offset=0, peer_offset=0, nbytes=RING, notice="n", seconds=1.0)
    source.do("write", id=2, peer="stopped", offset=0, peer_offset=0, nbytes=1, notice="n", seconds=60.0)
    source.do("write", id=3, peer="other", offset=0, peer_offset=0, nbytes=1000, notice="meanwhile")
    assert other.event("notice")["payload"] == "meanwhile"
    failed = source.event("write_failed", id=1)
    assert "deadline" in failed["cause"]
    assert 0.9 < failed["at"] - began < 5
    source.event("write_failed", id=2)
    source.event("lost", peer="stopped")
    source.do("quit")
    assert source.exit_code() == 0


@both_paths
def test_disconnecting_fails_open_writes_and_lets_finished_ones_land(start: Callable[..., Job], mode: str) -> None:
    target, source = start(mode), start(mode)
    connect(source, target)
    source.do("write", id=1, peer="target", offset=0, peer_offset=0, nbytes=1000, notice="landed")
    source.event("done", id=1)
    source.do("disconnect", peer="target")
    assert target.event("notice")["payload"] == "landed"
    connect(source, target)
    os.kill(target.pid, signal.SIGSTOP)
    source.do("write", id=2, peer="target", offset=0, peer_offset=0, nbytes=RING, notice="n")
    source.do("disconnect", peer="target")
    ending = source.wait(lambda line: line.get("id") == 2)
    assert ending["event"] == "done" or "disconnected" in ending["cause"]
    assert mode == "mapped" or ending["event"] == "write_failed"


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


@both_paths
def test_a_thousand_writes_leave_no_file_descriptors_behind(start: Callable[..., Job], mode: str) -> None:
    target, source = start(mode, SMALL), start(mode, SMALL)
    connect(source, target)
    target.ask("quiet", quiet=True)
    source.ask("series", peer="target", count=10, nbytes=1000, notice="n")
    before = [job.ask("usage")["fds"] for job in (source, target)]
    source.ask("series", peer="target", count=1000, nbytes=1000, notice="n")
    assert [job.ask("usage")["fds"] for job in (source, target)] == before
    assert target.ask("quiet", quiet=True)["heard"] == 1010


@both_paths
def test_connected_backends_at_rest_cost_no_processor_time(pair: dict, mode: str) -> None:
    before = [job.ask("usage")["cpu"] for job in pair[mode]]
    time.sleep(2)
    after = [job.ask("usage")["cpu"] for job in pair[mode]]
    for earlier, later in zip(before, after):
        assert (later - earlier) / 2 < 0.03


@both_paths
def test_a_backend_closes_with_writes_open_and_peers_connected(start: Callable[..., Job], mode: str) -> None:
    target, source = start(mode), start(mode)
    connect(source, target)
    for id in range(10):
        source.do("write", id=id, peer="target", offset=0, peer_offset=0, nbytes=RING, notice="n")
    source.do("quit")
    assert source.exit_code() == 0
    target.do("quit")
    assert target.exit_code() == 0
