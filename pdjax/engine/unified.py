"""The role that needs no other instance: prefill and decode in one, over a pool that its requests share as they grow.

A request is admitted with the pages of its prompt, gets more page by page, and may have to leave the pool for a while:
when no page is left for one that decodes, the weakest request (see `standing`) is *retracted*. One that decodes is
copied to host memory and goes on later where it was; one whose prompt is being computed goes back into the queue.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdjax.engine.admission import WaitingQueue, standing
from pdjax.engine.host_pages import HostPages, SavedPages
from pdjax.engine.plan import PrefillStep
from pdjax.engine.request import OutputToken, Request

if TYPE_CHECKING:
    from pdjax.engine.engine import Engine


@dataclass(frozen=True)
class _Retracted:
    request: Request
    saved: SavedPages


class Unified:
    """See `pdjax.engine.roles.Role`."""

    name = "unified"

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._waiting: WaitingQueue[Request] = WaitingQueue(lambda request: request)
        self._retracted: dict[str, _Retracted] = {}
        self._host = HostPages(engine.runner)
        self._counters = dict.fromkeys(("retractions", "resumed_requests"), 0)

    def submit(self, request: Request) -> None:
        """Queue for admission."""
        self._waiting.push(request)

    def abort(self, request: Request, reason: str) -> None:
        """Leave the queue or host memory, if there."""
        self._waiting.discard(request)
        out = self._retracted.pop(request.rid, None)
        if out is not None:
            self._host.drop(out.saved)

    def on_event(self, event: object) -> None:
        """A unified instance has no peers."""
        raise TypeError(f"a unified instance was sent {type(event).__name__}")

    def poll(self, now: float) -> float | None:
        """See that those who decode can go on; bring back who had to leave; then admit from the queue."""
        self._grow()
        self._resume()
        self._admit()
        return None

    def prefilling(self, request: Request, step: PrefillStep) -> None:
        """Note how long the request waited."""
        request.timeline.setdefault("queue_s", self._engine.clock() - request.arrived)

    def prefilled(self, request: Request, step: PrefillStep) -> None:
        """The next chunk follows by itself."""

    def prompt_done(self, request: Request, step: PrefillStep, token: OutputToken) -> None:
        """Decode here."""
        request.timeline["prefill_s"] = self._engine.clock() - request.arrived - request.timeline["queue_s"]
        self._engine.start_decoding(request, token)

    def stats(self) -> dict[str, float]:
        """The queue, and who is in host memory."""
        totals: dict[str, float] = {f"{name}_total": value for name, value in self._counters.items()}
        return totals | {"waiting_requests": len(self._waiting), "retracted_requests": len(self._retracted)}

    def check_integrity(self) -> None:
        """Whoever waits or is retracted is live."""
        known = self._engine.requests
        strangers = [rid for rid in (*(request.rid for request in self._waiting), *self._retracted) if rid not in known]
        if strangers:
            raise AssertionError(f"queued, and not live: {strangers}")

    def _grow(self) -> None:
        """Give every request that decodes the pages that its next steps write to, the strongest first."""
        engine, running = self._engine, self._engine.scheduler.running
        # Looked up anew each time: a step that is settled may end requests, and its prompt may begin to decode.
        while short := [request for request in running.values() if self._missing(request) > 0]:
            request = max(short, key=standing)
            pages = engine.prefix.grow(request.rid, self._missing(request))
            if pages is not None:
                request.pages = request.pages + pages
            elif not engine.settle():
                self._retract(min([*running.values(), *engine.scheduler.prefilling], key=standing))

    def _missing(self, request: Request) -> int:
        return self._pages_needed(request) - len(request.pages)

    def _pages_needed(self, request: Request) -> int:
        """Pages for the next decode step and the one after: that is planned before the first's tokens are known."""
        return self._engine.spec.pages(min(request.next_position + 2, request.max_tokens))

    def _retract(self, request: Request) -> None:
        """Take a request out of the pool. Nothing of it is under way."""
        self._counters["retractions"] += 1
        decodes = request.rid in self._engine.scheduler.running
        self._engine.scheduler.remove(request.rid)
        if decodes:
            saved = self._host.save(request.pages[: self._engine.spec.pages(request.next_position)])
            self._retracted[request.rid] = _Retracted(request, saved)
        self._engine.give_back_pages(request)
        if not decodes:
            request.computed = 0
            self._waiting.push(request)

    def _resume(self) -> None:
        """Bring retracted requests back, the strongest first, while there is room for them to go on."""
        engine = self._engine
        for entry in sorted(self._retracted.values(), key=lambda entry: standing(entry.request), reverse=True):
            request = entry.request
            grant = engine.has_free_row() and engine.prefix.begin(
                request.rid,
                request.computed_ids,
                pages=self._pages_needed(request),
                cached=request.next_position // engine.spec.page_size,
                spare=self._spare(),
            )
            if not grant:
                return
            self._host.restore(entry.saved, grant.pages, first=grant.cached)
            request.pages = grant.pages
            del self._retracted[request.rid]
            self._counters["resumed_requests"] += 1
            engine.scheduler.add_running(request)

    def _admit(self) -> None:
        """Admit from the front of the queue, one prompt at a time, so that each finds what the one before has cached.

        A higher priority does not wait for the rest of another's prompt, nor for those in host memory.
        """
        engine = self._engine
        while self._waiting and engine.has_free_row():
            request = self._waiting.first
            before = [*engine.scheduler.prefilling, *(entry.request for entry in self._retracted.values())]
            if any(other.priority >= request.priority for other in before):
                return
            if not engine.begin_prompt(request, spare=self._spare()):
                return
            engine.scheduler.add_prefill(self._waiting.pop())

    def _spare(self) -> int:
        """Pages kept back from newcomers: one for each request that decodes, so that it need not leave at once."""
        return len(self._engine.scheduler.running)
