"""What an instance decides about its links and rooms, told and asked directly."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pdjax.disagg.protocol import messages
from pdjax.disagg.protocol.asks import DecodeAsk, PrefillAsk
from pdjax.disagg.protocol.decode_instance import DecodeInstance
from pdjax.disagg.protocol.hosts import Given
from pdjax.disagg.protocol.path_tests import ATTEMPTS, IDLE
from pdjax.disagg.protocol.prefill_instance import PrefillInstance
from pdjax.disagg.protocol.quarantine import FIRST_LOOK
from pdjax.disagg.protocol.tombstones import MOST, Tombstones
from pdjax.disagg.protocol.topology import Rank
from pdjax.disagg.simulate.settings import TIMEOUTS, Settings, registration
from pdjax.transfer.layout import Layout

LINK = "host:7"
HELLO = {life: messages.encode(registration("prefill", life, Settings(), messages.EARLY)) for life in (1, 2)}


class Host:
    """Notes what it is asked for. `pages`: whether there are any."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.connects = 0
        self.closed: list[str] = []
        self.failed: dict[str, str] = {}
        self.reserved: list[str] = []
        self.slots = [0, 1]
        self.drains: list[int] = []
        self.cut_off: list[tuple[bytes, ...]] = []
        self.said: list[str] = []
        self.pages = True
        self.right = True  # whether test messages come as they were sent

    def send(self, link: str, body: bytes) -> None:
        self.sent.append(messages.decode_message(body))

    def connect(self, link: str, host: str, port: int) -> None:
        self.connects += 1

    def close(self, link: str) -> None:
        self.closed.append(link)

    def take_slot(self) -> int | None:
        return self.slots.pop() if self.slots else None

    def free_slot(self, slot: int) -> None:
        self.slots.append(slot)

    def reserve(self, rid: str, *, share: bool) -> Given | None:
        if self.pages:
            self.reserved.append(rid)
        return Given(0) if self.pages else None

    def fail(self, rid: str, status: int, reason: str) -> None:
        self.failed[rid] = reason

    def drain(self, id: int, cut_off: tuple[bytes, ...]) -> None:
        self.drains.append(id)
        self.cut_off.append(cut_off)

    def draw(self) -> int:
        return 99

    def say(self, text: str) -> None:
        self.said.append(text)

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"nobody expected {name}")


def decode(host: Host, policy: str = messages.EARLY) -> DecodeInstance:
    return DecodeInstance(host, registration=registration("decode", 5, Settings(), policy), timeouts=TIMEOUTS)  # type: ignore[arg-type]


def ask(instance: DecodeInstance, now: float, rid: str = "r", room: int = 3) -> None:
    instance.submit(DecodeAsk(rid, room, "host", 7, 4, b"d" * 8, 4), now)
    instance.tick(now)


def linked(host: Host, instance: DecodeInstance, now: float, hello: bytes = HELLO[1]) -> None:
    """The link stands, and its data path has passed its test."""
    instance.link_up(LINK, hello, now)
    come(host, instance, now)


def come(host: Host, instance: DecodeInstance, now: float) -> None:
    """The test message that was asked for last has come."""
    asked = next(message for message in reversed(host.sent) if isinstance(message, messages.PathTest))
    instance.test_came(asked.number, now, right=host.right)


def granted(host: Host, instance: DecodeInstance, now: float = 0.0, hello: bytes = HELLO[1]) -> None:
    """A claimed room with one slot that the prefill side may write to."""
    ask(instance, now)
    linked(host, instance, now, hello)
    instance.frame(LINK, messages.encode(messages.SlotRequest(3, 99, 0)), now)
    assert isinstance(host.sent[-1], messages.SlotGrant) and host.slots == [0]


def test_a_peer_that_says_nothing_for_too_long_is_given_up_and_its_rooms_say_so() -> None:
    host = Host()
    instance = decode(host)
    granted(host, instance)
    now = 0.0
    while not host.failed and now < 10:
        now += TIMEOUTS.heartbeat
        instance.tick(now)
    assert TIMEOUTS.peer <= now <= TIMEOUTS.peer + 2 * TIMEOUTS.heartbeat
    assert "it hangs" in host.failed["r"] and host.closed == [LINK]
    assert sum(isinstance(message, messages.Heartbeat) for message in host.sent) >= 4
    assert instance.stats()["staging_slots_quarantined"] == 1 and not host.drains


