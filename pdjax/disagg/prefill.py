"""The prefill role: compute prompts for decode instances, and send each prompt's pages to the one that claimed it."""

from __future__ import annotations

import sys
import time
from collections import deque
from dataclasses import dataclass, field

from pdjax.disagg.protocol import actions, messages, prefill_room
from pdjax.disagg.protocol.prefill_room import PrefillRoom, Timeouts
from pdjax.disagg.protocol.states import next_deadline
from pdjax.engine.admission import WaitingQueue
from pdjax.engine.engine import Engine
from pdjax.engine.plan import PrefillStep
from pdjax.engine.request import Finish, OutputToken, Request
from pdjax.net.events import Frame, LinkDown, LinkFailed, LinkUp
from pdjax.net.network import Network
from pdjax.transfer.backend import (
    Drained,
    Notice,
    PeerLost,
    TransferBackend,
    TransferError,
    Write,
    WriteDone,
    WriteFailed,
)
from pdjax.transfer.staging import REGION, SourceStaging


@dataclass
class _Job:
    """A request of this instance with its room."""

    request: Request
    room: int
    started: float = 0.0
    computing: float = 0.0
    chunks: int = 0
    planned: list[int] = field(default_factory=list)  # chunks of the step that runs now
    first: OutputToken | None = None


@dataclass(frozen=True)
class _Flight:
    """A write on its way."""

    room: PrefillRoom
    chunk: int
    slot: int


