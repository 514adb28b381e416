"""Which step comes next. Pure: it looks at requests and makes plans, it runs nothing.

Prompts are computed one after the other, higher priorities first, one chunk a step. While requests are decoding,
prefill and decode steps take turns by tokens: between two decode steps at most `prefill_tokens` prompt tokens are
computed, in one large chunk or several short prompts, so that neither long prompts nor many of them starve those who
decode.
"""

from __future__ import annotations

import heapq
from collections import deque

from pdjax.engine.plan import ON_DEVICE, DecodeStep, History, PrefillStep, Row, StepPlan
from pdjax.engine.request import Request, banned_tokens
from pdjax.engine.rows import uses_slot


class Scheduler:
    """Holds the requests that have their pages: those to prefill, in order, and those that decode."""

    def __init__(self, *, prefill_tokens: int, eos_token_ids: tuple[int, ...]) -> None:
        self.prefilling: deque[Request] = deque()
        self.running: dict[str, Request] = {}
        self._prefill_tokens = prefill_tokens
        self._eos_token_ids = eos_token_ids
        self._slots: dict[str, int] = {}  # by request id
        self._free_slots: list[int] = []  # a heap of those below the most that were in use together
        self._written: set[str] = set()  # requests whose slots hold their history
        self._rows: dict[str, Row] = {}  # each request's latest of those that pick a token, for as long as it holds
        self._budget = prefill_tokens  # prompt tokens that may be computed before the next decode step

    @property
    def has_work(self) -> bool:
        """Whether `next_step` would return a step."""
        return bool(self.prefilling or self.running)

    def running_in(self, dp_rank: int) -> int:
        """How many decode in a dp rank."""
        return sum(request.dp_rank == dp_rank for request in self.running.values())

    def add_prefill(self, request: Request) -> None:
        """Queue a request that has its pages, behind those of its priority and above."""
        place = sum(other.priority >= request.priority for other in self.prefilling)
        self.prefilling.insert(place, request)

    def add_running(self, request: Request) -> None:
        """Take a request whose prompt is computed and whose first token is known."""
        self.running[request.rid] = request

    def remove(self, rid: str) -> None:
        """Forget a request; an unknown one is fine."""
        self.running.pop(rid, None)
        self._written.discard(rid)
        self._rows.pop(rid, None)
        if rid in self._slots:
            heapq.heappush(self._free_slots, self._slots.pop(rid))
        self.prefilling = deque(request for request in self.prefilling if request.rid != rid)

    def next_step(self) -> StepPlan | None:
        """Plan the next step, or None when there is nothing to compute."""
        if not self.running:
            self._budget = self._prefill_tokens
        if self.prefilling:
            request = self.prefilling[0]
            tokens = min(len(request.prefill_ids) - request.computed, self._prefill_tokens)
            if not self.running or tokens <= self._budget:
                self._budget -= tokens
                return self._prefill_step(request, request.computed + tokens)
        self._budget = self._prefill_tokens
        # Whoever is known to end with a token that is under way takes no further part.
        going_on = [
            request
            for request in self.running.values()
            if len(request.output_ids) + request.pending < request.sampling.max_new_tokens
        ]
        return self._decode_step(going_on) if going_on else None

    def prefilled(self, step: PrefillStep) -> Request | None:
        """Note a computed prefill step. Returns the request if its prompt is complete; it then leaves the queue."""
        request = next(request for request in self.prefilling if request.rid == step.row.rid)
        request.computed = step.end
        if request.computed < len(request.prefill_ids):
            return None
        self.prefilling.remove(request)
        return request

    def _prefill_step(self, request: Request, end: int) -> PrefillStep:
        # What is computed again has its next token already.
        new, ids = not request.output_ids, request.prefill_ids
        return PrefillStep(
            row=self._row(request, picks=new and end == len(ids)),
            token_ids=ids[request.computed : end],
            start=request.computed,
            targets=ids[request.computed + 1 : end + 1] if new and request.wants_prompt_logprobs else [],
        )

    def _decode_step(self, requests: list[Request]) -> DecodeStep:
        rows = []
        for request in requests:
            row = self._rows.get(request.rid)
            # Most rows are as they were in the step before, and `_row` takes many times as long to find that.
            if row is None or row.pages is not request.pages or row.history or row.banned or row.mask or request.mask:
                row = self._row(request, picks=True)
            rows.append(row)
        return DecodeStep(
            rows=rows,
            token_ids=[ON_DEVICE if request.pending else request.output_ids[-1] for request in requests],
            positions=[request.next_position + request.pending for request in requests],
        )

    def _row(self, request: Request, *, picks: bool) -> Row:
        """A row of a step that will be run: the same object as long as it says the same.

        `picks`: whether the token that it picks for this row is used.
        """
        history = None
        if picks and uses_slot(request.sampling) and request.rid not in self._written:
            self._written.add(request.rid)
            history = History(request.input_ids, request.output_ids[:-1])
        banned, mask = banned_tokens(request, self._eos_token_ids), request.mask if picks else b""
        row = self._rows.get(request.rid)
        if row is None or history or row.history or (row.pages, row.banned, row.mask) != (request.pages, banned, mask):
            row = Row(
                rid=request.rid,
                pages=request.pages,
                sampling=request.sampling,
                seed=request.seed,
                banned=banned,
                slot=self._slot(request.rid),
                history=history,
                mask=mask,
                top=request.top_logprobs,
                dp_rank=request.dp_rank,
            )
            if picks:
                self._rows[request.rid] = row
        return row

    def _slot(self, rid: str) -> int:
        """A request's slot, from its first step until it is removed. Slots are as few as requests with pages."""
        if rid not in self._slots:
            self._slots[rid] = heapq.heappop(self._free_slots) if self._free_slots else len(self._slots)
        return self._slots[rid]