def test_a_peer_that_beats_may_compute_for_as_long_as_it_likes() -> None:
    host = Host()
    instance = decode(host)
    granted(host, instance)
    for tenth in range(1, 100):
        instance.frame(LINK, messages.encode(messages.Heartbeat(tenth, 1)), tenth / 10)
        instance.tick(tenth / 10)
    assert not host.failed


def test_who_stood_still_itself_blames_nobody() -> None:
    host = Host()
    instance = decode(host)
    granted(host, instance)
    instance.tick(TIMEOUTS.waiting - 0.1)
    assert not host.failed and not host.closed


@pytest.mark.parametrize("proof", ["another life", "the same life", "nobody listens"])
def test_slots_in_quarantine_come_home_when_the_peers_fate_is_known(proof: str) -> None:
    host = Host()
    instance = decode(host)
    granted(host, instance)
    instance.link_down(LINK, "it was cut", 1.0, gone=False)
    assert "it was cut" in host.failed["r"] and host.slots == [0] and host.connects == 1
    look: float | None = 1.0
    while host.connects < 2:
        look = instance.tick(look)
        assert look is not None and look < 10, "it is looked for again, and soon"
    if proof == "another life":
        instance.link_up(LINK, HELLO[2], look)
    elif proof == "nobody listens":
        instance.link_failed(LINK, "connection refused", look, gone=True)
    else:
        instance.link_up(LINK, HELLO[1], look)
        assert any(isinstance(message, messages.Abort) for message in host.sent) and not host.drains
        instance.frame(LINK, messages.encode(messages.AbortAck(3, 99)), look)
    assert host.slots == [0], "not before all that was sent has landed"
    instance.drained(host.drains[0], look)
    assert sorted(host.slots) == [0, 1] and instance.stats()["rooms"] == 0


@pytest.mark.parametrize("possible", [True, False])
def test_a_peer_whose_host_is_out_of_reach_is_cut_off_once_and_its_slots_come_home(possible: bool) -> None:
    host = Host()
    instance = decode(host)
    granted(host, instance)
    instance.link_down(LINK, "it has said nothing", 1.0, gone=False)
    look: float | None = 1.0
    for _ in range(3):
        connects = host.connects
        while host.connects == connects:
            look = instance.tick(look)
            assert look is not None and look < 60
        instance.link_failed(LINK, "timed out", look, unreachable=True)
    (processes,) = host.cut_off
    assert processes == (messages.decode_registration(HELLO[1]).ranks[0].transfer,) and host.slots == [0]
    if possible:
        instance.drained(host.drains[0], look)
        assert sorted(host.slots) == [0, 1] and instance.stats()["staging_slots_quarantined"] == 0
        return
    instance.drained(host.drains[0], look, error="it writes by InfiniBand")
    assert "stay in quarantine: it writes by InfiniBand" in host.said[-1] and host.slots == [0]
    while host.connects < 5:
        look = instance.tick(look)
        assert look is not None and look < 200
    instance.link_failed(LINK, "connection refused", look, gone=True)
    instance.drained(host.drains[1], look)
    assert sorted(host.slots) == [0, 1]


def test_a_dead_peer_needs_no_quarantine() -> None:
    host = Host()
    instance = decode(host)
    granted(host, instance)
    instance.link_down(LINK, "the peer has died", 1.0, gone=True)
    instance.drained(host.drains[0], 1.0)
    assert sorted(host.slots) == [0, 1]


