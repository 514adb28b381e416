"""A prefill instance without its engine, network and memory: all that it decides about its rooms and links."""

from __future__ import annotations

from collections import deque

import msgspec

from pdjax.disagg.protocol import messages
from pdjax.disagg.protocol.actions import Action, Fail, StartPrefill, Succeed, Transfer
from pdjax.disagg.protocol.asks import FIRST_OF_ALL, PREFILL_COUNTERS, PrefillAsk
from pdjax.disagg.protocol.hosts import PrefillHost
from pdjax.disagg.protocol.instance import Instance
from pdjax.disagg.protocol.prefill_room import PrefillRoom, PromptDone, Timeouts
from pdjax.disagg.protocol.pulse import Peer
from pdjax.disagg.protocol.states import BOOTSTRAPPING
from pdjax.disagg.protocol.timers import Timed
from pdjax.disagg.protocol.tombstones import Tombstones


class _Job:
    """A live request of this instance."""

    def __init__(self, ask: PrefillAsk) -> None:
        self.ask = ask
        self.started = 0.0
        self.computing = 0.0
        self.chunks = 0
        self.planned: list[int] = []  # chunks of the step that runs now
        self.dp_rank = 0  # that has its pages


class _Flight(msgspec.Struct, frozen=True):
    """A write on its way."""

    room: PrefillRoom
    slot: int


class _Peer(Peer[PrefillRoom]):
    """A decode instance on a link, with the rooms that it has claimed."""

    def __init__(self, slot_pages: int = 0, slots: int = 0, dp: int = 0) -> None:
        super().__init__()
        self.slot_pages = slot_pages  # that a chunk may have for it
        self.slots = slots
        self.dp = dp

    def has(self, grant: messages.SlotGrant) -> bool:
        """Whether it has what it grants."""
        return 0 <= grant.slot < self.slots and 0 <= grant.dp_rank < self.dp


