"""The prefill role: compute prompts for decode instances, and send each prompt's pages to the one that claimed it."""

from __future__ import annotations

import sys
import time

from pdjax.disagg.alone import Alone
from pdjax.disagg.protocol import messages
from pdjax.disagg.protocol.asks import PrefillAsk
from pdjax.disagg.protocol.hosts import Gathered
from pdjax.disagg.protocol.prefill_instance import PrefillInstance
from pdjax.disagg.protocol.prefill_room import Timeouts
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
from pdjax.transfer.path_test import CELL, PATH_REGION, PathTestCells
from pdjax.transfer.staging import REGION, SourceStaging


class Prefill:
    """See `pdjax.engine.roles.Role`. Binds a `PrefillInstance` to the engine, the network and the backend."""

    name = "prefill"

    def __init__(
        self,
        engine: Engine,
        *,
        network: Network,
        backend: TransferBackend,
        staging: SourceStaging,
        test_cells: PathTestCells,
        registration: messages.Registration,
        timeouts: Timeouts,
    ) -> None:
        self._engine = engine
        self._network = network
        self._backend = backend
        self._staging = staging
        self._test_cells = test_cells
        self._verify = registration.verify
        self._alone = Alone(self._begin)
        self._firsts: dict[str, OutputToken] = {}  # first tokens of prompts that are computed, by request id
        # For the trace: when a request's latest step was computed, whose pages a slot has, and writes on their way.
        self._computed: dict[str, float] = {}
        self._gathered: dict[int, Request] = {}
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
            case WriteDone(id):
                written = self._writing.pop(id, None)
                if written is not None:
                    request, posted, nbytes = written
                    self._engine.trace.request("write", request, posted, now, bytes=nbytes)
                self._instance.write_ended(id, None, now)
            case WriteFailed(id, cause):
                self._writing.pop(id, None)
                self._instance.write_ended(id, cause, now)
            case LinkUp(link, hello):
                self._instance.link_up(link, hello, now)
            case LinkDown(link, reason):
                self._instance.link_down(link, reason, now)
            case PeerLost(peer, cause):
                self._instance.path_lost(peer, cause, now)
            case Notice() | Drained() | LinkFailed():
                self._instance.counters["refused_frames"] += 1
            case _:
                raise TypeError(f"a prefill instance was sent {type(event).__name__}")

    def poll(self, now: float) -> float | None:
        """Admit, and fire due timers."""
        self._alone.poll()
        self._instance.steps = self._engine.steps
        return self._instance.tick(now)

    def prefilling(self, request: Request, step: PrefillStep) -> None:
        """Ask for the slots that this step's pages will need, while it computes."""
        if request.alone:
            return
        spec = self._engine.spec
        first, end = step.start // spec.page_size, spec.pages(step.end)
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

    def problem(self) -> str | None:
        """A data path that fails its tests."""
        return self._instance.problem(self._engine.clock())

    def stats(self) -> dict[str, float]:
        """Rooms, queues and what was sent."""
        known = dict.fromkeys(("sent_bytes", "sent_chunks", "failed_rooms", "refused_frames"), 0.0)
        totals = {f"{name}_total": value for name, value in known.items()}
        return totals | self._instance.stats() | {"staging_slots_free": self._staging.free_slots}

    def check_integrity(self) -> None:
        """At rest no request has a room."""
        self._instance.check_integrity()
        if self._firsts:
            raise AssertionError(f"first tokens of requests that have ended: {sorted(self._firsts)}")

    # What the instance asks of its host: see `PrefillHost`

    def send(self, link: str, body: bytes) -> None:
        """To the network."""
        self._network.send(link, body)

    def close(self, link: str) -> None:
        """End a link."""
        self._network.close(link)

    def open_path(self, link: str, transfer: bytes) -> str | None:
        """Connect the backend."""
        try:
            self._backend.connect(link, transfer)
        except TransferError as error:
            return str(error)
        self.say(f"decode instance joined ({self._backend.path(link)})")
        return None

    def close_path(self, link: str) -> None:
        """Disconnect the backend."""
        self._backend.disconnect(link)

    def take_slot(self) -> int | None:
        """A free staging slot."""
        return self._staging.take()

    def free_slot(self, slot: int) -> None:
        """Give it back."""
        self._staging.free(slot)

    def begin_prompt(self, rid: str) -> int | None:
        """Pages, and a place in the scheduler."""
        request = self._engine.requests[rid]
        return request.cached_tokens // self._engine.spec.page_size if self._begin(request) else None

    def _begin(self, request: Request) -> bool:
        engine = self._engine
        if not engine.has_free_row() or not engine.begin_prompt(request):
            return False
        engine.scheduler.add_prefill(request)
        return True

    def gather(self, slot: int, rid: str, first_page: int, pages: int) -> Gathered:
        """Fill a staging slot."""
        engine, start = self._engine, self._engine.clock()
        request = engine.requests[rid]
        nbytes = self._staging.gather(slot, engine.runner.pool, request.pages[first_page : first_page + pages])
        checksum = self._staging.checksum(slot, nbytes) if self._verify else None
        engine.trace.request("slot wait", request, self._computed.get(rid, start), start)
        engine.trace.request("gather", request, start, engine.clock(), bytes=nbytes)
        self._gathered[slot] = request
        return Gathered(nbytes, checksum, time.time())

    def write(
        self, id: int, link: str, slot: int, peer_offset: int, nbytes: int, notice: bytes, deadline: float
    ) -> None:
        """Hand a slot to the backend."""
        self._writing[id] = self._gathered.pop(slot), self._engine.clock(), nbytes
        self._backend.write(
            Write(
                id=id,
                peer=link,
                region=self._staging.region(slot),
                offset=0,
                peer_region=REGION,
                peer_offset=peer_offset,
                nbytes=nbytes,
                notice=notice,
                deadline=deadline,
            )
        )

    def test_path(self, id: int, link: str, number: int, notice: bytes, deadline: float) -> None:
        """Hand a test message to the backend."""
        offset = self._test_cells.fill(number)
        self._backend.write(
            Write(
                id=id,
                peer=link,
                region=PATH_REGION,
                offset=offset,
                peer_region=PATH_REGION,
                peer_offset=offset,
                nbytes=CELL,
                notice=notice,
                deadline=deadline,
            )
        )

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