@pytest.mark.parametrize("then", ["nothing more is heard", "nobody listens", "another in its place"])
def test_a_dead_leader_is_no_proof_that_its_workers_write_no_more(then: str) -> None:
    host = Host()
    instance = decode(host)
    ranks = [Rank(b"leader"), Rank(b"worker", cp=1)]
    peer = msgspec.structs.replace(messages.decode_registration(HELLO[1]), layout=Layout(cp=2), ranks=ranks)
    granted(host, instance, hello=messages.encode(peer))
    instance.link_down(LINK, "the peer has died", 1.0, gone=True)
    assert "died" in host.failed["r"] and not host.drains
    instance.tick(1.0 + FIRST_LOOK)
    if then == "another in its place":
        ask(instance, 1.0 + FIRST_LOOK, rid="next", room=4)
        linked(host, instance, 1.0 + FIRST_LOOK, HELLO[2])
    elif then == "nobody listens":
        ask(instance, 1.0 + FIRST_LOOK, rid="next", room=4)
        instance.link_failed(LINK, "connection refused", 1.0 + FIRST_LOOK, gone=True)
    instance.tick(0.9 + TIMEOUTS.workers_end)
    assert not host.drains and host.slots == [0]
    instance.tick(1.0 + TIMEOUTS.workers_end)
    instance.drained(host.drains[0], 1.0 + TIMEOUTS.workers_end)
    assert sorted(host.slots) == [0, 1]


def test_no_room_is_claimed_over_a_data_path_before_that_has_passed_its_test() -> None:
    host = Host()
    instance = decode(host)
    ask(instance, 0.0)
    instance.link_up(LINK, HELLO[1], 0.0)
    ask(instance, 0.0, rid="next", room=4)
    assert [type(message) for message in host.sent] == [messages.PathTest]
    come(host, instance, 0.1)
    assert [message.room for message in host.sent if isinstance(message, messages.Claim)] == [3, 4]
    ask(instance, 0.2, rid="last", room=5)
    assert isinstance(host.sent[-1], messages.Claim) and instance.stats()["path_tests_total"] == 1
    assert instance.problem(0.2) is None


@pytest.mark.parametrize("how", ["nothing comes", "what comes is damaged", "it cannot be sent"])
def test_a_data_path_that_fails_its_test_is_given_up_and_the_instance_says_so_for_a_while(how: str) -> None:
    host = Host()
    instance = decode(host)
    ask(instance, 0.0)
    instance.link_up(LINK, HELLO[1], 0.0)
    now, words = 0.0, {"nothing comes": "no test message came", "what comes is damaged": "is not what was sent",
                       "it cannot be sent": "no route"}[how]  # fmt: skip
    if how == "it cannot be sent":
        instance.frame(LINK, messages.encode(messages.PathFailed("no route")), now)
    elif how == "what comes is damaged":
        host.right = False
        for _ in range(ATTEMPTS):
            assert not host.failed
            come(host, instance, now)
    else:
        while not host.failed and now < 10:
            now += TIMEOUTS.peer / 10
            instance.tick(now)
        assert TIMEOUTS.peer <= now < TIMEOUTS.peer + 1
    assert "failed its test" in host.failed["r"] and words in host.failed["r"]
    assert host.closed == [LINK] and isinstance(host.sent[-1], messages.PathFailed)
    assert words in (instance.problem(now + 1) or "")
    assert instance.problem(now + IDLE) is None, "it gets another try"
    host.right = True
    ask(instance, now, rid="again", room=4)
    linked(host, instance, now)
    assert isinstance(host.sent[-1], messages.Claim) and instance.problem(now + 1) is None


def test_an_idle_path_is_tested_again_and_a_busy_one_is_not() -> None:
    host = Host()
    instance = decode(host)
    granted(host, instance)
    notice = messages.ChunkNotice(3, 99, 0, host.sent[-1].slot, 0, 4, 4 * 8)
    host.landed = lambda rid, notice, damaged: None  # type: ignore[attr-defined]
    host.scatter = lambda *_: None  # type: ignore[attr-defined]
    instance.landed(notice, IDLE / 2)
    instance.cancel("r", "the client left", IDLE / 2)
    instance.tick(IDLE)
    assert instance.stats()["path_tests_total"] == 1
    instance.tick(IDLE * 1.5)
    assert instance.stats()["path_tests_total"] == 2
    come(host, instance, IDLE * 1.5)
    assert instance.tick(IDLE * 1.5 + TIMEOUTS.peer) == IDLE * 2.5, "an idle instance sleeps until the next"


