"""A decode instance without its engine, network and memory: all that it decides about its rooms and links."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdjax.disagg.protocol import messages
from pdjax.disagg.protocol.actions import Action, Drain, Fail, FreeSlot, GrantSlot, Scatter, Send, StartDecode
from pdjax.disagg.protocol.asks import DECODE_COUNTERS, DecodeAsk
from pdjax.disagg.protocol.decode_room import DecodeRoom, Reserved
from pdjax.disagg.protocol.hosts import DecodeHost
from pdjax.disagg.protocol.instance import Instance
from pdjax.disagg.protocol.path_tests import PathTests
from pdjax.disagg.protocol.prefill_room import Timeouts
from pdjax.disagg.protocol.pulse import Peer
from pdjax.disagg.protocol.quarantine import Quarantine
from pdjax.disagg.protocol.slot_queue import SlotQueue
from pdjax.disagg.protocol.states import RoomState
from pdjax.disagg.protocol.timers import Timed


@dataclass
class _Job:
    """A request whose prompt is not here yet. `held`: chunks that ask for slots before the request has pages.
    `followers`: requests with the same prompt, which wait for it."""

    ask: DecodeAsk
    room: DecodeRoom
    has_pages: bool = False
    first_page: int = 0  # of its prompt's pages, the first that is not filled already
    met: float = 0.0
    held: list[int] = field(default_factory=list)
    followers: list[_Job] = field(default_factory=list)


@dataclass
class _Link(Peer[DecodeRoom]):
    """A prefill instance: `registration` is None until the link stands; `awaiting` are the jobs that wait for it and
    for its data path to pass a test."""

    registration: messages.Registration | None = None
    awaiting: dict[int, _Job] = field(default_factory=dict)  # by room


class DecodeInstance(Instance[DecodeHost, DecodeRoom, _Job, _Link]):
    """Call what has happened, and it calls its host. `now` is in seconds of one clock that never goes back."""

    def __init__(self, host: DecodeHost, *, registration: messages.Registration, timeouts: Timeouts) -> None:
        super().__init__(host, timeouts=timeouts, counters=DECODE_COUNTERS)
        self._registration = registration
        self._early = registration.allocation == messages.EARLY
        self._page_bytes = registration.state.page_bytes
        self._paths = PathTests(timeouts.peer)
        self._quarantine = Quarantine(timeouts.workers_end)
        self._slot_queue = SlotQueue(registration.slots)
        self._drains: dict[int, DecodeRoom] = {}
        self._drained = 0

    def submit(self, ask: DecodeAsk, now: float) -> None:
        """A request has come."""
        if ask.room in self._rooms:
            self._host.fail(ask.rid, 400, f"room {ask.room} is in use by another request")
            return
        room = DecodeRoom(ask.room, self._timeouts, self._page_bytes)
        job = _Job(ask, room)
        self._rooms[ask.room], self._jobs[ask.room], self._room_of[ask.rid] = room, job, ask.room
        first = self._jobs.get(self._room_of.get(ask.follows, -1))
        if not self._early:
            self._meet(job, now)
        elif first is not None:
            first.followers.append(job)
            bound = self._timeouts.alloc + self._timeouts.waiting
            self._wait(room, f"the prompt of {ask.follows}, which is the same", bound, now)
        else:
            self._wait_for_pages(job, now)

    def cancel(self, rid: str, reason: str, now: float) -> None:
        """A request's client has gone."""
        number = self._room_of.get(rid)
        job = self._drop_job(number, now) if number is not None else None
        if job is not None:
            self._do(job.room, job.room.cancel(499, f"the decode request was aborted: {reason}", now), now)

    def link_up(self, link: str, hello: bytes, now: float) -> None:
        """A link that was asked for stands."""
        try:
            peer = messages.decode_registration(hello)
            problem = messages.mismatch(peer, self._registration)
        except messages.ProtocolError as error:
            peer, problem = None, str(error)
        if peer is None or problem is not None:
            self._host.close(link)
            # A peer that fitted before and does not now is another process in its place.
            sentence = f"the instances do not fit together: {problem}"
            self._drop_link(link, 502, sentence, now, gone=peer is not None)
            return
        entry = self._peers[link]
        entry.registration = peer
        self._host.say(f"linked to the prefill instance at {link}")
        self._come_back(link, entry, peer.instance, now)
        for job in entry.awaiting.values():
            self._wait_for_test(job, link, now)
        self._test_path(link, self._paths.up(link, now))

    def link_failed(self, link: str, reason: str, now: float, *, gone: bool = False) -> None:
        """A link that was asked for did not come up. `gone`: nobody listens there any more."""
        self._drop_link(link, 503, f"no link to the prefill instance at {link}: {reason}", now, gone=gone)

    def link_down(self, link: str, reason: str, now: float, *, gone: bool = False) -> None:
        """A link has ended. `gone`: because the peer's process has."""
        self._drop_link(link, 502, f"the link to the prefill instance at {link} ended: {reason}", now, gone=gone)

    def frame(self, link: str, body: bytes, now: float) -> None:
        """A frame has come over a link."""
        entry = self._peers.get(link)
        if entry is None:
            return
        message = self._hear(link, body, entry, now)
        if isinstance(message, messages.Message):
            self._received(link, message, now)
        elif isinstance(message, messages.Refused):
            self._host.say(f"the prefill instance at {link} dropped a frame: {message.reason}")
        elif isinstance(message, messages.PathFailed):
            self._path_failed(link, f"it could not send: {message.reason}", now)
        elif isinstance(message, messages.PathTest):
            self.counters["refused_frames"] += 1

    def landed(self, notice: messages.ChunkNotice, now: float, *, damaged: bool = False) -> None:
        """All of a chunk is in its slot; `damaged`: not as it was sent."""
        room = self._of_generation(notice.room, notice.generation)
        if room is None:
            return
        if damaged:
            self.counters["damaged_chunks"] += 1
            self._host.say(f"chunk {notice.chunk} of room {notice.room} arrived damaged")
            self._do(room, room.damaged(notice, now), now)
            return
        if not room.state.final:
            self._host.landed(self._jobs[notice.room].ask.rid, notice)
        self.counters["received_chunks"] += 1
        self.counters["received_bytes"] += notice.nbytes
        self.counters["received_pages"] += notice.pages
        self._health.moved(now)
        if room.link is not None:
            self._paths.moved(room.link, now)
        self._do(room, room.landed(notice, now), now)

    def slot_freed(self, now: float) -> None:
        """A slot that was given back can be taken only now."""
        self._grant_slots(now)

    def drained(self, id: int, now: float) -> None:
        """The transfer worker has run dry after a `drain`."""
        room = self._drains.pop(id)
        self._do(room, room.drained(), now)

    def stats(self) -> dict[str, float]:
        """Gauges by name, and totals."""
        live = list(self._rooms.values())
        return self._totals() | {
            "rooms": len(live) + len(self._ending),
            "waiting_requests": len(self._turns.waiting),
            "bootstrap_requests": sum(room.state is RoomState.BOOTSTRAPPING for room in live),
            "transfer_requests": sum(room.generation is not None for room in live),
            "links": sum(link.registration is not None for link in self._peers.values()),
            "staging_slots_wanted": len(self._slot_queue),
            "staging_slots_quarantined": sum(room.granted_slots for room in self._ending.values()),
        }

    def check_integrity(self) -> None:
        """Raise unless the books add up; call it when no request is live."""
        if self._jobs or len(self._turns.waiting) or self._rooms:
            raise AssertionError(f"rooms without a live request: {sorted(self._rooms)}, {sorted(self._jobs)}")

    def _wait_for_pages(self, job: _Job, now: float) -> None:
        self._want_pages(job)
        self._wait(job.room, "free pages", self._timeouts.alloc, now)

    def _wait(self, room: DecodeRoom, what: str, seconds: float, now: float) -> None:
        room.waits(what, seconds, now)
        self._timers.watch(room)

    def _want_pages(self, job: _Job) -> None:
        self._turns.push(job.ask.rid, job, priority=job.ask.priority, arrived=job.ask.arrived)

    def _fire(self, timed: Timed, now: float) -> None:
        if isinstance(timed, DecodeRoom):
            self._do(timed, timed.tick(now), now)
        elif timed is self._pulse:
            self._beat(now)
        elif timed is self._paths:
            self._test_paths(now)
        else:
            self._seek_lost_peers(now)

    def _give_pages(self, now: float) -> None:
        while (job := self._turns.first) is not None:
            # A room that was claimed before has asked for all of its pages.
            filled = self._host.reserve(job.ask.rid, share=self._early)
            if filled is None:
                return
            self._turns.discard(job.ask.rid)
            job.has_pages, job.first_page = True, filled
            self._reserved(job, now)

    def _reserved(self, job: _Job, now: float) -> None:
        """A request has its pages: find its prefill instance, or go on with the chunks that have asked for slots."""
        if self._early:
            self._meet(job, now)
            return
        job.room.pages_found(now)
        self._timers.watch(job.room)
        for chunk in job.held:
            self._slot_queue.push(job.room, chunk)
        job.held = []
        self._grant_slots(now)

    def _meet(self, job: _Job, now: float) -> None:
        """Claim the room, now or when the link stands."""
        name = job.ask.link
        link = self._peers.get(name)
        if link is None:
            link = self._peers[name] = _Link()
            self._host.connect(name, job.ask.host, job.ask.port)
        if self._paths.passed(name):
            self._claim(job, name, link, now)
            return
        link.awaiting[job.ask.room] = job
        if link.registration is not None:
            self._wait_for_test(job, name, now)
            return
        self._wait(job.room, f"a link to the prefill instance at {name}", 2 * self._timeouts.link, now)

    def _claim(self, job: _Job, name: str, link: _Link, now: float) -> None:
        ask = job.ask
        generation = self._host.draw()
        link.rooms[generation] = job.room
        if len(link.rooms) == 1:
            self._busy(link, now)
        claim = Reserved(
            name,
            generation,
            ask.prompt_tokens,
            ask.prompt_digest,
            ask.pages,
            has_pages=job.has_pages,
            first_page=job.first_page,
        )
        self._do(job.room, job.room.reserved(claim, now), now)

    def _wait_for_test(self, job: _Job, link: str, now: float) -> None:
        what = f"a test message from the prefill instance at {link} over the data path"
        self._wait(job.room, what, 2 * self._timeouts.peer, now)

    def _test_paths(self, now: float) -> None:
        due = self._paths.due(now)
        self._timers.watch(self._paths)
        for link, number in due.tests:
            self._test_path(link, number)
        for link in due.overdue:
            self._path_failed(link, f"no test message came within {self._timeouts.peer:g} s", now)

    def _test_path(self, link: str, number: int) -> None:
        self.counters["path_tests"] += 1
        self._timers.watch(self._paths)
        self._host.send(link, messages.encode(messages.PathTest(number)))

    def test_came(self, number: int, now: float) -> None:
        """A test message has come. A link whose data path works may be used by those who wait for it."""
        link = self._paths.link_of(number)
        if link is None:
            return
        right = not self._registration.verify or self._host.holds_test(number)
        again = self._paths.came(link, now, right=right)
        if again is not None:
            self._test_path(link, again)
        elif not right:
            self._path_failed(link, "what came is not what was sent", now)
        else:
            self._health.moved(now)
            entry = self._peers[link]
            awaiting, entry.awaiting = entry.awaiting, {}
            for job in awaiting.values():
                self._claim(job, link, entry, now)

    def _path_failed(self, link: str, cause: str, now: float) -> None:
        self.counters["failed_path_tests"] += 1
        reason = f"the path from the prefill instance at {link} failed its test: {cause}"
        self._health.failed(reason, now)
        self._host.say(reason)
        self._host.send(link, messages.encode(messages.PathFailed(cause)))
        self._host.close(link)
        self._drop_link(link, 502, reason, now, gone=False)

    def _seek_lost_peers(self, now: float) -> None:
        due = self._quarantine.due(now)
        self._timers.watch(self._quarantine)
        for room in due.rooms:
            self._do(room, room.peer_gone(), now)
        for link, host, port in due.links:
            if link not in self._peers:
                self._peers[link] = _Link()
                self._host.connect(link, host, port)

    def _come_back(self, link: str, entry: _Link, instance: int, now: float) -> None:
        """A prefill instance is there again. If it is the same process, it says what has become of its writes; if it is
        another one in its place, the first has ended."""
        for generation, room in self._quarantine.back(link, instance, now).items():
            if not room.closed:
                entry.rooms[generation] = room
                self._do(room, room.relinked(link, now), now)
        self._seek_lost_peers(now)
        if entry.rooms:
            self._busy(entry, now)

    def _drop_link(self, link: str, status: int, reason: str, now: float, *, gone: bool) -> None:
        """Fail the rooms of a link that is gone or never stood; the next request makes a new one."""
        entry = self._peers.pop(link, None)
        self._paths.down(link)
        if entry is not None:
            for job in entry.awaiting.values():
                self._do(job.room, job.room.cancel(status, reason, now), now)
            if entry.registration is not None:
                self._lose(link, entry.registration, dict(entry.rooms), reason, now, gone=gone)
        if gone:
            self._quarantine.gone(link, now)
            self._seek_lost_peers(now)

    def _lose(
        self,
        link: str,
        peer: messages.Registration,
        rooms: dict[int, DecodeRoom],
        reason: str,
        now: float,
        *,
        gone: bool,
    ) -> None:
        workers = peer.processes > 1
        for room in rooms.values():
            self._do(room, room.link_lost(reason, now, gone=gone and not workers), now)
        unsure = {generation: room for generation, room in rooms.items() if room.granted_slots}
        if unsure and (workers or not gone):
            self._quarantine.put(link, peer.instance, unsure, now, workers=workers)
            self._timers.watch(self._quarantine)
            self._host.say(f"{len(unsure)} rooms' staging slots are in quarantine: {reason}")

    def _received(self, link: str, message: messages.RoomMessage, now: float) -> None:
        room = self._of_generation(message.room, message.generation)
        if room is None:
            return
        job = self._jobs.get(message.room) if not room.state.final else None
        if job is not None and not job.met:
            job.met = now
        self._do(room, room.received(link, message, now), now)
        if job is not None and not job.has_pages and isinstance(message, messages.Handoff) and not room.state.final:
            self._want_pages(job)

    def _of_generation(self, number: int, generation: int) -> DecodeRoom | None:
        room = self._rooms.get(number)
        if room is None or room.generation != generation:
            room = self._ending.get(generation)
        return room

    def _do(self, room: DecodeRoom, actions: list[Action], now: float) -> None:
        """What a room asks for after an event."""
        for action in actions:
            if isinstance(action, Send):
                self._host.send(action.link, messages.encode(action.message))
            else:
                self._perform(room, action, now)
        if room.closed:
            self._close(room)
            return
        if room.state.final and room.generation is not None:
            self._ending[room.generation] = room
        if room.deadline < room.timer:
            self._timers.watch(room)

    def _perform(self, room: DecodeRoom, action: Action, now: float) -> None:
        match action:
            case GrantSlot(chunk):
                job = self._jobs[room.room]
                if job.has_pages:
                    self._slot_queue.push(room, chunk)
                    self._grant_slots(now)
                else:
                    job.held.append(chunk)
            case Scatter(slot, first_page, pages):
                self._host.scatter(self._jobs[room.room].ask.rid, slot, first_page, pages)
            case FreeSlot(slot):
                self._slot_queue.give_back(room)
                self._host.free_slot(slot)
                self._grant_slots(now)
            case StartDecode(handoff, prompt):
                self.counters["completed_rooms"] += 1
                self._leave(room)
                job = self._drop_job(room.room, now, served=True)
                assert job is not None, "a room that succeeds has a request"
                self._host.start(job.ask.rid, handoff, prompt, job.met)
            case Fail(status, reason):
                self.counters["failed_rooms"] += 1
                claimed = room.generation is not None
                self.counters["transfer_failed_rooms" if claimed else "bootstrap_failed_rooms"] += 1
                self._leave(room)
                job = self._drop_job(room.room, now)
                if job is not None:
                    self._host.fail(job.ask.rid, status, reason)
            case Drain():
                self._drained += 1
                self._drains[self._drained] = room
                self._host.drain(self._drained)
            case _:
                raise TypeError(f"a decode room does not {type(action).__name__}")

    def _grant_slots(self, now: float) -> None:
        """Give free slots to the chunks that wait."""
        while (place := self._slot_queue.turn(len(self._peers))) is not None:
            slot = self._host.take_slot()
            if slot is None:
                return
            room, chunk = self._slot_queue.take(place)
            self._do(room, room.slot_found(chunk, slot), now)

    def _drop_job(self, number: int, now: float, *, served: bool = False) -> _Job | None:
        job = self._jobs.pop(number, None)
        if job is not None:
            self._let_go(job.followers, now, served=served)
            del self._room_of[job.ask.rid]
            self._turns.discard(job.ask.rid)
            link = self._peers.get(job.ask.link)
            if link is not None:
                link.awaiting.pop(number, None)
        return job

    def _let_go(self, followers: list[_Job], now: float, *, served: bool) -> None:
        """The prompt that these have waited for is here, and is theirs too; or its room has failed, and the next of
        them takes its place."""
        waiting = [job for job in followers if self._jobs.get(job.ask.room) is job]
        if not served and waiting:
            waiting[0].followers = waiting[1:]
            waiting = waiting[:1]
        for job in waiting:
            self._wait_for_pages(job, now)

    def _give_up(self, link: str, sentence: str, now: float) -> None:
        reason = f"the link to the prefill instance at {link} is given up: {sentence}"
        self._host.say(reason)
        self._host.close(link)
        self._drop_link(link, 502, reason, now, gone=False)
