"""When the pool is too small: who decodes and is weakest leaves it for a while, and goes on later where it was.

Requests get their pages as they grow. When no page is left for one of them, the weakest (see `standing`) is
*retracted*: one that decodes is copied to host memory. One whose prompt is being computed goes back to its role, which
has it computed again; and so does one that decodes if host memory is bounded (`Limits.host_pages`) and full.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdjax.engine.admission import standing
from pdjax.engine.host_pages import HostPages, SavedPages
from pdjax.engine.request import Request

if TYPE_CHECKING:
    from pdjax.engine.engine import Engine


@dataclass(frozen=True)
class _Out:
    request: Request
    saved: SavedPages


class Retraction:
    """The requests that are out of the pool, and what puts them out and brings them back.

    Args:
        requeue: takes a request that had to give back its pages, to have its `prefill_ids` computed from the start.
    """

    def __init__(self, engine: Engine, requeue: Callable[[Request], None]) -> None:
        self._engine = engine
        self._requeue = requeue
        self._page_size = engine.spec.page_size
        self._out: dict[str, _Out] = {}
        self._host = HostPages(engine.runner)
        self._counters = dict.fromkeys(("retractions", "resumed_requests", "rebootstraps"), 0)

    @property
    def out(self) -> list[Request]:
        """Those in host memory, the strongest first."""
        return sorted((entry.request for entry in self._out.values()), key=standing, reverse=True)

    def grow(self) -> None:
        """Give every request that decodes the pages that its next steps write to, the strongest first."""
        engine, running = self._engine, self._engine.scheduler.running
        # Looked up anew each time: a step that is settled may end requests, and its prompt may begin to decode.
        # Asked of every request at every step, so the usual answer comes cheap.
        while short := [
            request
            for request in running.values()
            if request.prompt_tokens + len(request.output_ids) >= len(request.pages) * self._page_size
            and self._missing(request) > 0
        ]:
            request = max(short, key=standing)
            pages = engine.prefix.grow(request.rid, self._missing(request))
            if pages is not None:
                request.pages = request.pages + pages
            elif not engine.settle():
                others = [*running.values(), *engine.scheduler.prefilling]
                self._retract(min((other for other in others if other.dp_rank == request.dp_rank), key=standing))

    def resume(self, admits: Callable[[Request], bool]) -> None:
        """Bring requests back, the strongest of each dp rank first, while there is room for them to go on and `admits`
        agrees. One page for each request that decodes in the rank is kept back, so that none need leave at once.
        """
        engine = self._engine
        full: set[int] = set()
        for request in self.out:
            if request.dp_rank in full or not admits(request):
                full.add(request.dp_rank)
                continue
            grant = engine.prefix.begin(
                request.rid,
                request.computed_ids,
                pages=self.pages_needed(request),
                cached=request.next_position // engine.spec.page_size,
                spare=engine.scheduler.running_in(request.dp_rank),
                ranks=[request.dp_rank],
            )
            if grant is None:
                full.add(request.dp_rank)
                continue
            self._host.restore(self._out.pop(request.rid).saved, grant.pages, first=grant.cached)
            request.pages = grant.pages
            self._counters["resumed_requests"] += 1
            engine.scheduler.add_running(request)

    def drop(self, request: Request) -> None:
        """Nobody waits for a request any more; one that is not out is fine."""
        entry = self._out.pop(request.rid, None)
        if entry is not None:
            self._host.drop(entry.saved)

    def pages_needed(self, request: Request) -> int:
        """Pages for the next decode step and the one after: that is planned before the first's tokens are known."""
        return self._engine.spec.pages(min(request.next_position + 2, request.max_tokens))

    def stats(self) -> dict[str, float]:
        """Who is out, and how often that has happened."""
        totals: dict[str, float] = {f"{name}_total": value for name, value in self._counters.items()}
        return totals | {"retracted_requests": len(self._out), "host_pages": self._host_pages()}

    def check_integrity(self) -> None:
        """Whoever is out is live."""
        strangers = [rid for rid in self._out if rid not in self._engine.requests]
        if strangers:
            raise AssertionError(f"in host memory, and not live: {strangers}")

    def _missing(self, request: Request) -> int:
        return self.pages_needed(request) - len(request.pages)

    def _host_pages(self) -> int:
        return sum(entry.saved.pages for entry in self._out.values())

    def _retract(self, request: Request) -> None:
        """Take a request out of the pool. Nothing of it is under way."""
        engine = self._engine
        decodes = request.rid in engine.scheduler.running
        pages = request.pages[: engine.spec.pages(request.next_position)]
        bound = engine.limits.host_pages
        kept = decodes and (not bound or self._host_pages() + len(pages) <= bound)
        self._counters["retractions"] += 1
        self._counters["rebootstraps"] += decodes and not kept
        engine.scheduler.remove(request.rid)
        if kept:
            self._out[request.rid] = _Out(request, self._host.save(pages, request.dp_rank))
        engine.give_back_pages(request)
        if not kept:
            request.start_over()
            self._requeue(request)
