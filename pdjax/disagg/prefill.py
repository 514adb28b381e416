"""The prefill role: compute prompts for decode instances, and send each prompt's pages to the one that claimed it."""

from __future__ import annotations

import sys
from collections.abc import Callable

from pdjax.disagg import orders
from pdjax.disagg.alone import Alone
from pdjax.disagg.orders import ChunkSent, ClosePath, OpenPath, PathLost, SendChunk, TestPath
from pdjax.disagg.pieces import Tally
from pdjax.disagg.protocol import messages
from pdjax.disagg.protocol.asks import PrefillAsk
from pdjax.disagg.protocol.hosts import Given
from pdjax.disagg.protocol.prefill_instance import PrefillInstance
from pdjax.disagg.protocol.prefill_room import Timeouts
from pdjax.disagg.protocol.timers import NEVER
from pdjax.disagg.protocol.topology import FOLLOW_BOOTSTRAP_ROOM, dp_rank_of
from pdjax.disagg.sender import Sender
from pdjax.engine.engine import Engine
from pdjax.engine.orders import RoleOrder, RoleReport
from pdjax.engine.plan import PrefillStep
from pdjax.engine.request import Finish, OutputToken, Request
from pdjax.net.events import Frame, LinkDown, LinkFailed, LinkUp
from pdjax.net.network import Network
from pdjax.transfer.backend import Drained, Notice, PeerLost, WriteDone, WriteFailed
from pdjax.transfer.staging import Slots, pool_pages
from pdjax.wire import Rendezvous, SamplingParams