class Prefill:
    """See `pdjax.engine.roles.Role`. Binds `PrefillRoom` machines to the engine, the network and the backend."""

    name = "prefill"

    def __init__(
        self,
        engine: Engine,
        *,
        network: Network,
        backend: TransferBackend,
        staging: SourceStaging,
        registration: messages.Registration,
        timeouts: Timeouts,
    ) -> None:
        self._engine = engine
        self._network = network
        self._backend = backend
        self._staging = staging
        self._registration = registration
        self._timeouts = timeouts
        self._rooms: dict[int, PrefillRoom] = {}
        self._jobs: dict[int, _Job] = {}  # by room
        self._room_of: dict[str, int] = {}  # by request id
        self._waiting: WaitingQueue[_Job] = WaitingQueue(lambda job: job.request)  # claimed, without pages yet
        self._peers: dict[str, messages.Registration] = {}  # by link
        self._pending: deque[tuple[PrefillRoom, actions.Transfer, list[int]]] = deque()
        self._flights: dict[int, _Flight] = {}
        self._writes = 0
        self._counters = dict.fromkeys(("sent_bytes", "sent_chunks", "failed_rooms", "refused_frames"), 0)

    def submit(self, request: Request) -> None:
        """The client's half of a room has come."""
        rendezvous = request.rendezvous
        if rendezvous is None:
            self._engine.fail(request, 400, "a prefill instance needs bootstrap_room: send requests through a router")
            return
        if request.wants_prompt_logprobs:
            self._engine.fail(request, 400, messages.NO_PROMPT_LOGPROBS)
            return
        number = rendezvous.room
        if number in self._jobs:
            self._engine.fail(request, 400, f"room {number} is in use by another request")
            return
        self._jobs[number] = _Job(request, number)
        self._room_of[request.rid] = number
        digest = messages.prompt_digest(request.input_ids)
        self._feed(self._room(number), prefill_room.Requested(request.prompt_tokens, digest))

    def abort(self, request: Request, reason: str) -> None:
        """The client has gone."""
        number = self._room_of[request.rid]
        self._drop_job(number)
        self._feed(self._rooms[number], prefill_room.Cancel(499, f"the prefill request was aborted: {reason}"))

    def on_event(self, event: object) -> None:
        """Links, messages and the ends of writes."""
        match event:
            case LinkUp():
                self._link_up(event)
            case LinkDown(link, reason):
                self._drop_link(link, reason)
            case Frame(link, body):
                self._receive(link, body)
            case WriteDone(id):
                self._write_ended(id, None)
            case WriteFailed(id, cause):
                self._write_ended(id, cause)
            case PeerLost(peer, cause):
                self._peer_lost(peer, cause)
            case Notice() | Drained() | LinkFailed():
                self._counters["refused_frames"] += 1
            case _:
                raise TypeError(f"a prefill instance was sent {type(event).__name__}")

    def poll(self, now: float) -> float | None:
        """Give claimed rooms their pages, by priority, then in order; fire due timers."""
        for room in list(self._rooms.values()):
            self._feed(room, prefill_room.Tick())
        while self._waiting and self._engine.has_free_row():
            request = self._waiting.first.request
            if any(other.priority >= request.priority for other in self._engine.scheduler.prefilling):
                break  # one prompt at a time, so that each finds what the one before has cached
            if not self._engine.begin_prompt(request):
                break
            self._engine.scheduler.add_prefill(request)
            self._send_cached(self._waiting.pop())
        return next_deadline(self._rooms.values())

    def prefilling(self, request: Request, step: PrefillStep) -> None:
        """Ask for the slots that this step's pages will need, while it computes."""
        job = self._jobs[self._room_of[request.rid]]
        if not job.computing:
            job.computing = self._engine.clock()
        spec = self._engine.spec
        self._plan_chunks(job, step.start // spec.page_size, spec.pages(step.end))

    def prefilled(self, request: Request, step: PrefillStep) -> None:
        """Send the step's pages while the next one computes."""
        self._send_planned(self._jobs[self._room_of[request.rid]])

    def prompt_done(self, request: Request, step: PrefillStep, token: OutputToken) -> None:
        """Send the last pages and hand the request over."""
        job = self._jobs[self._room_of[request.rid]]
        job.first = token
        self.prefilled(request, step)
        now = self._engine.clock()
        self._feed(
            self._rooms[job.room],
            prefill_room.PromptDone(
                token.id,
                token.logprob,
                job.computing - job.started,
                now - job.computing,
                request.cached_tokens,
                token.top,
            ),
        )

    def stats(self) -> dict[str, float]:
        """Rooms, queues and what was sent."""
        totals: dict[str, float] = {f"{name}_total": value for name, value in self._counters.items()}
        return totals | {
            "rooms": len(self._rooms),
            "waiting_requests": len(self._waiting),
            "links": len(self._peers),
            "staging_slots_free": self._staging.free_slots,
            "writes_in_flight": len(self._flights),
        }

    def check_integrity(self) -> None:
        """At rest no request has a room, and a slot is out only for a write on its way."""
        if self._jobs or self._waiting:
            raise AssertionError(f"rooms without a live request: {sorted(self._jobs)}")

    def _plan_chunks(self, job: _Job, first_page: int, end: int) -> None:
        """Ask for the slots of pages [first_page, end)."""
        room = self._rooms[job.room]
        assert room.link is not None, "only a claimed room is prefilled"
        slot_pages = min(self._peers[room.link].slot_pages, self._registration.slot_pages)
        job.planned = []
        for first in range(first_page, end, slot_pages):
            job.planned.append(job.chunks)
            self._feed(room, prefill_room.ChunkPlanned(job.chunks, first, min(slot_pages, end - first)))
            job.chunks += 1

    def _send_planned(self, job: _Job) -> None:
        """The planned chunks are in their pages: each goes as soon as it has its slot."""
        for chunk in job.planned:
            self._feed(self._rooms[job.room], prefill_room.ChunkComputed(chunk))

    def _send_cached(self, job: _Job) -> None:
        """What the prefix cache had of the prompt needs no step, and goes first."""
        self._plan_chunks(job, 0, job.request.cached_tokens // self._engine.spec.page_size)
        self._send_planned(job)

    def _room(self, number: int) -> PrefillRoom:
        return self._rooms.setdefault(number, PrefillRoom(number, self._timeouts))

    def _link_up(self, event: LinkUp) -> None:
        try:
            peer = messages.decode_registration(event.hello)
            problem = messages.mismatch(self._registration, peer)
            if problem is not None:
                raise messages.ProtocolError(problem)
            self._backend.connect(event.link, peer.transfer)
        except (messages.ProtocolError, TransferError) as error:
            print(f"pdjax prefill: a decode instance was refused: {error}", file=sys.stderr, flush=True)
            self._network.close(event.link)
            return
        self._peers[event.link] = peer
        print(f"pdjax prefill: decode instance joined ({self._backend.path(event.link)})", file=sys.stderr, flush=True)

    def _receive(self, link: str, body: bytes) -> None:
        try:
            message = messages.decode_message(body)
        except messages.ProtocolError as error:
            self._counters["refused_frames"] += 1
            print(f"pdjax prefill: a frame was dropped: {error}", file=sys.stderr, flush=True)
            return
        if link not in self._peers:
            return
        room = self._room(message.room) if isinstance(message, messages.Claim) else self._rooms.get(message.room)
        if room is not None:
            self._feed(room, prefill_room.Received(link, message))
        elif isinstance(message, messages.Abort):
            acknowledgement = messages.AbortAck(message.room, message.generation)
            self._network.send(link, messages.encode(acknowledgement))

    def _feed(self, room: PrefillRoom, event: prefill_room.Event) -> None:
        for action in room.handle(event, self._engine.clock()):
            self._perform(room, action)

    def _perform(self, room: PrefillRoom, action: actions.Action) -> None:
        match action:
            case actions.Send(link, message):
                self._network.send(link, messages.encode(message))
            case actions.StartPrefill():
                job = self._jobs[room.room]
                job.started = self._engine.clock()
                self._waiting.push(job)
            case actions.Transfer():
                job = self._jobs[room.room]
                last = action.first_page + action.pages
                self._pending.append((room, action, job.request.pages[action.first_page : last]))
                self._start_writes()
            case actions.Succeed():
                job = self._drop_job(room.room)
                if job is not None:
                    assert job.first is not None, "a room that succeeds has computed its prompt"
                    self._engine.finish(job.request, Finish("length"), job.first)
            case actions.Fail(status, reason):
                self._counters["failed_rooms"] += 1
                job = self._drop_job(room.room)
                if job is not None:
                    self._engine.fail(job.request, status, reason)
            case actions.Close():
                self._rooms.pop(room.room, None)
            case _:
                raise TypeError(f"a prefill room does not {type(action).__name__}")

    def _drop_job(self, number: int) -> _Job | None:
        job = self._jobs.pop(number, None)
        if job is not None:
            del self._room_of[job.request.rid]
            self._waiting.discard(job)
        return job

    def _start_writes(self) -> None:
        """Gather and send what has a slot at both ends, oldest first."""
        while self._pending:
            room, transfer, pages = self._pending[0]
            if room.state.final or room.link is None:
                self._pending.popleft()
                continue
            slot = self._staging.take()
            if slot is None:
                return
            self._pending.popleft()
            nbytes = self._staging.gather(slot, self._engine.runner.pool, pages)
            self._writes += 1
            self._flights[self._writes] = _Flight(room, transfer.chunk, slot)
            self._feed(room, prefill_room.WriteStarted(transfer.chunk))
            self._counters["sent_chunks"] += 1
            self._counters["sent_bytes"] += nbytes
            self._backend.write(self._write(room, room.link, transfer, slot, nbytes))

    def _write(self, room: PrefillRoom, link: str, transfer: actions.Transfer, slot: int, nbytes: int) -> Write:
        assert room.generation is not None, "only a claimed room has anything to send"
        peer = self._peers[link]
        notice = messages.ChunkNotice(
            room.room, room.generation, transfer.chunk, transfer.slot, transfer.first_page, transfer.pages, nbytes,
            time.time(), self._staging.checksum(slot, nbytes) if self._registration.verify else None,
        )  # fmt: skip
        return Write(
            id=self._writes,
            peer=link,
            region=self._staging.region(slot),
            offset=0,
            peer_region=REGION,
            peer_offset=transfer.slot * peer.slot_pages * self._engine.spec.page_bytes,
            nbytes=nbytes,
            notice=messages.encode(notice),
            deadline=time.monotonic() + self._timeouts.transfer,
        )

    def _write_ended(self, id: int, error: str | None) -> None:
        flight = self._flights.pop(id)
        self._staging.free(flight.slot)
        self._feed(flight.room, prefill_room.WriteEnded(flight.chunk, error))
        self._start_writes()

    def _peer_lost(self, link: str, cause: str) -> None:
        """Without a data path the link is no use: both sides start over."""
        print(f"pdjax prefill: the path to a decode instance is gone: {cause}", file=sys.stderr, flush=True)
        for room in [room for room in self._rooms.values() if room.link == link]:
            self._feed(room, prefill_room.Cancel(502, f"the path to the decode instance is gone: {cause}"))
        self._network.close(link)
        self._drop_link(link, cause)

    def _drop_link(self, link: str, reason: str) -> None:
        self._peers.pop(link, None)
        self._backend.disconnect(link)
        for room in [room for room in self._rooms.values() if room.link == link]:
            self._feed(room, prefill_room.LinkLost(reason))