def test_one_peers_broken_path_is_not_held_against_an_instance_that_moves_things_elsewhere() -> None:
    host = Host()
    instance = decode(host)
    granted(host, instance)
    instance.submit(DecodeAsk("r2", 4, "other", 7, 4, b"d" * 8, 4), 1.0)
    instance.tick(1.0)
    instance.link_up("other:7", HELLO[2], 1.0)
    instance.frame("other:7", messages.encode(messages.PathFailed("no route")), 1.0)
    assert "no route" in host.failed["r2"] and instance.problem(1.0) is None


def test_a_prefill_instance_sends_the_test_message_that_it_is_asked_for_or_says_why_not() -> None:
    tested: list[tuple[int, int]] = []

    class Tests(PrefillHost):
        def test_path(self, id: int, link: str, number: int, deadline: float) -> None:
            tested.append((id, number))

        def close_path(self, link: str) -> None:
            assert link == "in"

    host = Tests()
    instance = prefill(host)
    for number in (5, 6):
        instance.frame("in", messages.encode(messages.PathTest(number)), 0.0)
    assert [number for _, number in tested] == [5, 6]
    instance.write_ended(tested[0][0], None, 0.0)
    assert instance.problem(0.0) is None
    later = 3 * IDLE
    instance.write_ended(tested[1][0], "no route", later)
    assert host.sent[-1] == messages.PathFailed("no route") and host.closed == ["in"]
    assert "no route" in (instance.problem(later) or "")


def test_a_peer_leaves_the_last_slot_to_others_and_takes_it_where_there_are_none() -> None:
    host = Host()
    host.slots = [0, 1, 2]  # as many as it has registered
    numbers = iter(range(100, 200))
    host.draw = lambda: next(numbers)  # type: ignore[method-assign]
    instance = decode(host)
    ask(instance, 0.0)
    linked(host, instance, 0.0)

    def want(link: str, room: int, generation: int, chunk: int) -> None:
        instance.frame(link, messages.encode(messages.SlotRequest(room, generation, chunk)), 0.0)

    want(LINK, 3, 100, 0)
    want(LINK, 3, 100, 1)
    instance.submit(DecodeAsk("r2", 4, "other", 7, 4, b"d" * 8, 4), 0.0)
    instance.tick(0.0)
    instance.link_up("other:7", HELLO[2], 0.0)
    come(host, instance, 0.0)
    want(LINK, 3, 100, 2)
    assert host.slots == [0] and instance.stats()["staging_slots_wanted"] == 1
    want("other:7", 4, 101, 0)
    assert host.slots == [] and host.sent[-1] == messages.SlotGrant(4, 101, 0, 0)
    instance.frame("other:7", messages.encode(messages.Abort(4, 101, 502, "the instance is stopping")), 0.0)
    instance.frame("other:7", messages.encode(messages.AbortAck(4, 101)), 0.0)
    assert host.slots == [0], "it is kept for whoever else comes"
    instance.link_down("other:7", "it was closed", 0.0)
    want(LINK, 3, 100, 3)
    assert host.slots == []


def test_a_room_number_is_free_again_while_slots_of_the_old_room_are_out() -> None:
    host = Host()
    instance = decode(host)
    granted(host, instance)
    instance.cancel("r", "the client left", 1.0)
    ask(instance, 1.0, rid="next")
    assert not host.failed and host.reserved == ["r", "next"]


def test_an_abort_that_may_have_been_lost_is_said_again_with_its_reason() -> None:
    host = Host()
    instance = decode(host)
    granted(host, instance)
    instance.cancel("r", "the client left", 1.0)
    first = host.sent[-1]
    instance.frame(LINK, messages.encode(messages.Heartbeat(1, 1)), 1.0 + TIMEOUTS.transfer)
    instance.tick(1.0 + TIMEOUTS.transfer)
    assert isinstance(first, messages.Abort) and "the client left" in first.reason
    assert host.sent.count(first) == 2


