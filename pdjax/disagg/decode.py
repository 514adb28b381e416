"""The decode role: reserve pages, claim rooms, take in what prefill instances send, and generate from there."""

from __future__ import annotations

import secrets
import sys
import time

from pdjax.disagg import orders
from pdjax.disagg.admission import Admission
from pdjax.disagg.alone import Alone
from pdjax.disagg.link_names import LinkNames
from pdjax.disagg.orders import Drain, Dry, NoticeRefused, PathTested, PieceLanded, ScatterChunk, SlotEmptied, ZeroPages
from pdjax.disagg.pieces import Arrival, LandingBook, PieceError, Tally, TestBook
from pdjax.disagg.protocol import messages
from pdjax.disagg.protocol.asks import FIRST_OF_ALL, DecodeAsk
from pdjax.disagg.protocol.decode_instance import DecodeInstance
from pdjax.disagg.protocol.hosts import Given
from pdjax.disagg.protocol.prefill_room import Timeouts
from pdjax.disagg.protocol.timers import NEVER
from pdjax.disagg.protocol.topology import FOLLOW_BOOTSTRAP_ROOM, dp_rank_of
from pdjax.disagg.receiver import Receiver
from pdjax.disagg.timeline import RoomTimeline
from pdjax.engine.engine import Engine
from pdjax.engine.orders import RoleOrder, RoleReport
from pdjax.engine.plan import PrefillStep
from pdjax.engine.request import OutputToken, Request
from pdjax.net.events import Frame, LinkDown, LinkFailed, LinkUp, NetEvent
from pdjax.net.network import Network
from pdjax.transfer.backend import Drained, Notice, PeerLost, WriteDone, WriteFailed
from pdjax.transfer.staging import Slots, pool_pages
from pdjax.wire import Rendezvous


