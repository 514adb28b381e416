"""What every backend promises, asked of real processes that write into each other's memory, and die."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable

import pytest

from tests.jobs import Job
from tests.transfer.conftest import RING, SMALL, connect, every_backend, every_backend_that_moves

pytestmark = pytest.mark.e2e
Start = Callable[..., Job]
Pair = Callable[[str], tuple[Job, Job]]
LARGEST = 256 << 20
WHOLE = {"id": 7, "peer": "target", "offset": 0, "peer_offset": 0, "nbytes": 100, "notice": "n"}


@every_backend_that_moves
def test_every_byte_has_landed_when_the_notice_comes(start: Start, mode: str) -> None:
    target, source = start(mode, LARGEST), start(mode, LARGEST)
    connect(source, target)
    random.seed(5)
    for id, nbytes in enumerate((1, 2, 3, 63, 4095, 65537, 1 << 20, (8 << 20) + 1, LARGEST)):
        here, there = random.randrange(LARGEST - nbytes + 1), random.randrange(LARGEST - nbytes + 1)
        sent = source.ask("fill", seed=id, offset=here, nbytes=nbytes)["digest"]
        notice = f"#{there},{nbytes}"
        source.do("write", **(WHOLE | dict(id=id, offset=here, peer_offset=there, nbytes=nbytes, notice=notice)))
        assert target.event("landed")["digest"] == sent
        source.event("done", id=id)


@every_backend
def test_notices_of_many_writes_come_once_each(pair: Pair, mode: str) -> None:
    target, source = pair(mode)
    for id in range(200):
        source.do("write", **(WHOLE | dict(id=id, offset=id, peer_offset=id, nbytes=1000, notice=f"{id}")))
    assert sorted(int(target.event("notice")["payload"]) for _ in range(200)) == list(range(200))
    for id in range(200):
        source.event("done", id=id)
    assert not target.has("notice")


@every_backend
def test_a_notice_may_come_without_bytes(pair: Pair, mode: str) -> None:
    target, source = pair(mode)
    source.do("write", **(WHOLE | {"nbytes": 0, "notice": "only this"}))
    assert target.event("notice")["payload"] == "only this"
    source.event("done", id=7)


@every_backend
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
def test_an_impossible_write_fails_with_a_sentence(pair: Pair, mode: str, wrong: dict, sentence: str) -> None:
    target, source = pair(mode)
    source.do("write", **(WHOLE | wrong))
    assert sentence in source.event("write_failed", id=7)["cause"]
    source.do("write", **(WHOLE | {"id": 8, "notice": "fine"}))
    source.event("done", id=8)
    assert target.event("notice")["payload"] == "fine"


@every_backend
@pytest.mark.parametrize("damage", ["a bit", "20 bytes", "cut"])
def test_a_description_that_cannot_be_trusted_is_refused(pair: Pair, mode: str, damage: str) -> None:
    target, source = pair(mode)
    whole = bytes.fromhex(target.ask("describe")["description"])
    damaged = {
        "a bit": bytes([whole[0] ^ 1]) + whole[1:],
        "20 bytes": bytes(byte ^ 0xFF for byte in whole[:20]) + whole[20:],
        "cut": whole[1:],
    }
    answer = source.ask("connect", peer="other", description=damaged[damage].hex())
    assert "damaged" in answer["error"]


@every_backend
def test_a_peer_on_this_machine_is_not_cut_off_and_the_reason_is_told(pair: Pair, mode: str) -> None:
    target, source = pair(mode)
    answer = target.ask("cut_off", description=source.ask("describe")["description"])
    assert "on this machine" in answer["error"] or "cannot refuse" in answer["error"]
    source.do("write", **(WHOLE | {"notice": "fine"}))
    assert target.event("notice")["payload"] == "fine"
    source.event("done", id=7)


@every_backend
def test_another_backends_description_is_refused(pair: Pair, mode: str) -> None:
    stranger, _ = pair("fake" if mode != "fake" else "put")
    answer = pair(mode)[1].ask("connect", peer="other", description=stranger.ask("describe")["description"])
    assert "error" in answer and "the peer" in answer["error"]


@every_backend
def test_a_peers_name_can_be_used_once_and_again_after_disconnect(pair: Pair, mode: str) -> None:
    target, source = pair(mode)
    description = target.ask("describe")["description"]
    assert "connected already" in source.ask("connect", peer="target", description=description)["error"]
    source.do("disconnect", peer="target")
    assert "path" in source.ask("connect", peer="target", description=description)
    source.do("write", **(WHOLE | {"notice": "again"}))
    assert target.event("notice")["payload"] == "again"
    source.event("done", id=7)


@every_backend
def test_new_memory_is_zero_and_begins_at_a_page(start: Start, mode: str) -> None:
    answer = start(mode, SMALL).ask("describe")
    assert answer["zeroed"] and answer["address"] % 4096 == 0


@every_backend
def test_many_peers_are_written_to_side_by_side(pair: Pair, mode: str) -> None:
    target, source = pair(mode)
    description = target.ask("describe")["description"]
    names = [f"peer{number}" for number in range(8)]
    for name in names:
        source.ask("connect", peer=name, description=description)
    for id in range(160):
        name = names[id % len(names)]
        source.do("write", **(WHOLE | dict(id=id, peer=name, nbytes=5000, notice=f"{id}")))
    assert sorted(int(target.event("notice")["payload"]) for _ in range(160)) == list(range(160))
    for name in names:
        source.do("disconnect", peer=name)
    source.do("write", **(WHOLE | {"id": 200, "notice": "still here"}))
    assert target.event("notice")["payload"] == "still here"
    for id in (*range(160), 200):
        source.event("done", id=id)


@every_backend
def test_kill_9_amid_writes_ends_them_and_a_restarted_peer_is_reached(start: Start, mode: str) -> None:
    source, victim, other = start(mode), start(mode), start(mode, SMALL)
    connect(source, victim)
    connect(source, other, "other")
    for id in range(20):
        source.do("write", **(WHOLE | dict(id=id, nbytes=RING)))
    source.event("done", id=0)
    killed = time.monotonic()
    victim.kill()
    lost = source.event("lost", peer="target")
    assert lost["at"] - killed < 5 and lost["cause"]
    for id in range(1, 20):
        source.wait(lambda line, id=id: line.get("id") == id)
    source.do("write", **(WHOLE | {"id": 100, "peer": "other", "notice": "still here"}))
    assert other.event("notice")["payload"] == "still here"
    source.event("done", id=100)
    restarted = start(mode, SMALL)
    connect(source, restarted)
    source.do("write", **(WHOLE | {"id": 101, "notice": "welcome"}))
    assert restarted.event("notice")["payload"] == "welcome"


@every_backend
def test_a_stopped_peers_writes_end_by_their_deadline_and_others_go_on(start: Start, mode: str) -> None:
    source, stopped, other = start(mode), start(mode), start(mode, SMALL)
    connect(source, stopped)
    connect(source, other, "other")
    os.kill(stopped.pid, signal.SIGSTOP)
    began = time.monotonic()
    source.do("write", **(WHOLE | dict(id=1, nbytes=RING, seconds=1.0)))
    source.do("write", **(WHOLE | dict(id=2, nbytes=1, seconds=1.0)))
    source.do("write", **(WHOLE | dict(id=3, peer="other", notice="meanwhile")))
    assert other.event("notice")["payload"] == "meanwhile"
    for id in (1, 2):
        source.wait(lambda line, id=id: line.get("id") == id)
    assert time.monotonic() - began < 5
    source.do("quit")
    assert source.exit_code() == 0


@every_backend
def test_disconnecting_fails_open_writes_and_lets_finished_ones_land(start: Start, mode: str) -> None:
    target, source = start(mode), start(mode)
    connect(source, target)
    source.do("write", **(WHOLE | {"id": 1, "notice": "landed"}))
    source.event("done", id=1)
    source.do("disconnect", peer="target")
    assert target.event("notice")["payload"] == "landed"
    connect(source, target)
    os.kill(target.pid, signal.SIGSTOP)
    source.do("write", **(WHOLE | {"id": 2, "nbytes": RING}))
    source.do("disconnect", peer="target")
    ending = source.wait(lambda line: line.get("id") == 2)
    assert ending["event"] == "done" or "disconnected" in ending["cause"]


@every_backend_that_moves
def test_after_a_cancelled_write_and_a_drain_nothing_lands_any_more(start: Start, mode: str) -> None:
    target, source = start(mode), start(mode)
    connect(source, target)
    source.ask("fill", seed=1, offset=0, nbytes=RING)
    target.ask("quiet", quiet=True)
    for id in range(4):
        source.do("write", **(WHOLE | dict(id=id, nbytes=RING)))
    source.do("disconnect", peer="target")
    for id in range(4):
        source.wait(lambda line, id=id: line.get("id") == id)
    source.kill()
    target.do("drain", id=77)
    target.event("drained", id=77)
    before = target.ask("landed")["digest"]
    time.sleep(0.3)
    assert target.ask("landed")["digest"] == before


@every_backend
def test_thousands_of_writes_leave_no_memory_or_descriptors_behind(pair: Pair, mode: str) -> None:
    target, source = pair(mode)
    target.ask("quiet", quiet=True)
    heard = target.ask("quiet", quiet=True)["heard"]
    source.ask("series", peer="target", count=1000, nbytes=1000, notice="n")
    before = [job.ask("usage") for job in (source, target)]
    source.ask("series", peer="target", count=2000, nbytes=1000, notice="n")
    after = [job.ask("usage") for job in (source, target)]
    until = time.monotonic() + 30
    while (now := target.ask("quiet", quiet=True)["heard"]) < heard + 3000 and time.monotonic() < until:
        time.sleep(0.05)  # the last notices have left, and need not be here yet
    assert now == heard + 3000
    target.ask("quiet", quiet=False)
    for earlier, later in zip(before, after):
        assert later["fds"] == earlier["fds"]
        assert later["rss"] - earlier["rss"] < 4 << 20  # under 2 KiB a write


@every_backend
def test_connected_backends_at_rest_cost_no_processor_time(pair: Pair, mode: str) -> None:
    before = [job.ask("usage")["cpu"] for job in pair(mode)]
    time.sleep(1)
    after = [job.ask("usage")["cpu"] for job in pair(mode)]
    for earlier, later in zip(before, after):
        assert later - earlier < 0.05


@every_backend
def test_a_backend_closes_with_writes_open_and_peers_connected(start: Start, mode: str) -> None:
    target, source = start(mode), start(mode)
    connect(source, target)
    for id in range(10):
        source.do("write", **(WHOLE | dict(id=id, nbytes=RING)))
    source.do("quit")
    assert source.exit_code() == 0
    target.do("quit")
    assert target.exit_code() == 0
