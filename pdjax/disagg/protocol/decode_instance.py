"""A decode instance without its engine, network and memory: all that it decides about its rooms and links."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from pdjax.disagg.protocol import actions, decode_room, messages
from pdjax.disagg.protocol.asks import DECODE_COUNTERS, DecodeAsk
from pdjax.disagg.protocol.decode_room import DecodeRoom
from pdjax.disagg.protocol.hosts import DecodeHost
from pdjax.disagg.protocol.instance import Instance
from pdjax.disagg.protocol.path_tests import PathTests
from pdjax.disagg.protocol.prefill_room import Timeouts
from pdjax.disagg.protocol.quarantine import Quarantine
from pdjax.disagg.protocol.states import RoomState
from pdjax.disagg.protocol.timers import Timers, earliest
from pdjax.disagg.protocol.turns import Turns


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
class _Link:
    """A prefill instance: `registration` is None until the link stands; `awaiting` are the jobs that wait for it and
    for its data path to pass a test; `rooms` are those that hold something, by generation."""

    registration: messages.Registration | None = None
    awaiting: dict[int, _Job] = field(default_factory=dict)  # by room
    rooms: dict[int, DecodeRoom] = field(default_factory=dict)


class DecodeInstance(Instance[DecodeHost, DecodeRoom]):
    """Call what has happened, and it calls its host. `now` is in seconds of one clock that never goes back."""

    def __init__(self, host: DecodeHost, *, registration: messages.Registration, timeouts: Timeouts) -> None:
        super().__init__(host, timeouts=timeouts, counters=DECODE_COUNTERS)
        self._registration = registration
        self._early = registration.allocation == messages.EARLY
        self._page_bytes = registration.state.page_bytes
        self._ending: dict[int, DecodeRoom] = {}  # ended, with slots that may still be written to, by generation
        self._jobs: dict[int, _Job] = {}  # by room
        self._room_of: dict[str, int] = {}
        self._turns: Turns[_Job] = Turns()  # without pages
        self._timers: Timers[DecodeRoom] = Timers()
        self._links: dict[str, _Link] = {}
        self._paths = PathTests(timeouts.peer)
        self._quarantine = Quarantine()
        self._slot_queue: deque[tuple[DecodeRoom, int]] = deque()
        self._slots_out: Counter[str] = Counter()  # by peer
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
            self._feed(room, decode_room.Waits(f"the prompt of {ask.follows}, which is the same", bound), now)
        else:
            self._wait_for_pages(job, now)

    def cancel(self, rid: str, reason: str, now: float) -> None:
        """A request's client has gone."""
        number = self._room_of.get(rid)
        job = self._drop_job(number, now) if number is not None else None
        if job is not None:
            self._feed(job.room, decode_room.Cancel(499, f"the decode request was aborted: {reason}"), now)

    def tick(self, now: float) -> float | None:
        """Fire what is due, reserve pages, beat. Returns when to call again at the latest."""
        at = self._timers.next
        if at is not None and at <= now:
            for room in self._timers.due(now):
                self._feed(room, decode_room.Tick(), now)
        while self._turns:
            job = self._turns.first
            # A room that was claimed before has asked for all of its pages.
            filled = self._host.reserve(job.ask.rid, share=self._early)
            if filled is None:
                break
            self._turns.discard(job.ask.rid)
            job.has_pages, job.first_page = True, filled
            self._reserved(job, now)
        if self._pulse.due is not None and now >= self._pulse.due:
            self._beat(now)
        if self._paths.next is not None and now >= self._paths.next:
            self._test_paths(now)
        at = earliest(earliest(self._timers.next, self._pulse.due), self._paths.next)
        if not self._quarantine.held:
            return at
        for link, host, port in self._quarantine.due(now):
            if link not in self._links:
                self._links[link] = _Link()
                self._host.connect(link, host, port)
        return earliest(at, self._quarantine.next)

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
        entry = self._links[link]
        entry.registration = peer
        self._pulse.up(link, now)
        self._host.say(f"linked to the prefill instance at {link}")
        self._come_back(link, entry, peer.instance, now)
        for job in entry.awaiting.values():
            self._feed(job.room, self._wait_for_test(link), now)
        self._test_path(link, self._paths.up(link, now))

    def link_failed(self, link: str, reason: str, now: float, *, gone: bool = False) -> None:
        """A link that was asked for did not come up. `gone`: nobody listens there any more."""
        self._drop_link(link, 503, f"no link to the prefill instance at {link}: {reason}", now, gone=gone)

    def link_down(self, link: str, reason: str, now: float, *, gone: bool = False) -> None:
        """A link has ended. `gone`: because the peer's process has."""
        self._drop_link(link, 502, f"the link to the prefill instance at {link} ended: {reason}", now, gone=gone)

    def frame(self, link: str, body: bytes, now: float) -> None:
        """A frame has come over a link."""
        entry = self._links.get(link)
        if entry is None:
            return
        message = self._hear(link, body, entry.rooms, now)
        if isinstance(message, messages.Refused):
            self._host.say(f"the prefill instance at {link} dropped a frame: {message.reason}")
        elif isinstance(message, messages.PathFailed):
            self._path_failed(link, f"it could not send: {message.reason}", now)
        elif isinstance(message, messages.PathTest):
            self.counters["refused_frames"] += 1
        elif message is not None:
            self._received(link, message, now)

    def landed(self, notice: messages.ChunkNotice, now: float, *, damaged: bool = False) -> None:
        """All of a chunk is in its slot; `damaged`: not as it was sent."""
        room = self._of_generation(notice.room, notice.generation)
        if room is None:
            return
        if damaged:
            self.counters["damaged_chunks"] += 1
            self._host.say(f"chunk {notice.chunk} of room {notice.room} arrived damaged")
            self._feed(room, decode_room.Damaged(notice), now)
            return
        if not room.state.final:
            self._host.landed(self._jobs[notice.room].ask.rid, notice)
        self.counters["received_chunks"] += 1
        self.counters["received_bytes"] += notice.nbytes
        self.counters["received_pages"] += notice.pages
        self._health.moved(now)
        if room.link is not None:
            self._paths.moved(room.link, now)
        self._feed(room, decode_room.Landed(notice), now)

    def slot_freed(self, now: float) -> None:
        """A slot that was given back can be taken only now."""
        self._grant_slots(now)

    def drained(self, id: int, now: float) -> None:
        """The transfer worker has run dry after a `drain`."""
        self._feed(self._drains.pop(id), decode_room.Drained(), now)

    def stats(self) -> dict[str, float]:
        """Gauges by name, and totals."""
        live = list(self._rooms.values())
        return self._totals() | {
            "rooms": len(live) + len(self._ending),
            "waiting_requests": len(self._turns),
            "bootstrap_requests": sum(room.state is RoomState.BOOTSTRAPPING for room in live),
            "transfer_requests": sum(room.generation is not None for room in live),
            "links": sum(link.registration is not None for link in self._links.values()),
            "staging_slots_wanted": len(self._slot_queue),
            "staging_slots_quarantined": sum(room.granted_slots for room in self._ending.values()),
        }

    def check_integrity(self) -> None:
        """Raise unless the books add up; call it when no request is live."""
        if self._jobs or len(self._turns) or self._rooms:
            raise AssertionError(f"rooms without a live request: {sorted(self._rooms)}, {sorted(self._jobs)}")

    def _wait_for_pages(self, job: _Job, now: float) -> None:
        self._want_pages(job)
        self._feed(job.room, decode_room.Waits("free pages", self._timeouts.alloc), now)

    def _want_pages(self, job: _Job) -> None:
        self._turns.push(job.ask.rid, job, priority=job.ask.priority, arrived=job.ask.arrived)

    def _reserved(self, job: _Job, now: float) -> None:
        """A request has its pages: find its prefill instance, or go on with the chunks that have asked for slots."""
        if self._early:
            self._meet(job, now)
            return
        self._feed(job.room, decode_room.PagesFound(), now)
        self._slot_queue.extend((job.room, chunk) for chunk in job.held)
        job.held = []
        self._grant_slots(now)

    def _meet(self, job: _Job, now: float) -> None:
        """Claim the room, now or when the link stands."""
        name = job.ask.link
        link = self._links.get(name)
        if link is None:
            link = self._links[name] = _Link()
            self._host.connect(name, job.ask.host, job.ask.port)
        if self._paths.passed(name):
            self._claim(job, name, link, now)
            return
        link.awaiting[job.ask.room] = job
        if link.registration is not None:
            self._feed(job.room, self._wait_for_test(name), now)
            return
        what = f"a link to the prefill instance at {name}"
        self._feed(job.room, decode_room.Waits(what, 2 * self._timeouts.link), now)

    def _claim(self, job: _Job, name: str, link: _Link, now: float) -> None:
        ask = job.ask
        generation = self._host.draw()
        link.rooms[generation] = job.room
        if len(link.rooms) == 1:
            self._pulse.busy(name, now)
        claim = decode_room.Reserved(
            name,
            generation,
            ask.prompt_tokens,
            ask.prompt_digest,
            ask.pages,
            has_pages=job.has_pages,
            first_page=job.first_page,
        )
        self._feed(job.room, claim, now)

    def _wait_for_test(self, link: str) -> decode_room.Waits:
        what = f"a test message from the prefill instance at {link} over the data path"
        return decode_room.Waits(what, 2 * self._timeouts.peer)

    def _test_paths(self, now: float) -> None:
        due = self._paths.due(now)
        for link, number in due.tests:
            self._test_path(link, number)
        for link in due.overdue:
            self._path_failed(link, f"no test message came within {self._timeouts.peer:g} s", now)

    def _test_path(self, link: str, number: int) -> None:
        self.counters["path_tests"] += 1
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
            entry = self._links[link]
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

    def _come_back(self, link: str, entry: _Link, instance: int, now: float) -> None:
        """A prefill instance is there again. If it is the same process, it says what has become of its writes; if it is
        another one in its place, the first has ended."""
        held = self._quarantine.take(link)
        if held is None:
            return
        for generation, room in held.rooms.items():
            if held.instance != instance:
                self._feed(room, decode_room.PeerGone(), now)
            elif not room.closed:
                entry.rooms[generation] = room
                self._feed(room, decode_room.Relinked(link), now)
        if entry.rooms:
            self._pulse.busy(link, now)

    def _drop_link(self, link: str, status: int, reason: str, now: float, *, gone: bool) -> None:
        """Fail the rooms of a link that is gone or never stood; the next request makes a new one."""
        entry = self._links.pop(link, None)
        self._pulse.down(link)
        self._paths.down(link)
        if gone:
            held = self._quarantine.take(link)
            for room in held.rooms.values() if held is not None else ():
                self._feed(room, decode_room.PeerGone(), now)
        if entry is None:
            return
        for job in entry.awaiting.values():
            self._feed(job.room, decode_room.Cancel(status, reason), now)
        rooms = dict(entry.rooms)
        # Workers outlive their leader by a moment, in which they may still write.
        gone = gone and (entry.registration is None or entry.registration.processes == 1)
        for room in rooms.values():
            self._feed(room, decode_room.LinkLost(reason, gone), now)
        if not gone and entry.registration is not None:
            unsure = {generation: room for generation, room in rooms.items() if room.granted_slots}
            if unsure:
                self._quarantine.put(link, entry.registration.instance, unsure, now)
                self._host.say(f"{len(unsure)} rooms' staging slots are in quarantine: {reason}")

    def _received(self, link: str, message: messages.RoomMessage, now: float) -> None:
        room = self._of_generation(message.room, message.generation)
        if room is None:
            return
        job = self._jobs.get(message.room) if not room.state.final else None
        if job is not None and not job.met:
            job.met = now
        self._feed(room, decode_room.Received(link, message), now)
        if job is not None and not job.has_pages and isinstance(message, messages.Handoff) and not room.state.final:
            self._want_pages(job)

    def _of_generation(self, number: int, generation: int) -> DecodeRoom | None:
        room = self._rooms.get(number)
        if room is None or room.generation != generation:
            room = self._ending.get(generation)
        return room

    def _feed(self, room: DecodeRoom, event: decode_room.Event, now: float) -> None:
        for action in room.handle(event, now):
            self._perform(room, action, now)
        if room.closed:
            return
        if room.state.final and room.generation is not None:
            self._ending[room.generation] = room
        self._timers.watch(room)

    def _perform(self, room: DecodeRoom, action: actions.Action, now: float) -> None:
        match action:
            case actions.Send(link, message):
                self._host.send(link, messages.encode(message))
            case actions.GrantSlot(chunk):
                job = self._jobs[room.room]
                if job.has_pages:
                    self._slot_queue.append((room, chunk))
                    self._grant_slots(now)
                else:
                    job.held.append(chunk)
            case actions.Scatter(chunk, slot, first_page, pages):
                self._host.scatter(self._jobs[room.room].ask.rid, slot, first_page, pages)
                self._feed(room, decode_room.Scattered(chunk), now)
            case actions.FreeSlot(slot):
                self._slots_out[room.peer] -= 1
                self._host.free_slot(slot)
                self._grant_slots(now)
            case actions.StartDecode(handoff, prompt):
                self.counters["completed_rooms"] += 1
                self._leave(room)
                job = self._drop_job(room.room, now, served=True)
                assert job is not None, "a room that succeeds has a request"
                self._host.start(job.ask.rid, handoff, prompt, job.met)
            case actions.Fail(status, reason):
                self.counters["failed_rooms"] += 1
                claimed = room.generation is not None
                self.counters["transfer_failed_rooms" if claimed else "bootstrap_failed_rooms"] += 1
                self._leave(room)
                job = self._drop_job(room.room, now)
                if job is not None:
                    self._host.fail(job.ask.rid, status, reason)
            case actions.Drain():
                self._drained += 1
                self._drains[self._drained] = room
                self._host.drain(self._drained)
            case actions.Close():
                self._leave(room)
                self._close(room)
            case _:
                raise TypeError(f"a decode room does not {type(action).__name__}")

    def _close(self, room: DecodeRoom) -> None:
        if room.generation is None:
            return
        self._ending.pop(room.generation, None)
        link = self._links.get(room.link) if room.link is not None else None
        if link is not None:
            link.rooms.pop(room.generation, None)

    def _grant_slots(self, now: float) -> None:
        """Give free slots to the chunks that wait, oldest first."""
        queue, passed_over = self._slot_queue, []
        while queue:
            room, chunk = queue.popleft()
            if room.state.final:
                continue
            if self._is_last_slot_for_others(room.peer):
                passed_over.append((room, chunk))
                continue
            slot = self._host.take_slot()
            if slot is None:
                queue.appendleft((room, chunk))
                break
            self._slots_out[room.peer] += 1
            self._feed(room, decode_room.SlotFound(chunk, slot), now)
        queue.extendleft(reversed(passed_over))

    def _is_last_slot_for_others(self, peer: str) -> bool:
        """With several peers, the last free slot is for one that has none: a peer that hangs must not keep them all."""
        if len(self._links) < 2 or not self._slots_out[peer]:
            return False
        return self._slots_out.total() + 1 >= self._registration.slots > 1

    def _drop_job(self, number: int, now: float, *, served: bool = False) -> _Job | None:
        job = self._jobs.pop(number, None)
        if job is not None:
            self._let_go(job.followers, now, served=served)
            del self._room_of[job.ask.rid]
            self._turns.discard(job.ask.rid)
            link = self._links.get(job.ask.link)
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

    def _rooms_on(self, link: str) -> dict[int, DecodeRoom]:
        return self._links[link].rooms

    def _give_up(self, link: str, sentence: str, now: float) -> None:
        reason = f"the link to the prefill instance at {link} is given up: {sentence}"
        self._host.say(reason)
        self._host.close(link)
        self._drop_link(link, 502, reason, now, gone=False)