class Decode:
    """See `pdjax.engine.roles.Role`. Binds a `DecodeInstance` to the engine, the network and the instance's receivers.

    Args:
        receiver: of this process, the leader's.
        processes: of this instance; all but this one are told by the engine's orders what to scatter.
    """

    name = "decode"

    def __init__(
        self,
        engine: Engine,
        *,
        network: Network,
        receiver: Receiver,
        slots: Slots,
        processes: int,
        registration: messages.Registration,
        timeouts: Timeouts,
        dp_policy: str = FOLLOW_BOOTSTRAP_ROOM,
    ) -> None:
        self._engine = engine
        self._network = network
        self._links = LinkNames()
        self._receiver = receiver
        self._slots = slots
        self._processes = processes
        self._layout = registration.layout
        self._state = registration.state
        self._dp_policy = dp_policy
        self._book = LandingBook(registration.state, registration.layout)
        self._arrived: dict[int, Arrival] = {}  # the chunk that the instance is being told of, by slot
        self._tests = TestBook(len({rank.transfer for rank in registration.ranks}))
        self._draining = Tally()  # over the processes
        self._emptying = Tally()  # slots that some process has yet to copy out, over the processes
        self._free_when_empty: set[int] = set()
        self._link_timeout = timeouts.link
        self._admission = Admission(engine, self._compute_again)
        self._alone = Alone(self._begin)
        self._timelines: dict[str, RoomTimeline] = {}  # by request id, until the prompt is here
        self._instance = DecodeInstance(self, registration=registration, timeouts=timeouts)

    # What the engine asks of a role

    def submit(self, request: Request) -> None:
        """The client's half of a room has come."""
        if request.rendezvous is None:
            self._engine.fail(request, 400, "a decode instance needs bootstrap_room: send requests through a router")
        elif request.alone:
            self._alone.push(request)
        else:
            try:
                room = request.rendezvous.room
                request.wanted_rank = dp_rank_of(room, self._layout, request.wanted_rank, self._dp_policy)
            except ValueError as error:
                self._engine.fail(request, 400, f"data_parallel_rank: {error}")
                return
            self._open_room(request, request.rendezvous, request.arrived, follows=request.sample_of)

    def _compute_again(self, request: Request) -> None:
        """A request has lost its pages: its prefill instance computes them again, in another room of the same
        number."""
        if request.alone:
            self._alone.push(request)
            return
        assert request.rendezvous is not None, "only requests with a room are let in"
        self._open_room(request, request.rendezvous, self._engine.clock())

    def _open_room(self, request: Request, rendezvous: Rendezvous, begun: float, *, follows: str = "") -> None:
        """Of a request that has tokens already, the prefill side knows nothing: the claim brings all of them."""
        ids, tokens = request.prefill_ids, b""
        if request.output_ids:
            if len(ids) > messages.MOST_TOKENS:
                self.fail(request.rid, 503, f"it has {len(ids)} tokens, and a message takes {messages.MOST_TOKENS}")
                return
            tokens = messages.pack_tokens(ids)
        self._timelines[request.rid] = RoomTimeline(begun)
        ask = DecodeAsk(
            rid=request.rid,
            room=rendezvous.room,
            host=rendezvous.host,
            port=rendezvous.port,
            prompt_tokens=len(ids),
            prompt_digest=messages.prompt_digest(ids),
            pages=self._state.pages(len(ids)),
            priority=request.priority,
            arrived=FIRST_OF_ALL if tokens else request.arrived,
            follows=follows,
            tokens=tokens,
        )
        self._instance.submit(ask, self._engine.clock())

    def abort(self, request: Request, reason: str) -> None:
        """The client has gone."""
        self._alone.discard(request)
        self._timelines.pop(request.rid, None)
        self._admission.retraction.drop(request)
        self._instance.cancel(request.rid, reason, self._engine.clock())

    def on_event(self, event: object) -> None:
        """Links, messages, landed chunks."""
        now = self._engine.clock()
        match event:
            case Frame() | LinkUp() | LinkFailed() | LinkDown():
                self._hear_of_link(event, now)
            case Notice() | Drained():
                self._hear(self._receiver.on_event(event))
            case RoleReport(body):
                self._hear(orders.decode_report(body))
            case PeerLost() | WriteDone() | WriteFailed():
                self._instance.counters["refused_frames"] += 1
            case _:
                raise TypeError(f"a decode instance was sent {type(event).__name__}")

    def _hear_of_link(self, event: NetEvent, now: float) -> None:
        address = self._links.address(event.link)
        if address is None:
            return  # it was given up meanwhile
        match event:
            case Frame():
                self._instance.frame(address, event.body, now)
            case LinkUp():
                self._instance.link_up(address, event.hello, now)
            case LinkFailed():
                self._links.close(address)
                gone, unreachable = event.gone, event.unreachable
                self._instance.link_failed(address, event.reason, now, gone=gone, unreachable=unreachable)
            case LinkDown():
                self._links.close(address)
                self._instance.link_down(address, event.reason, now, gone=event.gone)

    def poll(self, now: float) -> float | None:
        """See that those who decode can go on, reserve pages for others, and fire due timers."""
        self._admission.poll()
        self._alone.poll()
        self._instance.steps = self._engine.steps
        deadline = self._instance.tick(now)
        return deadline if deadline < NEVER else None

    def prefilling(self, request: Request, step: PrefillStep) -> None:
        """A decode instance computes no prompt."""
        raise AssertionError("a decode instance was asked to prefill")

    def prefilled(self, request: Request, step: PrefillStep) -> None:
        """A decode instance computes no prompt."""
        raise AssertionError("a decode instance has prefilled")

    def prompt_done(self, request: Request, step: PrefillStep, token: OutputToken) -> None:
        """A decode instance computes no prompt."""
        raise AssertionError("a decode instance has prefilled")

    def waits_for(self, request: Request) -> str:
        """What its room waits for; later on, its pages."""
        return self._instance.waits_for(request.rid) or ("" if request.pages else "free pages")

    def problem(self) -> str | None:
        """A data path that fails its tests."""
        return self._instance.problem(self._engine.clock())

    def stats(self) -> dict[str, float]:
        """Rooms, queues and what was received."""
        known = dict.fromkeys(
            ("received_bytes", "received_chunks", "received_pages", "completed_rooms", "failed_rooms",
             "damaged_chunks", "refused_frames"), 0.0)  # fmt: skip
        totals = {f"{name}_total": value for name, value in known.items()}
        own = self._admission.retraction.stats() | self._instance.stats()
        return totals | own | {"staging_slots_free": self._slots.free_slots}

    def check_integrity(self) -> None:
        """At rest no request has a room, and staging lies where it was made."""
        self._receiver.check_integrity()
        self._admission.retraction.check_integrity()
        self._instance.check_integrity()
        if self._timelines:
            raise AssertionError(f"timelines of requests that have ended: {sorted(self._timelines)}")

    # What the instance asks of its host: see `DecodeHost`

    def send(self, link: str, body: bytes) -> None:
        """To the network."""
        current = self._links.link(link)
        if current is not None:
            self._network.send(current, body)

    def close(self, link: str) -> None:
        """End a link."""
        current = self._links.close(link)
        if current is not None:
            self._network.close(current)

    def connect(self, link: str, host: str, port: int) -> None:
        """Open a link."""
        self._network.connect(self._links.open(link), host, port, self._link_timeout)

    def draw(self) -> int:
        """A generation."""
        return secrets.randbits(63)

    def take_slot(self) -> int | None:
        """A free slot of the rings."""
        return self._slots.take()

    def free_slot(self, slot: int) -> None:
        """Give it back; until the last process has copied it out, peers must not write there."""
        self._book.forget(slot)
        if slot in self._emptying:
            self._free_when_empty.add(slot)
        else:
            self._slots.free(slot)

    def reserve(self, rid: str, *, share: bool) -> Given | None:
        """Pages for its prompt and its first steps."""
        engine, request = self._engine, self._engine.requests[rid]
        filled = self._admission.reserve(request, share=share)
        if filled is None:
            return None
        timeline = self._timelines[rid]
        timeline.reserved, timeline.reused_tokens = engine.clock(), filled * engine.spec.page_size
        engine.trace.request("alloc wait", request, timeline.arrived, engine.clock())
        return Given(filled * self._layout.cp, request.dp_rank)

    def landed(self, rid: str, notice: messages.ChunkNotice, *, damaged: bool) -> None:
        """For the request's timeline."""
        if damaged:
            self._timelines[rid].resends += 1
            return
        engine, now = self._engine, self._engine.clock()
        seconds = max(0.0, time.time() - self._arrived[notice.slot].posted_at)
        self._timelines[rid].landed(seconds, notice.nbytes)
        posted = now - seconds
        engine.trace.request("land", engine.requests[rid], posted, now, chunk=notice.chunk, bytes=notice.nbytes)

    def scatter(self, rid: str, slot: int, first_page: int, pages: int) -> None:
        """From the rings into the pool."""
        engine, start = self._engine, self._engine.clock()
        request, arrival = engine.requests[rid], self._arrived[slot]
        destination = pool_pages(request.pages, first_page, pages, cp=self._layout.cp)
        self._copy(slot, ScatterChunk(arrival.layout, arrival.chunk, arrival.prompt_tokens, destination))
        engine.trace.request("scatter", request, start, engine.clock(), pages=pages)

    def _begin(self, request: Request) -> bool:
        """Generate without a partner, from zeros and the last prompt token."""
        if not self._slots.free_slots or self._admission.reserve(request, share=False) is None:
            return False
        slot = self._slots.take()
        assert slot is not None, "there is a free one"
        pages = request.pages[: self._engine.spec.pages(len(request.prefill_ids))]
        self._copy(slot, ZeroPages(slot, request.dp_rank, pages))
        self.free_slot(slot)
        self._engine.start_decoding(request, OutputToken(request.input_ids[-1], 0.0))
        return True

    def drain(self, id: int, cut_off: tuple[bytes, ...]) -> None:
        """Run the backends of all processes dry, of those that are cut off, too."""
        self._draining.begin(id, self._processes)
        self._order(Drain(id, list(cut_off)))

    def start(
        self, rid: str, handoff: messages.Handoff, prompt: tuple[messages.PromptLogprobs, ...], met: float
    ) -> None:
        """Decode from the first token on."""
        request, timeline = self._engine.requests[rid], self._timelines.pop(rid)
        timeline.met = met
        request.computed = len(request.prefill_ids)
        if not request.timeline:  # of one that has lost its pages here, the first room's stays
            request.timeline.update(timeline.summary(handoff))
        if not request.output_ids:  # of one that has tokens, all of this has been told
            request.prompt_logprobs = [logprob for part in prompt for logprob in part.logprobs]
            request.prompt_top = [best for part in prompt for best in part.top]
            request.cached_tokens = handoff.cached_tokens
        self._engine.start_decoding(request, OutputToken(handoff.first_token, handoff.logprob, handoff.top))

    def fail(self, rid: str, status: int, reason: str) -> None:
        """Tell the client."""
        self._timelines.pop(rid, None)
        request = self._engine.requests[rid]
        if request.output_ids:
            status = 503
            reason = f"the pages of the request were lost, and its tokens could not be computed again: {reason}"
        self._engine.fail(request, status, reason)

    def say(self, text: str) -> None:
        """To the log."""
        print(f"pdjax decode: {text}", file=sys.stderr, flush=True)

    # The instance's processes

    def _order(self, order: orders.Order) -> orders.Report | None:
        """Have every process carry out an order. Returns this one's immediate report."""
        if self._processes > 1:
            self._engine.runner.announce(RoleOrder(orders.encode(order)))
        return self._receiver.carry_out(order)

    def _copy(self, slot: int, order: ScatterChunk | ZeroPages) -> None:
        """Have every process copy what it has in a slot into the pool."""
        self._emptying.begin(slot, self._processes)
        self._hear(self._order(order))

    def _hear(self, report: orders.Report | None) -> None:
        """A process, this one or another, reports."""
        match report:
            case None:
                return
            case PieceLanded(notice, intact):
                try:
                    arrival = self._book.landed(notice, intact=intact)
                except PieceError as error:
                    self._refuse(str(error))
                    return
                if arrival is not None:
                    self._arrived[arrival.chunk.slot] = arrival
                    self._instance.landed(arrival.chunk, self._engine.clock(), damaged=arrival.damaged)
                    del self._arrived[arrival.chunk.slot]
            case PathTested(number, senders, intact):
                right = self._tests.came(number, senders, intact=intact)
                if right is not None:
                    self._instance.test_came(number, self._engine.clock(), right=right)
            case NoticeRefused(reason):
                self._refuse(reason)
            case SlotEmptied(slot):
                if self._emptying.ended(slot) is not None and slot in self._free_when_empty:
                    self._free_when_empty.remove(slot)
                    self._slots.free(slot)
                    self._instance.slot_freed(self._engine.clock())
            case Dry(id, error):
                over = self._draining.ended(id, error)
                if over is not None:
                    self._instance.drained(id, self._engine.clock(), error=over.error)
            case _:
                raise TypeError(f"a decode process has reported {type(report).__name__}")

    def _refuse(self, reason: str) -> None:
        self._instance.counters["refused_frames"] += 1
        self.say(f"a notice was dropped: {reason}")