def test_prefill_complete_takes_pages_only_when_the_prompt_is_computed_and_grants_no_slot_before() -> None:
    host = Host()
    instance = decode(host, messages.PREFILL_COMPLETE)
    ask(instance, 0.0)
    hello = messages.encode(registration("prefill", 1, Settings(), messages.PREFILL_COMPLETE))
    linked(host, instance, 0.0, hello)
    assert isinstance(host.sent[-1], messages.Claim) and not host.reserved
    instance.frame(LINK, messages.encode(messages.SlotRequest(3, 99, 0)), 0.0)
    host.pages = False
    instance.frame(LINK, messages.encode(messages.Handoff(3, 99, 1, 7, -0.5, 0.0, 0.1)), 0.0)
    instance.tick(0.0)
    assert not any(isinstance(message, messages.SlotGrant) for message in host.sent)
    host.pages = True
    instance.tick(1.0)
    assert host.reserved == ["r"]
    assert any(isinstance(message, messages.SlotGrant) for message in host.sent)


def test_one_that_follows_another_waits_for_its_prompt_and_takes_its_place_if_it_fails() -> None:
    host = Host()
    instance = decode(host)
    instance.submit(DecodeAsk("a", 1, "host", 7, 4, b"d" * 8, 4), 0.0)
    for rid, room in (("b", 2), ("c", 3)):
        instance.submit(DecodeAsk(rid, room, "host", 7, 4, b"d" * 8, 4, follows="a"), 0.0)
    instance.submit(DecodeAsk("other", 4, "host", 7, 4, b"e" * 8, 4, follows="nobody here"), 0.0)
    instance.tick(0.0)
    assert host.reserved == ["a", "other"]
    instance.cancel("a", "the client left", 0.0)
    instance.tick(0.0)
    assert host.reserved == ["a", "other", "b"]
    instance.cancel("b", "the client left", 0.0)
    instance.tick(0.0)
    assert host.reserved == ["a", "other", "b", "c"]


def test_one_that_follows_another_does_not_wait_for_ever() -> None:
    host = Host()
    instance = decode(host)
    ask(instance, 0.0, rid="a", room=1)
    instance.link_up(LINK, HELLO[1], 0.0)
    instance.submit(DecodeAsk("b", 2, "host", 7, 4, b"d" * 8, 4, follows="a"), 0.0)
    now = 0.0
    while "b" not in host.failed and now < 100:
        now += 0.5
        instance.frame(LINK, messages.encode(messages.Heartbeat(int(now), 1)), now)
        instance.tick(now)
    assert "a" in host.failed and now <= 2 * (TIMEOUTS.alloc + TIMEOUTS.waiting)


def test_a_wait_for_pages_ends_and_says_what_it_was_for() -> None:
    host = Host()
    host.pages = False
    instance = decode(host)
    ask(instance, 0.0)
    instance.tick(TIMEOUTS.alloc)
    assert "waited 8 s for free pages" in host.failed["r"]


@pytest.mark.parametrize("body", [b"", b"\xc1", b"rubbish", messages.encode(messages.Claim(1, 2, 3, b""))[:-3]])
def test_a_frame_that_does_not_parse_is_answered_and_counted(body: bytes) -> None:
    host = Host()
    instance = decode(host)
    granted(host, instance)
    instance.frame(LINK, body, 0.0)
    assert isinstance(host.sent[-1], messages.Refused) and "does not parse" in host.sent[-1].reason
    assert instance.stats()["refused_frames_total"] == 1
    instance.frame(LINK, messages.encode(host.sent[-1]), 0.0)
    assert sum(isinstance(message, messages.Refused) for message in host.sent) == 1, "an answer is not answered"


class PrefillHost(Host):
    def open_path(self, link: str, transfer: bytes) -> None:
        return None


def prefill(host: Host) -> PrefillInstance:
    """With a decode instance on the link `in`."""
    own = registration("prefill", 1, Settings(), messages.EARLY)
    instance = PrefillInstance(host, registration=own, timeouts=TIMEOUTS)  # type: ignore[arg-type]
    instance.link_up("in", messages.encode(registration("decode", 2, Settings(), messages.EARLY)), 0.0)
    return instance


