"""The engine's loop: take messages, let the role admit, plan a step, run it, hand out its tokens.

All of it runs on one thread, the device thread, which is the only one to touch JAX. Other threads put wire messages,
events for the role, or a `Stop` into its inbox.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from dataclasses import dataclass

from pdjax.cache.allocator import PageAllocator
from pdjax.cache.spec import StateSpec
from pdjax.engine.plan import DecodeStep, PrefillStep
from pdjax.engine.request import Finish, Request, finish_of
from pdjax.engine.roles import Role
from pdjax.engine.runner import Runner, StepResult
from pdjax.engine.scheduler import Scheduler
from pdjax.wire import Abort, Failed, Generate, Query, Stats, ToFrontend, Tokens

IDLE_WAKE = 5.0  # seconds: how often an idle engine looks at its clock


@dataclass(frozen=True)
class Limits:
    """What one instance takes on; see `pdjax.config.Engine`."""

    max_context: int
    max_running_requests: int
    max_queued_requests: int


@dataclass(frozen=True)
class Stop:
    """Ends the loop; `problem` says what made it end, if it was not asked to."""

    problem: str | None = None


class Engine:
    """One instance's engine. It belongs to the device thread; its inbox is open to all.

    Args:
        inbox: wire messages from the frontend, events for the role, and `Stop`.
        runner: runs the steps and owns the pool.
        allocator: the pool's pages.
        limits: admission bounds.
        eos_token_ids: tokens that end a request.
        emit: takes a message for the frontend; must not block.
        make_role: makes the role, which keeps this engine.
    """

    def __init__(
        self,
        *,
        inbox: queue.SimpleQueue[object],
        runner: Runner,
        scheduler: Scheduler,
        allocator: PageAllocator,
        limits: Limits,
        eos_token_ids: tuple[int, ...],
        emit: Callable[[ToFrontend], None],
        make_role: Callable[[Engine], Role],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.allocator = allocator
        self.limits = limits
        self.emit = emit
        self.clock = clock
        self.requests: dict[str, Request] = {}
        self._eos_token_ids = eos_token_ids
        self._inbox = inbox
        self._counters = dict.fromkeys(
            ("steps", "prompt_tokens_computed", "generated_tokens", "finished_requests", "failed_requests",
             "aborted_requests"), 0)  # fmt: skip
        self.role = make_role(self)

    @property
    def spec(self) -> StateSpec:
        """The KV state's shape."""
        return self.runner.spec

    def run(self) -> Stop:
        """Loop until a `Stop` comes, and return it."""
        while True:
            stop = self._take_messages()
            if stop is not None:
                return stop
            deadline = self.role.poll(self.clock())
            if not self.step():
                self._wait(deadline)

    def step(self) -> bool:
        """Run one step. Returns whether there was one."""
        plan = self.scheduler.next_step()
        if plan is None:
            return False
        self._counters["steps"] += 1
        match plan:
            case PrefillStep():
                self._prefill(plan)
            case DecodeStep():
                self._decode(plan, self.runner.run(plan))
        return True

    def has_free_row(self) -> bool:
        """Whether one more request may be admitted."""
        return self.allocator.owners < self.limits.max_running_requests

    def start_decoding(self, request: Request, token: int, logprob: float) -> None:
        """Hand out a request's first token and go on with it."""
        request.timeline["first_token_s"] = self.clock() - request.arrived
        self.scheduler.add_running(request)
        self._append(request, token, logprob)

    def finish(self, request: Request, finish: Finish, token_ids: list[int], logprobs: list[float]) -> None:
        """End a request with its last tokens."""
        elapsed = self.clock() - request.arrived
        request.timeline["total_s"] = elapsed
        self._counters["finished_requests"] += 1
        self._forget(request)
        self.emit(
            Tokens(
                request.rid,
                token_ids,
                logprobs,
                finish_reason=finish.reason,
                matched=finish.matched,
                timeline=request.timeline,
            )
        )

    def fail(self, request: Request, status: int, message: str) -> None:
        """End a request without an answer, and say why to the one who waits for it."""
        self._counters["failed_requests"] += 1
        self._forget(request)
        self.emit(Failed(request.rid, status, message))

    def stats(self) -> dict[str, float]:
        """Counters (`_total`) and gauges of the engine and its role."""
        totals: dict[str, float] = {f"{name}_total": value for name, value in self._counters.items()}
        return totals | {
            "compiles_after_warmup_total": self.runner.compiles_after_warm_up,
            "running_requests": len(self.scheduler.running),
            "prefilling_requests": len(self.scheduler.prefilling),
            "live_requests": len(self.requests),
            "pages": self.allocator.capacity,
            "free_pages": self.allocator.free_pages,
            "page_bytes": self.spec.page_bytes,
            **self.role.stats(),
        }

    def check_integrity(self) -> None:
        """Raise unless pages and addresses are as they must be."""
        self.allocator.check_integrity()
        self.runner.check_integrity()
        self.role.check_integrity()

    def _take_messages(self) -> Stop | None:
        """Handle all that is in the inbox; a `Stop` ends it."""
        while True:
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                return None
            if isinstance(item, Stop):
                return item
            self._handle(item)

    def _wait(self, deadline: float | None) -> None:
        """Sleep until something comes or a deadline is due."""
        if not self.requests:
            self.check_integrity()
        timeout = IDLE_WAKE if deadline is None else min(IDLE_WAKE, max(0.0, deadline - self.clock()))
        try:
            item = self._inbox.get(timeout=timeout)
        except queue.Empty:
            return
        if isinstance(item, Stop):
            self._inbox.put(item)
        else:
            self._handle(item)

    def _handle(self, item: object) -> None:
        match item:
            case Generate():
                self._submit(Request.from_wire(item))
            case Abort():
                request = self.requests.get(item.rid)
                if request is not None:
                    self._counters["aborted_requests"] += 1
                    self.role.abort(request, item.reason)
                    self._forget(request)
            case Query():
                self.emit(Stats(item.id, self.stats()))
            case _:
                self.role.on_event(item)

    def _submit(self, request: Request) -> None:
        problem = self._problem(request)
        if problem is not None:
            self._counters["failed_requests"] += 1
            self.emit(Failed(request.rid, *problem))
            return
        self.requests[request.rid] = request
        self.role.submit(request)

    def _problem(self, request: Request) -> tuple[int, str] | None:
        """Status and sentence for a request that can't be taken."""
        limits, needed = self.limits, self.spec.pages(request.max_tokens)
        if request.rid in self.requests:
            return 400, f"a request with the id {request.rid!r} is running already"
        if not request.input_ids or request.sampling.max_new_tokens < 1:
            return 400, "a request needs at least one prompt token and one new token"
        if request.prompt_tokens + request.sampling.max_new_tokens > limits.max_context:
            return 400, (
                f"{request.prompt_tokens} prompt tokens and {request.sampling.max_new_tokens} new ones are over the "
                f"{limits.max_context} that a request may have"
            )
        if needed > self.allocator.capacity:
            return 400, f"the request needs {needed} pages and this instance has {self.allocator.capacity} in all"
        if len(self.requests) >= limits.max_running_requests + limits.max_queued_requests:
            return 429, f"{len(self.requests)} requests are waiting already; try again later"
        return None

    def _prefill(self, step: PrefillStep) -> None:
        request = self.requests[step.row.rid]
        self.role.prefilling(request, step)
        result = self.runner.run(step)
        self._counters["prompt_tokens_computed"] += len(step.token_ids)
        if self.scheduler.prefilled(step) is None:
            self.role.prefilled(request, step)
        else:
            self.role.prompt_done(request, step, result.token_ids[0], result.logprobs[0])

    def _decode(self, step: DecodeStep, result: StepResult) -> None:
        for row, token, logprob in zip(step.rows, result.token_ids, result.logprobs, strict=True):
            self._append(self.requests[row.rid], token, logprob)

    def _append(self, request: Request, token: int, logprob: float) -> None:
        request.output_ids.append(token)
        self._counters["generated_tokens"] += 1
        finish = finish_of(request, self._eos_token_ids)
        if finish is None:
            self.emit(Tokens(request.rid, [token], [logprob]))
        else:
            self.finish(request, finish, [token], [logprob])

    def _forget(self, request: Request) -> None:
        self.requests.pop(request.rid, None)
        self.scheduler.remove(request.rid)
        self.allocator.release(request.rid)
