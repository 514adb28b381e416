"""Which step comes next. Pure: it looks at requests and makes plans, it runs nothing.

Prompts are computed first come, first served, one chunk a step; while requests are decoding, prefill and decode steps
take turns, so that neither starves the other.
"""

from __future__ import annotations

from collections import deque

from pdjax.engine.plan import DecodeStep, PrefillStep, Row, StepPlan
from pdjax.engine.request import Request, banned_tokens


class Scheduler:
    """Holds the requests that have their pages: those to prefill, in order, and those that decode."""

    def __init__(self, *, prefill_tokens: int, eos_token_ids: tuple[int, ...]) -> None:
        self.prefilling: deque[Request] = deque()
        self.running: dict[str, Request] = {}
        self._prefill_tokens = prefill_tokens
        self._eos_token_ids = eos_token_ids
        self._prefilled_last = False

    @property
    def has_work(self) -> bool:
        """Whether `next_step` would return a step."""
        return bool(self.prefilling or self.running)

    def add_prefill(self, request: Request) -> None:
        """Queue a request that has its pages and no computed prompt."""
        self.prefilling.append(request)

    def add_running(self, request: Request) -> None:
        """Take a request whose prompt is computed and whose first token is known."""
        self.running[request.rid] = request

    def remove(self, rid: str) -> None:
        """Forget a request; an unknown one is fine."""
        self.running.pop(rid, None)
        self.prefilling = deque(request for request in self.prefilling if request.rid != rid)

    def next_step(self) -> StepPlan | None:
        """Plan the next step, or None when there is nothing to compute."""
        if self.prefilling and not (self._prefilled_last and self.running):
            self._prefilled_last = True
            return self._prefill_step(self.prefilling[0])
        self._prefilled_last = False
        return self._decode_step(list(self.running.values())) if self.running else None

    def prefilled(self, step: PrefillStep) -> Request | None:
        """Note a computed prefill step. Returns the request if its prompt is complete; it then leaves the queue."""
        request = self.prefilling[0]
        request.computed = step.end
        if request.computed < request.prompt_tokens:
            return None
        return self.prefilling.popleft()

    def _prefill_step(self, request: Request) -> PrefillStep:
        end = min(request.prompt_tokens, request.computed + self._prefill_tokens)
        return PrefillStep(
            row=self._row(request), token_ids=request.input_ids[request.computed : end], start=request.computed
        )

    def _decode_step(self, requests: list[Request]) -> DecodeStep:
        return DecodeStep(
            rows=[self._row(request) for request in requests],
            token_ids=[request.output_ids[-1] for request in requests],
            positions=[request.next_position for request in requests],
        )

    def _row(self, request: Request) -> Row:
        return Row(
            rid=request.rid,
            pages=request.pages,
            sampling=request.sampling,
            seed=request.seed,
            banned=banned_tokens(request, self._eos_token_ids),
        )