@pytest.mark.parametrize("end", ["cancelled", "overdue"])
def test_a_claim_that_comes_after_its_prefill_half_has_ended_is_told_why_at_once(end: str) -> None:
    host = PrefillHost()
    instance = prefill(host)
    instance.submit(PrefillAsk("r", 3, 4, b"d"), 0.0)
    if end == "cancelled":
        instance.cancel("r", "the client left", 1.0)
    else:
        instance.tick(TIMEOUTS.bootstrap)
    now = TIMEOUTS.bootstrap + 0.5
    instance.frame("in", messages.encode(messages.Claim(3, 77, 4, b"d")), now)
    abort, acknowledgement = host.sent[-2:]
    assert abort.reason == ("the prefill request was aborted: the client left" if end == "cancelled" else
                            host.failed["r"])  # fmt: skip
    assert (abort.generation, acknowledgement) == (77, messages.AbortAck(3, 77))
    assert instance.stats()["rooms"] == 0


@pytest.mark.parametrize("later", ["another prompt", "a second claim", "long after", "asked again"])
def test_a_room_number_is_not_barred_by_what_has_ended_under_it(later: str) -> None:
    host = PrefillHost()
    instance = prefill(host)
    instance.submit(PrefillAsk("r", 3, 4, b"d"), 0.0)
    instance.cancel("r", "the client left", 0.0)
    if later == "a second claim":
        instance.frame("in", messages.encode(messages.Claim(3, 76, 4, b"d")), 1.0)
    elif later == "asked again":
        instance.submit(PrefillAsk("again", 3, 4, b"d"), 1.0)
    host.sent.clear()
    now = TIMEOUTS.bootstrap + 1.0 if later == "long after" else 1.0
    instance.frame("in", messages.encode(messages.Claim(3, 77, 4, b"e" if later == "another prompt" else b"d")), now)
    assert not any(isinstance(message, messages.Abort) for message in host.sent)
    assert instance.stats()["rooms"] == 1


def test_what_has_ended_is_remembered_in_bounds() -> None:
    stones = Tombstones(seconds=10.0)
    for number in range(2 * MOST):
        stones.put(number, b"d", 499, "the client left", 0.0)
    assert len(stones) == MOST
    assert stones.take(0, b"d", 1.0) is None and stones.take(2 * MOST - 1, b"d", 1.0) is not None
    stones.put(0, b"d", 499, "the client left", 11.0)
    assert len(stones) == 1


def test_prompts_get_pages_by_priority_and_one_at_a_time_among_equals() -> None:
    begun: list[str] = []

    class Computes(PrefillHost):
        def begin_prompt(self, rid: str) -> Given:
            begun.append(rid)
            return Given(0)

    instance = prefill(Computes())
    for number, (rid, priority) in enumerate([("a", 0), ("b", 0), ("urgent", 1)]):
        instance.frame("in", messages.encode(messages.Claim(number, number, 4, b"d")), 0.0)
        instance.submit(PrefillAsk(rid, number, 4, b"d", priority, float(number)), 0.0)
        if rid == "a":
            instance.tick(0.0)
    instance.tick(0.0)
    assert begun == ["a", "urgent"]
    instance.cancel("a", "the client left", 0.0)
    instance.cancel("urgent", "the client left", 0.0)
    instance.tick(0.0)
    assert begun == ["a", "urgent", "b"]


@pytest.mark.parametrize(("slot", "dp_rank"), [(Settings().slots, 0), (-1, 0), (0, 1), (0, -1)])
def test_a_grant_of_what_the_peer_does_not_have_is_refused_and_nothing_is_written_there(
    slot: int, dp_rank: int
) -> None:
    written: list[messages.ChunkNotice] = []

    class Writes(PrefillHost):
        def begin_prompt(self, rid: str) -> Given:
            return Given(0)

        def write(self, id: int, link: str, slot: int, rid: str, notice: messages.ChunkNotice, deadline: float) -> None:
            written.append(notice)

    host = Writes()
    instance = prefill(host)
    instance.frame("in", messages.encode(messages.Claim(3, 77, 4, b"d")), 0.0)
    instance.submit(PrefillAsk("r", 3, 4, b"d"), 0.0)
    instance.tick(0.0)
    instance.computing("r", 0, 4, 0.0)
    instance.computed("r", 0.0)
    instance.frame("in", messages.encode(messages.SlotGrant(3, 77, 0, slot, dp_rank)), 0.0)
    assert not written and instance.stats()["refused_frames_total"] == 1
    assert isinstance(host.sent[-1], messages.Refused) and f"dp_rank={dp_rank}" in host.sent[-1].reason
    instance.frame("in", messages.encode(messages.SlotGrant(3, 77, 0, 0)), 0.0)
    assert [notice.slot for notice in written] == [0]


