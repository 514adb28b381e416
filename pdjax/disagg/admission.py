"""Who gets pages on a decode instance, and how those that have them get more: see `pdjax.engine.demand`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pdjax.engine.demand import Demand, fits
from pdjax.engine.request import Request
from pdjax.engine.retraction import Retraction

if TYPE_CHECKING:
    from pdjax.engine.engine import Engine


class Admission:
    """Lets requests into the pool of a decode instance, for as much as they are likely to need.

    Who is out of the pool comes back first: meanwhile no request of the same priority or less is let in. Those that are
    being moved here go on.

    Args:
        requeue: see `Retraction`.
    """

    def __init__(self, engine: Engine, requeue: Callable[[Request], None]) -> None:
        self._engine = engine
        self.retraction = Retraction(engine, requeue)
        self._refused: tuple[Request | None, int, int, set[int]] = (None, 0, 0, set())

    def poll(self) -> None:
        """See that those who decode can go on, and bring back who had to leave."""
        self.retraction.grow()
        self.retraction.resume(self._may_return)

    def reserve(self, request: Request, *, share: bool) -> int | None:
        """Give a request the pages of its prompt and of its first steps in a dp rank, with `share` what is cached of it
        first. Of one that is computed again, its tokens so far are the prompt.

        Returns how many pages, from the first on, hold the prompt already; or None: not now.
        """
        engine = self._engine
        if not engine.has_free_row():
            return None
        closed = {out.dp_rank for out in self.retraction.out if out.priority >= request.priority}
        # Asked before each step. Who decodes only needs more, until somebody's pages come back or a prompt is here.
        asked = (request, engine.prefix.ended, len(engine.scheduler.running), closed)
        if asked == self._refused:
            return None
        self._refused = asked
        engine.publish_prompts()
        held = engine.spec.pages(request.tokens_to_begin)
        cached = len(request.prefill_ids) // engine.spec.page_size if share else 0
        fitting = [
            rank for rank in self._ranks(request) if rank not in closed and self._fits(request, rank, held, cached)
        ]
        return engine.give_pages(request, held, cached=cached, ranks=fitting)

    def _ranks(self, request: Request) -> list[int]:
        """The dp ranks that it may be in, best first: every decode step has as many rows as the fullest one."""
        if request.wanted_rank is not None:
            return [request.wanted_rank]
        prefix = self._engine.prefix
        return prefix.by_text(request.prefill_ids) if request.sample_of else prefix.by_load(request.prefill_ids)

    def _fits(self, request: Request, rank: int, held: int, cached: int) -> bool:
        """Whether a dp rank has room for it, if it is given `held` pages there, at most `cached` of them cached."""
        known = self._engine.prefix.ranks[rank].known(request.prefill_ids, cached)
        running, moving = self._inside(rank)
        moving.append(self._demand(request, held, known))
        return fits(self._engine.prefix.rank_capacity, running=running, moving=moving)

    def _may_return(self, request: Request) -> bool:
        engine, held, rank = self._engine, self.retraction.pages_needed(request), request.dp_rank
        known = engine.prefix.ranks[rank].known(request.computed_ids, request.next_position // engine.spec.page_size)
        running, moving = self._inside(rank)
        running.append(self._demand(request, held, known))
        return fits(engine.prefix.rank_capacity, running=running, moving=moving)

    def _inside(self, rank: int) -> tuple[list[Demand], list[Demand]]:
        """Of those that have pages in a dp rank: who decodes, and whose prompt is being moved here."""
        running, moving = [], []
        for request in self._engine.requests.values():
            if request.pages and request.dp_rank == rank:
                demands = running if request.rid in self._engine.scheduler.running else moving
                shared = request.pages[: self._engine.prefix.shared(request.rid)]
                demands.append(self._demand(request, len(request.pages), shared))
        return running, moving

    def _demand(self, request: Request, held: int, shared: list[int]) -> Demand:
        engine, generated = self._engine, len(request.output_ids)
        most = engine.spec.pages(request.max_tokens)
        fixed = engine.limits.reserved_decode_tokens
        outputs = generated + fixed if fixed else engine.lengths.expected(generated, request.sampling.max_new_tokens)
        likely = engine.spec.pages(request.prompt_tokens + outputs - 1)
        return Demand(held=held, shared=frozenset(shared), expected=min(max(likely, held), most), most=most)