class Prefill:
    """See `pdjax.engine.roles.Role`. Binds a `PrefillInstance` to the engine, the network and the instance's senders.

    Args:
        sender: of this process, the leader's.
        processes: of this instance; all but this one are told by the engine's orders what to send.
        post: puts something into the engine's inbox.
    """

    name = "prefill"

    def __init__(
        self,
        engine: Engine,
        *,
        network: Network,
        sender: Sender,
        slots: Slots,
        processes: int,
        post: Callable[[object], None],
        registration: messages.Registration,
        timeouts: Timeouts,
        dp_policy: str = FOLLOW_BOOTSTRAP_ROOM,
    ) -> None:
        self._engine = engine
        self._network = network
        self._sender = sender
        self._slots = slots
        self._processes = processes
        self._layout = registration.layout
        self._state = registration.state
        self._dp_policy = dp_policy
        self._post = post
        self._sending = Tally()  # chunks, over the processes
        self._alone = Alone(self._begin)
        self._firsts: dict[str, OutputToken] = {}  # first tokens of prompts that are computed, by request id
        # For the trace: when a request's latest step was computed, and writes on their way.
        self._computed: dict[str, float] = {}
        self._writing: dict[int, tuple[Request, float, int]] = {}
        self._instance = PrefillInstance(self, registration=registration, timeouts=timeouts)

    # What the engine asks of a role

    def submit(self, request: Request) -> None:
        """The client's half of a room has come."""
        rendezvous = request.rendezvous
        if rendezvous is None:
            self._engine.fail(request, 400, "a prefill instance needs bootstrap_room: send requests through a router")
            return
        if request.alone:
            self._alone.push(request)
            return
        try:
            request.wanted_rank = dp_rank_of(rendezvous.room, self._layout, request.wanted_rank, self._dp_policy)
        except ValueError as error:
            self._engine.fail(request, 400, f"data_parallel_rank: {error}")
            return
        ask = PrefillAsk(
            rid=request.rid,
            room=rendezvous.room,
            prompt_tokens=request.prompt_tokens,
            prompt_digest=messages.prompt_digest(request.input_ids),
            priority=request.priority,
            arrived=request.arrived,
        )
        self._instance.submit(ask, self._engine.clock())

    def abort(self, request: Request, reason: str) -> None:
        """The client has gone."""
        self._alone.discard(request)
        self._computed.pop(request.rid, None)
        self._firsts.pop(request.rid, None)
        self._instance.cancel(request.rid, reason, self._engine.clock())

    def on_event(self, event: object) -> None:
        """Links, messages and the ends of writes."""
        now = self._engine.clock()
        match event:
            case Frame(link, body):
                self._instance.frame(link, body, now)
            case WriteDone() | WriteFailed() | PeerLost():
                self._hear(self._sender.on_event(event))
            case ChunkSent():
                self._hear(event)
            case RoleReport(body):
                self._hear(orders.decode_report(body))
            case LinkUp(link, hello):
                self._instance.link_up(link, hello, now)
            case LinkDown(link, reason):
                self._instance.link_down(link, reason, now)
            case Notice() | Drained() | LinkFailed():
                self._instance.counters["refused_frames"] += 1
            case _:
                raise TypeError(f"a prefill instance was sent {type(event).__name__}")

    def poll(self, now: float) -> float | None:
        """Admit, and fire due timers."""
        self._alone.poll()
        self._instance.steps = self._engine.steps
        deadline = self._instance.tick(now)
        return deadline if deadline < NEVER else None

    def prefilling(self, request: Request, step: PrefillStep) -> None:
        """Ask for the slots that this step's pages will need, while it computes."""
        if request.alone:
            return
        first, end = step.start // self._state.page_size, self._state.pages(step.end)
        self._instance.computing(request.rid, first, end, self._engine.clock())

    def prefilled(self, request: Request, step: PrefillStep) -> None:
        """Send the step's pages while the next one computes."""
        if request.alone:
            return
        self._computed[request.rid] = self._engine.clock()
        self._instance.computed(request.rid, self._engine.clock())

    def prompt_done(self, request: Request, step: PrefillStep, token: OutputToken) -> None:
        """Send the last pages and hand the request over."""
        if request.alone:
            self._engine.finish(request, Finish("length"), token)
            return
        self._firsts[request.rid] = token
        self._computed[request.rid] = self._engine.clock()
        # They are the decode side's to tell: routers put what both sides say one behind the other.
        prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, []
        prompt_top, request.prompt_top = request.prompt_top, []
        self._instance.prompt_done(
            request.rid,
            token.id,
            token.logprob,
            token.top,
            request.cached_tokens,
            self._engine.clock(),
            prompt_logprobs=prompt_logprobs,
            prompt_top=prompt_top if request.top_logprobs else [],
        )

    def waits_for(self, request: Request) -> str:
        """What its room waits for."""
        return self._instance.waits_for(request.rid)

    def problem(self) -> str | None:
        """A data path that fails its tests."""
        return self._instance.problem(self._engine.clock())

    def stats(self) -> dict[str, float]:
        """Rooms, queues and what was sent."""
        known = dict.fromkeys(("sent_bytes", "sent_chunks", "failed_rooms", "refused_frames"), 0.0)
        totals = {f"{name}_total": value for name, value in known.items()}
        return totals | self._instance.stats() | {"staging_slots_free": self._slots.free_slots}

    def check_integrity(self) -> None:
        """At rest no request has a room, and staging lies where it was made."""
        self._instance.check_integrity()
        self._sender.check_integrity()
        if self._firsts:
            raise AssertionError(f"first tokens of requests that have ended: {sorted(self._firsts)}")

    # What the instance asks of its host: see `PrefillHost`

    def send(self, link: str, body: bytes) -> None:
        """To the network."""
        self._network.send(link, body)

    def close(self, link: str) -> None:
        """End a link."""
        self._network.close(link)

    def open_path(self, link: str, peer: messages.Registration) -> str | None:
        """Have all processes connect their backends; one that can't reports it later."""
        lost = self._order(OpenPath(link, peer.layout, peer.slot_pages, peer.ranks))
        if isinstance(lost, PathLost):
            self.close_path(link)
            return lost.cause
        self.say(f"decode instance joined ({self._sender.path(link)})")
        return None

    def close_path(self, link: str) -> None:
        """Have all processes disconnect their backends."""
        self._order(ClosePath(link))

    def take_slot(self) -> int | None:
        """A free staging slot."""
        return self._slots.take()

    def free_slot(self, slot: int) -> None:
        """Give it back."""
        self._slots.free(slot)

    def rebootstrap(self, rid: str, room: int, token_ids: list[int], priority: int) -> tuple[int, str] | None:
        """Like a request of the frontend, which does not know this one and passes over what it is told of it."""
        one = SamplingParams(max_new_tokens=1, temperature=0.0)
        meeting = Rendezvous("", 0, room)
        request = Request(rid, token_ids, one, seed=0, rendezvous=meeting, priority=priority, has_begun=True)
        request.wanted_rank = dp_rank_of(room, self._layout, None, self._dp_policy)
        return self._engine.accept(request)

    def begin_prompt(self, rid: str) -> Given | None:
        """Pages, and a place in the scheduler."""
        request = self._engine.requests[rid]
        if not self._begin(request):
            return None
        return Given(request.cached_tokens // self._state.page_size, request.dp_rank)

    def _begin(self, request: Request) -> bool:
        engine, rank = self._engine, request.wanted_rank
        # One prompt is computed at a time, by all ranks: what counts is which of them knows its beginning.
        ranks = engine.prefix.by_text(request.prefill_ids) if rank is None else [rank]
        if not engine.begin_prompt(request, ranks=ranks):
            return False
        engine.scheduler.add_prefill(request)
        return True

    def write(self, id: int, link: str, slot: int, rid: str, notice: messages.ChunkNotice, deadline: float) -> None:
        """Have each process gather and send what its ranks hold."""
        engine, start = self._engine, self._engine.clock()
        request = engine.requests[rid]
        page_ids = pool_pages(request.pages, notice.first_page, notice.pages, cp=self._layout.cp)
        self._send(SendChunk(id, link, slot, notice, request.prompt_tokens, page_ids, deadline - start))
        now = engine.clock()
        self._writing[id] = request, now, notice.nbytes
        engine.trace.request("slot wait", request, self._computed.get(rid, start), start)
        engine.trace.request("gather", request, start, now, bytes=notice.nbytes)

    def test_path(self, id: int, link: str, number: int, deadline: float) -> None:
        """Have every process send it."""
        self._send(TestPath(id, link, number, self._processes, deadline - self._engine.clock()))

    def finish(self, rid: str) -> None:
        """Answer the client with the first token."""
        self._computed.pop(rid, None)
        self._engine.finish(self._engine.requests[rid], Finish("length"), self._firsts.pop(rid))

    def fail(self, rid: str, status: int, reason: str) -> None:
        """Tell the client."""
        self._computed.pop(rid, None)
        self._firsts.pop(rid, None)
        self._engine.fail(self._engine.requests[rid], status, reason)

    def say(self, text: str) -> None:
        """To the log."""
        print(f"pdjax prefill: {text}", file=sys.stderr, flush=True)

    # The instance's processes

    def _order(self, order: orders.Order) -> ChunkSent | PathLost | None:
        """Have every process carry out an order. Returns this one's immediate report."""
        if self._processes > 1:
            self._engine.runner.announce(RoleOrder(orders.encode(order)))
        return self._sender.carry_out(order)

    def _send(self, order: SendChunk | TestPath) -> None:
        """Have every process send something. That all of it has ended is heard later, also of what ends at once."""
        self._sending.begin(order.id, self._processes)
        sent = self._order(order)
        if sent is not None:
            self._post(sent)

    def _hear(self, report: orders.Report | None) -> None:
        """A process, this one or another, reports."""
        now = self._engine.clock()
        match report:
            case None:
                return
            case ChunkSent(id, error):
                over = self._sending.ended(id, error)
                if over is None:
                    return
                written = self._writing.pop(id, None)
                if written is not None and over.error is None:
                    request, posted, nbytes = written
                    self._engine.trace.request("write", request, posted, now, bytes=nbytes)
                self._instance.write_ended(id, over.error, now)
            case PathLost(link, cause):
                self._instance.path_lost(link, cause, now)
            case _:
                raise TypeError(f"a prefill process has reported {type(report).__name__}")
