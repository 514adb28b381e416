"""The decode role: reserve pages, claim rooms, take in what prefill instances send, and generate from there."""

from __future__ import annotations

import secrets
import sys
from collections import deque
from dataclasses import dataclass

from pdjax.disagg.protocol import actions, decode_room, messages
from pdjax.disagg.protocol.decode_room import DecodeRoom
from pdjax.disagg.protocol.prefill_room import Timeouts
from pdjax.disagg.protocol.states import next_deadline
from pdjax.disagg.timeline import RoomTimeline
from pdjax.engine.admission import WaitingQueue
from pdjax.engine.engine import Engine
from pdjax.engine.plan import PrefillStep
from pdjax.engine.request import OutputToken, Request
from pdjax.net.events import Frame, LinkDown, LinkFailed, LinkUp
from pdjax.net.network import Network
from pdjax.transfer.backend import Drained, Notice, PeerLost, TransferBackend, WriteDone, WriteFailed
from pdjax.transfer.staging import LandingRing


@dataclass
class _Job:
    """A request of this instance with its room."""

    request: Request
    room: DecodeRoom
    timeline: RoomTimeline


class Decode:
    """See `pdjax.engine.roles.Role`. Binds `DecodeRoom` machines to the engine, the network and the staging ring."""

    name = "decode"

    def __init__(
        self,
        engine: Engine,
        *,
        network: Network,
        backend: TransferBackend,
        ring: LandingRing,
        registration: messages.Registration,
        timeouts: Timeouts,
        link_timeout: float,
    ) -> None:
        self._engine = engine
        self._network = network
        self._backend = backend
        self._ring = ring
        self._registration = registration
        self._timeouts = timeouts
        self._link_timeout = link_timeout
        self._rooms: dict[int, DecodeRoom] = {}
        self._jobs: dict[int, _Job] = {}  # by room, until the prompt is here
        self._room_of: dict[str, int] = {}  # by request id
        self._waiting: WaitingQueue[_Job] = WaitingQueue(lambda job: job.request)  # without pages yet
        self._links: dict[str, bool] = {}  # by link: whether it stands, or is being made
        self._slot_queue: deque[tuple[DecodeRoom, int]] = deque()  # chunks that wait for a slot
        self._drains: dict[int, DecodeRoom] = {}
        self._drained = 0
        self._counters = dict.fromkeys(
            ("received_bytes", "received_chunks", "received_pages", "completed_rooms", "failed_rooms",
             "damaged_chunks", "refused_frames"), 0)  # fmt: skip

    def submit(self, request: Request) -> None:
        """The client's half of a room has come."""
        rendezvous = request.rendezvous
        if rendezvous is None:
            self._engine.fail(request, 400, "a decode instance needs bootstrap_room: send requests through a router")
            return
        if request.wants_prompt_logprobs:
            self._engine.fail(request, 400, messages.NO_PROMPT_LOGPROBS)
            return
        number = rendezvous.room
        if number in self._rooms:
            self._engine.fail(request, 400, f"room {number} is in use by another request")
            return
        room = DecodeRoom(number, self._timeouts, self._engine.spec.page_bytes)
        room.deadline = self._engine.clock() + self._timeouts.waiting
        self._rooms[number] = room
        self._room_of[request.rid] = number
        self._jobs[number] = _Job(request, room, RoomTimeline(request.arrived))
        self._waiting.push(self._jobs[number])

    def abort(self, request: Request, reason: str) -> None:
        """The client has gone."""
        number = self._room_of.get(request.rid)
        if number is not None:
            job = self._drop_job(number)
            assert job is not None, "a request with a room number has a job"
            self._feed(job.room, decode_room.Cancel(499, f"the decode request was aborted: {reason}"))

    def on_event(self, event: object) -> None:
        """Links, messages, landed chunks."""
        match event:
            case LinkUp():
                self._link_up(event)
            case LinkFailed(link, reason):
                self._drop_link(link, 503, f"no link to the prefill instance at {link}: {reason}")
            case LinkDown(link, reason):
                self._drop_link(link, 502, f"the link to the prefill instance at {link} ended: {reason}")
            case Frame(link, body):
                self._receive(link, body)
            case Notice(payload):
                self._landed(payload)
            case Drained(id):
                self._feed(self._drains.pop(id), decode_room.Drained())
            case PeerLost() | WriteDone() | WriteFailed():
                self._counters["refused_frames"] += 1
            case _:
                raise TypeError(f"a decode instance was sent {type(event).__name__}")

    def poll(self, now: float) -> float | None:
        """Reserve pages by priority, then in order of arrival; open links, fire due timers."""
        for room in list(self._rooms.values()):
            self._feed(room, decode_room.Tick())
        while self._waiting and self._engine.has_free_row():
            job = self._waiting.first
            request = job.request
            pages = self._engine.allocator.allocate(request.rid, self._engine.spec.pages(request.max_tokens))
            if pages is None:
                break
            request.pages = pages
            self._waiting.pop()
            job.timeline.reserved = now
            self._meet(job)
        return next_deadline(self._rooms.values())

    def prefilling(self, request: Request, step: PrefillStep) -> None:
        """A decode instance computes no prompt."""
        raise AssertionError("a decode instance was asked to prefill")

    def prefilled(self, request: Request, step: PrefillStep) -> None:
        """A decode instance computes no prompt."""
        raise AssertionError("a decode instance has prefilled")

    def prompt_done(self, request: Request, step: PrefillStep, token: OutputToken) -> None:
        """A decode instance computes no prompt."""
        raise AssertionError("a decode instance has prefilled")

    def stats(self) -> dict[str, float]:
        """Rooms, queues and what was received."""
        totals: dict[str, float] = {f"{name}_total": value for name, value in self._counters.items()}
        return totals | {
            "rooms": len(self._rooms),
            "waiting_requests": len(self._waiting),
            "links": sum(self._links.values()),
            "staging_slots_free": self._ring.free_slots,
            "staging_slots_wanted": len(self._slot_queue),
        }

    def check_integrity(self) -> None:
        """At rest no request has a room."""
        if self._jobs or self._waiting:
            raise AssertionError(f"rooms without a live request: {sorted(self._jobs)}")

    def _meet(self, job: _Job) -> None:
        """Claim the room, now or when the link stands."""
        link = _link_of(job.request)
        if link not in self._links:
            self._links[link] = False
            host, port = job.request.rendezvous.host, job.request.rendezvous.port  # type: ignore[union-attr]
            self._network.connect(link, host, port, self._link_timeout)
        elif self._links[link]:
            self._claim(job, link)

    def _claim(self, job: _Job, link: str) -> None:
        request = job.request
        self._feed(
            job.room,
            decode_room.Reserved(
                link=link,
                generation=secrets.randbits(63),
                prompt_tokens=request.prompt_tokens,
                prompt_digest=messages.prompt_digest(request.input_ids),
                pages=self._engine.spec.pages(request.prompt_tokens),
            ),
        )

    def _link_up(self, event: LinkUp) -> None:
        try:
            peer = messages.decode_registration(event.hello)
            problem = messages.mismatch(peer, self._registration)
        except messages.ProtocolError as error:
            problem = str(error)
        if problem is not None:
            self._drop_link(event.link, 502, f"the instances do not fit together: {problem}")
            return
        self._links[event.link] = True
        print(f"pdjax decode: linked to the prefill instance at {event.link}", file=sys.stderr, flush=True)
        for job in list(self._jobs.values()):
            if job.room.link is None and job.request.pages and _link_of(job.request) == event.link:
                self._claim(job, event.link)

    def _drop_link(self, link: str, status: int, reason: str) -> None:
        """Fail the rooms of a link that is gone or never stood; the next request makes a new one."""
        self._links.pop(link, None)
        self._network.close(link)  # whatever is left of it: its name must be free for the next attempt
        waiting_for_link = [
            job.room
            for job in self._jobs.values()
            if job.room.link is None and job.request.pages and _link_of(job.request) == link
        ]
        for room in waiting_for_link:
            self._feed(room, decode_room.Cancel(status, reason))
        for room in [room for room in self._rooms.values() if room.link == link]:
            self._feed(room, decode_room.LinkLost(reason))

    def _receive(self, link: str, body: bytes) -> None:
        try:
            message = messages.decode_message(body)
        except messages.ProtocolError as error:
            self._counters["refused_frames"] += 1
            print(f"pdjax decode: a frame was dropped: {error}", file=sys.stderr, flush=True)
            return
        room = self._rooms.get(message.room)
        if room is None:
            return
        job = self._jobs.get(message.room)
        if job is not None and not job.timeline.met:
            job.timeline.met = self._engine.clock()
        self._feed(room, decode_room.Received(link, message))

    def _landed(self, payload: bytes) -> None:
        try:
            notice = messages.decode_notice(payload)
        except messages.ProtocolError as error:
            self._counters["refused_frames"] += 1
            print(f"pdjax decode: a notice was dropped: {error}", file=sys.stderr, flush=True)
            return
        room = self._rooms.get(notice.room)
        if room is None:
            return
        if self._registration.verify and self._ring.checksum(notice.slot, notice.nbytes) != notice.checksum:
            self._counters["damaged_chunks"] += 1
            say = f"chunk {notice.chunk} of room {notice.room} arrived damaged"
            print(f"pdjax decode: {say}", file=sys.stderr, flush=True)
            self._feed(room, decode_room.Damaged(notice))
            return
        job = self._jobs.get(notice.room)
        if job is not None:
            job.timeline.landed(notice)
        self._counters["received_chunks"] += 1
        self._counters["received_bytes"] += notice.nbytes
        self._counters["received_pages"] += notice.pages
        self._feed(room, decode_room.Landed(notice))

    def _feed(self, room: DecodeRoom, event: decode_room.Event) -> None:
        for action in room.handle(event, self._engine.clock()):
            self._perform(room, action)

    def _perform(self, room: DecodeRoom, action: actions.Action) -> None:
        match action:
            case actions.Send(link, message):
                self._network.send(link, messages.encode(message))
            case actions.GrantSlot(chunk):
                self._slot_queue.append((room, chunk))
                self._grant_slots()
            case actions.Scatter(chunk, slot, first_page, pages):
                self._scatter(room, chunk, slot, first_page, pages)
            case actions.FreeSlot(slot):
                self._ring.free(slot)
                self._grant_slots()
            case actions.StartDecode(handoff):
                self._counters["completed_rooms"] += 1
                job = self._drop_job(room.room)
                assert job is not None, "a room that succeeds has a request"
                job.request.computed = job.request.prompt_tokens
                job.request.cached_tokens = handoff.cached_tokens
                job.request.timeline.update(job.timeline.summary(handoff))
                first = OutputToken(handoff.first_token, handoff.logprob, handoff.top)
                self._engine.start_decoding(job.request, first)
            case actions.Fail(status, reason):
                self._counters["failed_rooms"] += 1
                job = self._drop_job(room.room)
                if job is not None:
                    self._engine.fail(job.request, status, reason)
            case actions.Drain():
                self._drained += 1
                self._drains[self._drained] = room
                self._backend.drain(self._drained)
            case actions.Close():
                self._rooms.pop(room.room, None)
            case _:
                raise TypeError(f"a decode room does not {type(action).__name__}")

    def _scatter(self, room: DecodeRoom, chunk: int, slot: int, first_page: int, pages: int) -> None:
        runner = self._engine.runner
        destination = self._jobs[room.room].request.pages[first_page : first_page + pages]
        runner.pool = self._ring.scatter(slot, runner.pool, destination)
        self._feed(room, decode_room.Scattered(chunk))

    def _grant_slots(self) -> None:
        """Give free slots to the chunks that wait, oldest first."""
        while self._slot_queue:
            room, chunk = self._slot_queue[0]
            if room.state.final:
                self._slot_queue.popleft()
                continue
            slot = self._ring.take()
            if slot is None:
                return
            self._slot_queue.popleft()
            self._feed(room, decode_room.SlotFound(chunk, slot))

    def _drop_job(self, number: int) -> _Job | None:
        job = self._jobs.pop(number, None)
        if job is not None:
            del self._room_of[job.request.rid]
            self._waiting.discard(job)
        return job


def _link_of(request: Request) -> str:
    """Links are named by where their prefill leader listens."""
    assert request.rendezvous is not None, "only requests with a rendezvous are admitted"
    return f"{request.rendezvous.host}:{request.rendezvous.port}"