def test_a_look_at_the_registration_is_no_refused_link() -> None:
    host = PrefillHost()
    instance = prefill(host)
    instance.link_up("look", messages.encode(registration(messages.CHECK, 9, Settings(), messages.EARLY)), 0.0)
    assert host.closed == ["look"] and instance.stats()["refused_links_total"] == 0
    instance.link_up("look", messages.encode(registration("prefill", 9, Settings(), messages.EARLY)), 0.0)
    assert host.closed == ["look", "look"] and instance.stats()["refused_links_total"] == 1


class Takes(PrefillHost):
    """Notes what it is to compute again. `refusal`: why it can't."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: dict[str, list[int]] = {}
        self.refusal: tuple[int, str] | None = None

    def rebootstrap(self, rid: str, room: int, token_ids: list[int], priority: int) -> tuple[int, str] | None:
        if self.refusal is None:
            self.taken[rid] = token_ids
        return self.refusal

    def begin_prompt(self, rid: str) -> Given:
        return Given(0)

    def close_path(self, link: str) -> None:
        assert link == "in"


TEXT = [5, 6, 7, 8]


def rebootstrap(instance: PrefillInstance, generation: int = 77, digest: bytes = messages.prompt_digest(TEXT)) -> None:
    """What a decode instance asks when it can't keep a request."""
    tokens = messages.pack_tokens(TEXT)
    again = messages.Rebootstrap(3, generation, len(TEXT), digest, first_page=1, tokens=tokens, priority=1)
    instance.frame("in", messages.encode(again), 0.0)
    instance.tick(0.0)


def test_what_is_to_be_computed_again_needs_no_request_and_goes_where_it_is_wanted() -> None:
    host = Takes()
    instance = prefill(host)
    rebootstrap(instance)
    [(rid, taken)] = host.taken.items()
    assert taken == TEXT
    instance.computing(rid, 0, 4, 0.0)
    instance.prompt_done(rid, 9, -0.5, [], 0, 0.0)
    assert [type(message) for message in host.sent] == [messages.SlotRequest, messages.Handoff]
    assert instance.stats()["rebootstraps_total"] == 1
    instance.frame("in", messages.encode(messages.Abort(3, 77, 499, "the client left")), 0.0)
    assert rid in host.failed and host.sent[-1] == messages.AbortAck(3, 77) and instance.stats()["rooms"] == 0


@pytest.mark.parametrize("why", ["no place", "in use", "claimed", "a second time", "not what was said"])
def test_what_cannot_be_computed_again_is_refused_in_words_and_harms_nobody(why: str) -> None:
    host = Takes()
    instance = prefill(host)
    words = "is in use by another request"
    if why == "no place":
        host.refusal, words = (429, "9 requests are waiting already"), "9 requests are waiting already"
    elif why == "in use":
        instance.submit(PrefillAsk("r", 3, 4, b"d"), 0.0)
    elif why == "claimed":
        instance.frame("in", messages.encode(messages.Claim(3, 1, 4, b"d")), 0.0)
    elif why == "a second time":
        rebootstrap(instance, generation=1)
    else:
        words = "have different prompts"
    rooms = instance.stats()["rooms"]
    rebootstrap(instance, digest=b"another" if why == "not what was said" else messages.prompt_digest(TEXT))
    abort, acknowledgement = host.sent[-2:]
    assert isinstance(abort, messages.Abort) and words in abort.reason and abort.generation == 77
    assert acknowledgement == messages.AbortAck(3, 77)
    assert instance.stats()["rooms"] == rooms and "r" not in host.failed


def test_the_end_of_a_link_ends_what_is_computed_again_for_it() -> None:
    host = Takes()
    instance = prefill(host)
    rebootstrap(instance)
    instance.link_down("in", "the peer has died", 0.0)
    assert list(host.failed) == list(host.taken) and instance.stats()["rooms"] == 0
    instance.check_integrity()
