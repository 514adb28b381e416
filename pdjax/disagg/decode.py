"""The decode role: reserve pages, claim rooms, take in what prefill instances send, and generate from there."""

from __future__ import annotations

import secrets
import sys
import time

from pdjax.disagg.admission import Admission
from pdjax.disagg.alone import Alone
from pdjax.disagg.protocol import messages
from pdjax.disagg.protocol.asks import DecodeAsk
from pdjax.disagg.protocol.decode_instance import DecodeInstance
from pdjax.disagg.protocol.prefill_room import Timeouts
from pdjax.disagg.timeline import RoomTimeline
from pdjax.engine.engine import Engine
from pdjax.engine.plan import PrefillStep
from pdjax.engine.request import OutputToken, Request
from pdjax.net.events import Frame, LinkDown, LinkFailed, LinkUp
from pdjax.net.network import Network
from pdjax.transfer.backend import Drained, Notice, PeerLost, TransferBackend, WriteDone, WriteFailed
from pdjax.transfer.path_test import PathTestCells
from pdjax.transfer.staging import LandingRing


class Decode:
    """See `pdjax.engine.roles.Role`. Binds a `DecodeInstance` to the engine, the network and the staging ring."""

    name = "decode"

    def __init__(
        self,
        engine: Engine,
        *,
        network: Network,
        backend: TransferBackend,
        ring: LandingRing,
        test_cells: PathTestCells,
        registration: messages.Registration,
        timeouts: Timeouts,
    ) -> None:
        self._engine = engine
        self._network = network
        self._backend = backend
        self._ring = ring
        self._test_cells = test_cells
        self._link_timeout = timeouts.link
        self._admission = Admission(engine)
        self._alone = Alone(self._begin)
        self._timelines: dict[str, RoomTimeline] = {}  # by request id, until the prompt is here
        self._instance = DecodeInstance(self, registration=registration, timeouts=timeouts)

    # What the engine asks of a role

    def submit(self, request: Request) -> None:
        """The client's half of a room has come."""
        rendezvous = request.rendezvous
        if rendezvous is None:
            self._engine.fail(request, 400, "a decode instance needs bootstrap_room: send requests through a router")
            return
        if request.alone:
            self._alone.push(request)
            return
        self._timelines[request.rid] = RoomTimeline(request.arrived)
        ask = DecodeAsk(
            rid=request.rid,
            room=rendezvous.room,
            host=rendezvous.host,
            port=rendezvous.port,
            prompt_tokens=request.prompt_tokens,
            prompt_digest=messages.prompt_digest(request.input_ids),
            pages=self._engine.spec.pages(request.prompt_tokens),
            priority=request.priority,
            arrived=request.arrived,
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
            case Frame(link, body):
                self._instance.frame(link, body, now)
            case Notice(payload):
                self._instance.landed(payload, now)
            case LinkUp(link, hello):
                self._instance.link_up(link, hello, now)
            case LinkFailed(link, reason, gone):
                self._instance.link_failed(link, reason, now, gone=gone)
            case LinkDown(link, reason, gone):
                self._instance.link_down(link, reason, now, gone=gone)
            case Drained(id):
                self._instance.drained(id, now)
            case PeerLost() | WriteDone() | WriteFailed():
                self._instance.counters["refused_frames"] += 1
            case _:
                raise TypeError(f"a decode instance was sent {type(event).__name__}")

    def poll(self, now: float) -> float | None:
        """See that those who decode can go on, reserve pages for others, and fire due timers."""
        self._admission.poll()
        self._alone.poll()
        self._instance.steps = self._engine.steps
        return self._instance.tick(now)

    def prefilling(self, request: Request, step: PrefillStep) -> None:
        """A decode instance computes no prompt."""
        raise AssertionError("a decode instance was asked to prefill")

    def prefilled(self, request: Request, step: PrefillStep) -> None:
        """A decode instance computes no prompt."""
        raise AssertionError("a decode instance has prefilled")

    def prompt_done(self, request: Request, step: PrefillStep, token: OutputToken) -> None:
        """A decode instance computes no prompt."""
        raise AssertionError("a decode instance has prefilled")

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
        return totals | own | {"staging_slots_free": self._ring.free_slots}

    def check_integrity(self) -> None:
        """At rest no request has a room."""
        self._admission.retraction.check_integrity()
        self._instance.check_integrity()
        if self._timelines:
            raise AssertionError(f"timelines of requests that have ended: {sorted(self._timelines)}")

    # What the instance asks of its host: see `DecodeHost`

    def send(self, link: str, body: bytes) -> None:
        """To the network."""
        self._network.send(link, body)

    def close(self, link: str) -> None:
        """End a link."""
        self._network.close(link)

    def connect(self, link: str, host: str, port: int) -> None:
        """Open a link."""
        self._network.connect(link, host, port, self._link_timeout)

    def draw(self) -> int:
        """A generation."""
        return secrets.randbits(63)

    def take_slot(self) -> int | None:
        """A free slot of the ring."""
        return self._ring.take()

    def free_slot(self, slot: int) -> None:
        """Give it back."""
        self._ring.free(slot)

    def reserve(self, rid: str, *, share: bool) -> int | None:
        """Pages for its prompt and its first steps."""
        engine, request = self._engine, self._engine.requests[rid]
        filled = self._admission.reserve(request, share=share)
        if filled is None:
            return None
        timeline = self._timelines[rid]
        timeline.reserved, timeline.reused_tokens = engine.clock(), filled * engine.spec.page_size
        engine.trace.request("alloc wait", request, request.arrived, engine.clock())
        return filled

    def checksum(self, slot: int, nbytes: int) -> int | None:
        """Of a slot."""
        return self._ring.checksum(slot, nbytes)

    def holds_test(self, number: int) -> bool:
        """In the region for test messages."""
        return self._test_cells.holds(number)

    def landed(self, rid: str, notice: messages.ChunkNotice) -> None:
        """For the request's timeline."""
        self._timelines[rid].landed(notice)
        engine, now = self._engine, self._engine.clock()
        posted = now - max(0.0, time.time() - notice.posted_at)
        engine.trace.request("land", engine.requests[rid], posted, now, chunk=notice.chunk, bytes=notice.nbytes)

    def scatter(self, rid: str, slot: int, first_page: int, pages: int) -> None:
        """From the ring into the pool."""
        engine, runner, start = self._engine, self._engine.runner, self._engine.clock()
        request = engine.requests[rid]
        destination = request.pages[first_page : first_page + pages]
        runner.pool = self._ring.scatter(slot, runner.pool, destination)
        engine.trace.request("scatter", request, start, engine.clock(), pages=pages)

    def _begin(self, request: Request) -> bool:
        """Generate without a partner, from zeros and the last prompt token."""
        if not self._ring.free_slots or not self._admission.reserve(request):
            return False
        slot = self._ring.take()
        assert slot is not None, "there is a free one"
        self._ring.clear(slot)
        pages, most = self._engine.spec.pages(request.prompt_tokens), self._ring.slot_pages
        for first in range(0, pages, most):
            self.scatter(request.rid, slot, first, min(most, pages - first))
        self._ring.free(slot)
        self._engine.start_decoding(request, OutputToken(request.input_ids[-1], 0.0))
        return True

    def drain(self, id: int) -> None:
        """Run the backend dry."""
        self._backend.drain(id)

    def start(
        self, rid: str, handoff: messages.Handoff, prompt: tuple[messages.PromptLogprobs, ...], met: float
    ) -> None:
        """Decode from the first token on."""
        request, timeline = self._engine.requests[rid], self._timelines.pop(rid)
        timeline.met = met
        request.computed = request.prompt_tokens
        request.prompt_logprobs = [logprob for part in prompt for logprob in part.logprobs]
        request.prompt_top = [best for part in prompt for best in part.top]
        request.cached_tokens = handoff.cached_tokens
        request.timeline.update(timeline.summary(handoff))
        self._engine.start_decoding(request, OutputToken(handoff.first_token, handoff.logprob, handoff.top))

    def fail(self, rid: str, status: int, reason: str) -> None:
        """Tell the client."""
        self._timelines.pop(rid, None)
        self._engine.fail(self._engine.requests[rid], status, reason)

    def say(self, text: str) -> None:
        """To the log."""
        print(f"pdjax decode: {text}", file=sys.stderr, flush=True)
