"""Who gets pages on a decode instance, and how those that have them get more: see `pdjax.engine.demand`."""

from __future__ import annotations

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
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.retraction = Retraction(engine, requeue=_computes_no_prompt)

    def poll(self) -> None:
        """See that those who decode can go on, and bring back who had to leave."""
        self.retraction.grow()
        self.retraction.resume(self._may_return)

    def reserve(self, request: Request) -> bool:
        """Give a request the pages of its prompt and of its first steps. False: not now."""
        engine = self._engine
        if not engine.has_free_row() or any(out.priority >= request.priority for out in self.retraction.out):
            return False
        # It begins with one output token, so these are what it needs before it can be put out.
        held = engine.spec.pages(min(request.prompt_tokens + 2, request.max_tokens))
        running, moving = self._inside()
        if not self._fit(running, [*moving, self._demand(request, held)]):
            return False
        grant = engine.prefix.begin(request.rid, request.input_ids, pages=held, cached=0)
        if grant is None:
            return False
        request.pages = grant.pages
        return True

    def _may_return(self, request: Request) -> bool:
        running, moving = self._inside()
        return self._fit([*running, self._demand(request, self.retraction.pages_needed(request))], moving)

    def _fit(self, running: list[Demand], moving: list[Demand]) -> bool:
        engine = self._engine
        return fits(engine.allocator.capacity, running=running, moving=moving, locked=engine.prefix.locked_pages)

    def _inside(self) -> tuple[list[Demand], list[Demand]]:
        """Of those that have pages: who decodes, and whose prompt is being moved here."""
        running, moving = [], []
        for request in self._engine.requests.values():
            if request.pages:
                demands = running if request.rid in self._engine.scheduler.running else moving
                demands.append(self._demand(request, len(request.pages)))
        return running, moving

    def _demand(self, request: Request, held: int) -> Demand:
        engine, generated = self._engine, len(request.output_ids)
        most = engine.spec.pages(request.max_tokens)
        fixed = engine.limits.reserved_decode_tokens
        outputs = generated + fixed if fixed else engine.lengths.expected(generated, request.sampling.max_new_tokens)
        likely = engine.spec.pages(request.prompt_tokens + outputs - 1)
        return Demand(held=held, shared=0, expected=min(max(likely, held), most), most=most)


def _computes_no_prompt(request: Request) -> None:
    raise AssertionError(f"a decode instance was computing the prompt of {request.rid}")