class PrefillInstance(Instance[PrefillHost, PrefillRoom, _Job, _Peer]):
    """Call what has happened, and it calls its host. `now` is in seconds of one clock that never goes back."""

    def __init__(self, host: PrefillHost, *, registration: messages.Registration, timeouts: Timeouts) -> None:
        super().__init__(host, timeouts=timeouts, counters=PREFILL_COUNTERS)
        self._registration = registration
        self._page_bytes = registration.state.page_bytes
        # Under `prefill_complete` the decode side looks for pages only once the prompt is computed.
        self._hold = timeouts.alloc if registration.allocation == messages.PREFILL_COMPLETE else 0.0
        self._computing: dict[str, int] = {}  # priorities of the prompts that have their pages
        self._tombstones = Tombstones(timeouts.bootstrap)
        self._pending: deque[tuple[PrefillRoom, Transfer]] = deque()
        self._flights: dict[int, _Flight] = {}
        self._path_tests: dict[int, str] = {}  # links that are tested, by write
        self._writes = 0

    def submit(self, ask: PrefillAsk, now: float) -> None:
        """A request has come."""
        if ask.room in self._jobs:
            self._host.fail(ask.rid, 400, f"room {ask.room} is in use by another request")
            return
        self._tombstones.take(ask.room, ask.prompt_digest, now)
        self._jobs[ask.room] = _Job(ask)
        self._room_of[ask.rid] = ask.room
        room = self._room(ask.room)
        self._do(room, room.requested(ask.prompt_tokens, ask.prompt_digest, now), now)

    def cancel(self, rid: str, reason: str, now: float) -> None:
        """A request's client has gone."""
        number = self._room_of.get(rid)
        if number is not None:
            self._drop_job(number)
            room = self._rooms[number]
            self._do(room, room.cancel(499, f"the prefill request was aborted: {reason}"), now)

    def computing(self, rid: str, first_page: int, end_page: int, now: float) -> None:
        """A step that computes these pages of a prompt is about to run: ask for slots meanwhile."""
        job = self._jobs[self._room_of[rid]]
        job.computing = job.computing or now
        self._plan_chunks(job, first_page, end_page, now)

    def computed(self, rid: str, now: float) -> None:
        """The pages of that step are computed."""
        self._send_planned(self._jobs[self._room_of[rid]], now)

    def prompt_done(
        self,
        rid: str,
        token: int,
        logprob: float,
        top: list[tuple[int, float]],
        cached_tokens: int,
        now: float,
        *,
        prompt_logprobs: list[float | None] | None = None,
        prompt_top: list[list[tuple[int, float]]] | None = None,
    ) -> None:
        """The last step of a prompt has run and has picked the first token. The decode side is also told what is known
        of the prompt's own tokens."""
        number = self._room_of[rid]
        job = self._jobs[number]
        self._computing.pop(rid, None)
        self._send_planned(job, now)
        done = PromptDone(
            token,
            logprob,
            job.computing - job.started,
            now - job.computing,
            cached_tokens,
            top,
            prompt_logprobs or [],
            prompt_top or [],
        )
        room = self._rooms[number]
        self._do(room, room.prompt_done(done, now), now)

    def link_up(self, link: str, hello: bytes, now: float) -> None:
        """A decode instance has linked to this one."""
        try:
            peer = messages.decode_registration(hello)
            if peer.role == messages.CHECK:
                self._host.close(link)
                return
            problem = messages.mismatch(self._registration, peer) or self._host.open_path(link, peer)
        except messages.ProtocolError as error:
            peer, problem = None, str(error)
        if peer is None or problem is not None:
            self.counters["refused_links"] += 1
            self._host.say(f"a decode instance was refused: {problem}")
            self._host.close(link)
            return
        slot_pages = min(peer.slot_pages, self._registration.slot_pages)
        self._peers[link] = _Peer(slot_pages=slot_pages, slots=peer.slots, dp=peer.layout.dp)

    def link_down(self, link: str, reason: str, now: float) -> None:
        """A link has ended."""
        self._drop_link(link, f"the link to the decode instance ended: {reason}", now)

    def path_lost(self, link: str, cause: str, now: float) -> None:
        """Without a data path the link is no use: both sides start over."""
        self._lose_path(link, f"the path to the decode instance is gone: {cause}", now)

    def _lose_path(self, link: str, reason: str, now: float) -> None:
        self._host.say(reason)
        peer = self._peers.get(link)
        for room in list(peer.rooms.values()) if peer is not None else []:
            self._do(room, room.cancel(502, reason), now)
        self._host.close(link)
        self._drop_link(link, reason, now)

    def write_ended(self, id: int, error: str | None, now: float) -> None:
        """A write is over; `error` says why it failed."""
        tested = self._path_tests.pop(id, None)
        if tested is not None:
            if error is None:
                self._health.moved(now)
            elif tested in self._peers:
                self._host.send(tested, messages.encode(messages.PathFailed(error)))
                self._path_failed(tested, error, now)
            return
        flight = self._flights.pop(id)
        if error is None:
            self._health.moved(now)
        self._host.free_slot(flight.slot)
        self._do(flight.room, flight.room.write_ended(error, now), now)
        self._start_writes(now)

    def stats(self) -> dict[str, float]:
        """Gauges by name, and totals."""
        live = list(self._rooms.values())
        return self._totals() | {
            "rooms": len(live) + len(self._ending),
            "waiting_requests": len(self._turns.waiting),
            "bootstrap_requests": sum(room.state is BOOTSTRAPPING for room in live),
            "inflight_requests": sum(room.computed for room in live),
            "links": len(self._peers),
            "writes_in_flight": len(self._flights),
        }

    def check_integrity(self) -> None:
        """Raise unless the books add up; call it when no request is live."""
        if self._jobs or len(self._turns.waiting) or self._computing:
            raise AssertionError(f"rooms without a live request: {sorted(self._jobs)}, {sorted(self._computing)}")

    def _room(self, number: int) -> PrefillRoom:
        room = self._rooms.get(number)
        if room is None:
            room = self._rooms[number] = PrefillRoom(number, self._timeouts, hold=self._hold)
        return room

    def _test_path(self, link: str, number: int, now: float) -> None:
        self._writes += 1
        self._path_tests[self._writes] = link
        self._host.test_path(self._writes, link, number, now + self._timeouts.peer)

    def _path_failed(self, link: str, cause: str, now: float) -> None:
        self.counters["failed_path_tests"] += 1
        reason = f"the path to a decode instance failed its test: {cause}"
        self._health.failed(reason, now)
        self._lose_path(link, reason, now)

    def _claimed(self, link: str, peer: _Peer, claim: messages.Claim, now: float) -> None:
        if claim.room not in self._rooms:
            ended = self._tombstones.take(claim.room, claim.prompt_digest, now)
            if ended is not None:
                self._refuse(link, claim, ended.status, ended.reason)
                return
        room = self._room(claim.room)
        if room.generation is None:
            peer.rooms[claim.generation] = room
            if len(peer.rooms) == 1:
                self._busy(peer, now)
        self._do(room, room.received(link, claim, now), now)

    def _rebootstrap(self, link: str, peer: _Peer, claim: messages.Rebootstrap, now: float) -> None:
        """Both halves of a room in one: its request is made here."""
        rid, token_ids = f"rebootstrap-{claim.room}-{claim.generation}", messages.unpack_tokens(claim.tokens)
        refused: tuple[int, str] | None
        if claim.room in self._rooms:
            refused = 409, f"room {claim.room} is in use by another request"
        else:
            refused = self._host.rebootstrap(rid, claim.room, token_ids, claim.priority)
        if refused is not None:
            self._refuse(link, claim, *refused)
            return
        self.counters["rebootstraps"] += 1
        digest = messages.prompt_digest(token_ids)
        self.submit(PrefillAsk(rid, claim.room, len(token_ids), digest, claim.priority, FIRST_OF_ALL), now)
        self._claimed(link, peer, claim, now)

    def _refuse(self, link: str, claim: messages.Claim, status: int, reason: str) -> None:
        for message in (
            messages.Abort(claim.room, claim.generation, status, reason),
            messages.AbortAck(claim.room, claim.generation),
        ):
            self._host.send(link, messages.encode(message))

    def _received(self, link: str, peer: _Peer, message: messages.RoomMessage, now: float) -> None:
        if type(message) is messages.Claim:
            self._claimed(link, peer, message, now)
            return
        if type(message) is messages.Rebootstrap:
            self._rebootstrap(link, peer, message, now)
            return
        if type(message) is messages.SlotGrant and not peer.has(message):
            self._refuse_frame(link, f"a slot that is not there was granted: {message}")
            return
        room = self._rooms.get(message.room)
        if room is None or room.generation != message.generation:
            room = self._ending.get(message.generation)
        if room is not None:
            self._do(room, room.received(link, message, now), now)
        elif isinstance(message, messages.Abort):
            acknowledgement = messages.AbortAck(message.room, message.generation)
            self._host.send(link, messages.encode(acknowledgement))

    def _told(self, link: str, message: messages.Refused | messages.PathTest | messages.PathFailed, now: float) -> None:
        if isinstance(message, messages.Refused):
            self._host.say(f"a decode instance dropped a frame: {message.reason}")
        elif isinstance(message, messages.PathTest):
            self._test_path(link, message.number, now)
        else:
            self._path_failed(link, message.reason, now)

    def _fire(self, timed: Timed, now: float) -> None:
        if isinstance(timed, PrefillRoom):
            self._do(timed, timed.tick(now), now)
        else:
            self._beat(now)

    def _give_pages(self, now: float) -> None:
        """To claimed rooms: by priority, then in order; one prompt at a time among equals, so that each finds what the
        one before has cached."""
        while (job := self._turns.first) is not None:
            rid, own = job.ask.rid, job.ask.priority
            for priority in self._computing.values():
                if priority >= own:
                    return
            given = self._host.begin_prompt(rid)
            if given is None:
                return
            self._turns.discard(rid)
            self._computing[rid], job.dp_rank = own, given.dp_rank
            self._plan_chunks(job, 0, given.filled, now)
            self._send_planned(job, now)

    def _plan_chunks(self, job: _Job, first_page: int, end_page: int, now: float) -> None:
        room = self._rooms[job.ask.room]
        assert room.link is not None, "only a claimed room is prefilled"
        first, slot_pages = max(first_page, room.first_page), self._peers[room.link].slot_pages
        while first < end_page:
            chunk, pages = job.chunks, min(slot_pages, end_page - first)
            job.planned.append(chunk)
            job.chunks += 1
            self._do(room, room.chunk_planned(chunk, first, pages), now)
            first += pages

    def _send_planned(self, job: _Job, now: float) -> None:
        """The planned chunks are in their pages: each goes as soon as it has its slot."""
        if not job.planned:
            return
        planned, job.planned, room = job.planned, [], self._rooms[job.ask.room]
        for chunk in planned:
            self._do(room, room.chunk_computed(chunk), now)

    def _do(self, room: PrefillRoom, actions: list[Action], now: float) -> None:
        """What a room asks for after an event."""
        if actions:
            self._carry_out(room, actions, now)
        if room.closed:
            self._close(room)
        elif room.ended:
            if room.generation is not None:
                self._ending[room.generation] = room
        elif room.deadline < room.timer:
            self._timers.watch(room)

    def _perform(self, room: PrefillRoom, action: Action, now: float) -> None:
        match action:
            case StartPrefill():
                job = self._jobs[room.room]
                job.started = now
                self._turns.push(job.ask.rid, job, priority=job.ask.priority, arrived=job.ask.arrived)
            case Transfer():
                self._pending.append((room, action))
                self._start_writes(now)
            case Succeed():
                self._leave(room)
                dropped = self._drop_job(room.room)
                if dropped is not None:
                    self._host.finish(dropped.ask.rid)
            case Fail(status, reason):
                self._leave(room)
                unclaimed = room.awaits_claim
                if unclaimed is not None:
                    self._tombstones.put(room.room, unclaimed, status, reason, now)
                self.counters["failed_rooms"] += 1
                self.counters["transfer_failed_rooms" if room.met else "bootstrap_failed_rooms"] += 1
                dropped = self._drop_job(room.room)
                if dropped is not None:
                    self._host.fail(dropped.ask.rid, status, reason)
            case _:
                raise TypeError(f"a prefill room does not {type(action).__name__}")

    def _drop_job(self, number: int) -> _Job | None:
        job = self._jobs.pop(number, None)
        if job is not None:
            rid = job.ask.rid
            del self._room_of[rid]
            self._computing.pop(rid, None)
            self._turns.discard(rid)
        return job

    def _start_writes(self, now: float) -> None:
        """Gather and send what has a slot at both ends, oldest first."""
        while self._pending:
            room, transfer = self._pending[0]
            if room.ended or room.link is None:
                self._pending.popleft()
                continue
            slot = self._host.take_slot()
            if slot is None:
                return
            self._pending.popleft()
            self._write(room, room.link, transfer, slot, now)

    def _write(self, room: PrefillRoom, link: str, transfer: Transfer, slot: int, now: float) -> None:
        assert room.generation is not None, "only a claimed room has anything to send"
        job = self._jobs[room.room]
        self._writes += 1
        id = self._writes
        self._flights[id] = _Flight(room, slot)
        room.write_started()
        self.counters["sent_chunks"] += 1
        nbytes = transfer.pages * self._page_bytes
        self.counters["sent_bytes"] += nbytes
        notice = messages.ChunkNotice(
            room.room,
            room.generation,
            transfer.chunk,
            transfer.slot,
            transfer.first_page,
            transfer.pages,
            nbytes,
            source_dp_rank=job.dp_rank,
            destination_dp_rank=transfer.dp_rank,
        )
        self._host.write(id, link, slot, job.ask.rid, notice, now + self._timeouts.transfer)

    def _drop_link(self, link: str, reason: str, now: float) -> None:
        peer = self._peers.pop(link, None)
        self._host.close_path(link)
        for room in list(peer.rooms.values()) if peer is not None else ():
            self._do(room, room.link_lost(reason), now)

    def _give_up(self, link: str, sentence: str, now: float) -> None:
        reason = f"the link to the decode instance is given up: {sentence}"
        self._host.say(reason)
        self._host.close(link)
        self._drop_link(link, reason, now)
