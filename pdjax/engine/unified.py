"""The role that needs no other instance: prefill and decode in one, over a pool that its requests share as they grow.

A request is admitted with the pages of its prompt and gets more page by page; see `pdjax.engine.retraction` for what
happens when there are too few.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdjax.engine.admission import WaitingQueue
from pdjax.engine.plan import PrefillStep
from pdjax.engine.request import OutputToken, Request
from pdjax.engine.retraction import Retraction

if TYPE_CHECKING:
    from pdjax.engine.engine import Engine


class Unified:
    """See `pdjax.engine.roles.Role`."""

    name = "unified"

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._waiting: WaitingQueue[Request] = WaitingQueue(lambda request: request)
        self.retraction = Retraction(engine, requeue=self._waiting.push)

    def submit(self, request: Request) -> None:
        """Queue for admission."""
        self._waiting.push(request)

    def abort(self, request: Request, reason: str) -> None:
        """Leave the queue or host memory, if there."""
        self._waiting.discard(request)
        self.retraction.drop(request)

    def on_event(self, event: object) -> None:
        """A unified instance has no peers."""
        raise TypeError(f"a unified instance was sent {type(event).__name__}")

    def poll(self, now: float) -> float | None:
        """See that those who decode can go on; bring back who had to leave; then admit from the queue."""
        self.retraction.grow()
        self.retraction.resume(lambda request: True)
        self._admit()
        return None

    def prefilling(self, request: Request, step: PrefillStep) -> None:
        """Note how long the request waited."""
        request.timeline.setdefault("queue_s", self._engine.clock() - request.arrived)

    def prefilled(self, request: Request, step: PrefillStep) -> None:
        """The next chunk follows by itself."""

    def prompt_done(self, request: Request, step: PrefillStep, token: OutputToken) -> None:
        """Decode here."""
        prefill_s = self._engine.clock() - request.arrived - request.timeline["queue_s"]
        request.timeline.setdefault("prefill_s", prefill_s)
        self._engine.start_decoding(request, token)

    def waits_for(self, request: Request) -> str:
        """Pages, in the queue or in host memory."""
        return "" if request.pages else "free pages"

    def problem(self) -> str | None:
        """A unified instance needs its engine only."""
        return None

    def stats(self) -> dict[str, float]:
        """The queue, and who is in host memory."""
        return self.retraction.stats() | {"waiting_requests": len(self._waiting)}

    def check_integrity(self) -> None:
        """Whoever waits or is retracted is live."""
        known = self._engine.requests
        strangers = [request.rid for request in self._waiting if request.rid not in known]
        if strangers:
            raise AssertionError(f"queued, and not live: {strangers}")
        self.retraction.check_integrity()

    def _admit(self) -> None:
        """Admit from the front of the queue, one prompt at a time, so that each finds what the one before has cached.

        A higher priority does not wait for the rest of another's prompt, nor for those in host memory. One page for
        each request that decodes is kept back.
        """
        engine = self._engine
        while self._waiting and engine.has_free_row():
            request = self._waiting.first
            before = [*engine.scheduler.prefilling, *self.retraction.out]
            if any(other.priority >= request.priority for other in before):
                return
            spare = -(-len(engine.scheduler.running) // engine.runner.dp)
            ranks = None if request.wanted_rank is None else [request.wanted_rank]
            if not engine.begin_prompt(request, spare=spare, ranks=ranks):
                return
            engine.scheduler.add_prefill(self._waiting.pop())
