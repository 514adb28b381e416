"""A decode instance without its engine, network and memory: all that it decides about its rooms and links."""

from __future__ import annotations

from pdjax.disagg.protocol import messages
from pdjax.disagg.protocol.actions import Action, Drain, Fail, FreeSlot, GrantSlot, Scatter, StartDecode
from pdjax.disagg.protocol.asks import DecodeAsk
from pdjax.disagg.protocol.decode_links import DecodeLinks, Job, Link
from pdjax.disagg.protocol.decode_room import DecodeRoom
from pdjax.disagg.protocol.hosts import DecodeHost, Given
from pdjax.disagg.protocol.prefill_room import Timeouts
from pdjax.disagg.protocol.slot_queue import SlotQueue
from pdjax.disagg.protocol.states import BOOTSTRAPPING


class DecodeInstance(DecodeLinks):
    """Call what has happened, and it calls its host. `now` is in seconds of one clock that never goes back."""

    def __init__(self, host: DecodeHost, *, registration: messages.Registration, timeouts: Timeouts) -> None:
        super().__init__(host, registration=registration, timeouts=timeouts)
        self._early = registration.allocation == messages.EARLY
        self._page_bytes = registration.state.page_bytes
        self._slot_queue = SlotQueue(registration.slots)
        self._drains: dict[int, DecodeRoom] = {}
        self._drained = 0

    def submit(self, ask: DecodeAsk, now: float) -> None:
        """A request has come."""
        if ask.room in self._rooms:
            self._host.fail(ask.rid, 400, f"room {ask.room} is in use by another request")
            return
        room = DecodeRoom(ask.room, self._timeouts, self._page_bytes)
        job = Job(ask, room)
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

    def landed(self, notice: messages.ChunkNotice, now: float, *, damaged: bool = False) -> None:
        """All of a chunk is in its slot; `damaged`: not as it was sent."""
        room = self._of_generation(notice.room, notice.generation)
        if room is None:
            return
        if not room.ended:
            self._host.landed(self._jobs[notice.room].ask.rid, notice, damaged=damaged)
        if damaged:
            self.counters["damaged_chunks"] += 1
            self._host.say(f"chunk {notice.chunk} of room {notice.room} arrived damaged")
            self._do(room, room.damaged(notice, now), now)
            return
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

    def drained(self, id: int, now: float, *, error: str | None = None) -> None:
        """The transfer worker has run dry after a `drain`; or peers cannot be cut off, and the sentence says why."""
        room = self._drains.pop(id)
        if error is None:
            self._do(room, room.drained(), now)
        else:
            self._host.say(f"the staging slots of room {room.room} stay in quarantine: {error}")

    def stats(self) -> dict[str, float]:
        """Gauges by name, and totals."""
        live = list(self._rooms.values())
        return self._totals() | {
            "rooms": len(live) + len(self._ending),
            "waiting_requests": len(self._turns.waiting),
            "bootstrap_requests": sum(room.state is BOOTSTRAPPING for room in live),
            "transfer_requests": sum(room.generation is not None for room in live),
            "links": sum(link.registration is not None for link in self._peers.values()),
            "staging_slots_wanted": len(self._slot_queue),
            "staging_slots_quarantined": sum(room.granted_slots for room in self._ending.values()),
        }

    def check_integrity(self) -> None:
        """Raise unless the books add up; call it when no request is live."""
        if self._jobs or len(self._turns.waiting) or self._rooms:
            raise AssertionError(f"rooms without a live request: {sorted(self._rooms)}, {sorted(self._jobs)}")

    def _wait_for_pages(self, job: Job, now: float) -> None:
        self._want_pages(job)
        self._wait(job.room, "free pages", self._timeouts.alloc, now)

    def _want_pages(self, job: Job) -> None:
        self._turns.push(job.ask.rid, job, priority=job.ask.priority, arrived=job.ask.arrived)

    def _give_pages(self, now: float) -> None:
        while (job := self._turns.first) is not None:
            # A room that was claimed before has asked for all of its pages.
            given = self._host.reserve(job.ask.rid, share=self._early)
            if given is None:
                return
            self._turns.discard(job.ask.rid)
            job.pages = given
            if self._early:
                self._meet(job, now)
            else:
                self._go_on(job, given, now)

    def _go_on(self, job: Job, given: Given, now: float) -> None:
        """A claimed room has its pages: now for the chunks that have asked for slots."""
        job.room.pages_found(given.dp_rank, now)
        self._timers.watch(job.room)
        for chunk in job.held:
            self._slot_queue.push(job.room, chunk)
        job.held = []
        self._grant_slots(now)

    def _told(self, link: str, message: messages.Refused | messages.PathTest | messages.PathFailed, now: float) -> None:
        if isinstance(message, messages.Refused):
            self._host.say(f"the prefill instance at {link} dropped a frame: {message.reason}")
        elif isinstance(message, messages.PathFailed):
            self._path_failed(link, f"it could not send: {message.reason}", now)
        else:
            self.counters["refused_frames"] += 1

    def _received(self, link: str, peer: Link, message: messages.RoomMessage, now: float) -> None:
        room = self._of_generation(message.room, message.generation)
        if room is None:
            return
        job = self._jobs.get(message.room) if not room.ended else None
        if job is not None and not job.met:
            job.met = now
        self._do(room, room.received(link, message, now), now)
        if job is not None and job.pages is None and isinstance(message, messages.Handoff) and not room.ended:
            self._want_pages(job)

    def _of_generation(self, number: int, generation: int) -> DecodeRoom | None:
        room = self._rooms.get(number)
        if room is None or room.generation != generation:
            room = self._ending.get(generation)
        return room

    def _perform(self, room: DecodeRoom, action: Action, now: float) -> None:
        match action:
            case GrantSlot(chunk):
                job = self._jobs[room.room]
                if job.pages is not None:
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
                dropped = self._drop_job(room.room, now, served=True)
                assert dropped is not None, "a room that succeeds has a request"
                self._host.start(dropped.ask.rid, handoff, prompt, dropped.met)
            case Fail(status, reason):
                self.counters["failed_rooms"] += 1
                claimed = room.generation is not None
                self.counters["transfer_failed_rooms" if claimed else "bootstrap_failed_rooms"] += 1
                self._leave(room)
                dropped = self._drop_job(room.room, now)
                if dropped is not None:
                    self._host.fail(dropped.ask.rid, status, reason)
            case Drain(cut_off):
                self._drained += 1
                self._drains[self._drained] = room
                self._host.drain(self._drained, cut_off)
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

    def _drop_job(self, number: int, now: float, *, served: bool = False) -> Job | None:
        job = self._jobs.pop(number, None)
        if job is not None:
            self._let_go(job.followers, now, served=served)
            del self._room_of[job.ask.rid]
            self._turns.discard(job.ask.rid)
            link = self._peers.get(job.ask.link)
            if link is not None:
                link.awaiting.pop(number, None)
        return job

    def _let_go(self, followers: list[Job], now: float, *, served: bool) -> None:
        """The prompt that these have waited for is here, and is theirs too; or its room has failed, and the next of
        them takes its place."""
        waiting = [job for job in followers if self._jobs.get(job.ask.room) is job]
        if not served and waiting:
            waiting[0].followers = waiting[1:]
            waiting = waiting[:1]
        for job in waiting:
            self._wait_for_pages(job, now)
