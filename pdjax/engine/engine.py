"""The engine's loop: take messages, let the role admit, plan a step, run it, hand out its tokens.

All of it runs on one thread, the device thread, which is the only one to touch JAX. Other threads put wire messages,
events for the role, or a `Stop` into its inbox.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from pdjax.cache.ranks import RankedPages
from pdjax.cache.spec import StateSpec
from pdjax.engine.deadlines import Deadlines
from pdjax.engine.demand import OutputLengths
from pdjax.engine.flight import Flight
from pdjax.engine.frames import tokens_frame
from pdjax.engine.grammar import Compiled, GrammarError, Grammars
from pdjax.engine.grammar_queue import GrammarQueue
from pdjax.engine.limits import Limits, refusal
from pdjax.engine.plan import DecodeStep, PrefillStep, StepPlan
from pdjax.engine.request import Finish, OutputToken, Request, finish_of
from pdjax.engine.roles import Role
from pdjax.engine.runner import Runner
from pdjax.engine.scheduler import Scheduler
from pdjax.engine.trace import Trace
from pdjax.wire import (
    Abort,
    Aborted,
    Failed,
    Flush,
    Flushed,
    Generate,
    MoreTokens,
    Query,
    Spans,
    Stats,
    ToFrontend,
    Tokens,
    TraceQuery,
)

IDLE_WAKE = 5.0  # seconds: how often an idle engine looks at its clock


class Emit(Protocol):
    """Takes messages for the frontend, in order."""

    def __call__(self, *messages: ToFrontend) -> None:
        """Together, because each call may cost a system call."""
        ...


@dataclass(frozen=True)
class Stop:
    """Ends the loop; `problem` says what made it end, if it was not asked to."""

    problem: str | None = None


class Engine:
    """One instance's engine. It belongs to the device thread; its inbox is open to all.

    Args:
        inbox: wire messages from the frontend, events for the role, and `Stop`.
        runner: runs the steps and owns the pool.
        pages: of the pool, for each dp rank.
        limits: admission bounds.
        eos_token_ids: tokens that end a request.
        emit: takes messages for the frontend; must not block.
        make_role: makes the role, which keeps this engine.
        prefix_cache: whether pages of ended requests are kept for others; see `pdjax.cache.prefix`.
        grammars: compiles grammars, posting to the inbox; None: requests with a grammar are refused.
        overlap: whether the next step is dispatched before the tokens of the one before are read. The tokens are the
            same either way.
    """

    def __init__(
        self,
        *,
        inbox: queue.SimpleQueue[object],
        runner: Runner,
        scheduler: Scheduler,
        pages: int,
        limits: Limits,
        eos_token_ids: tuple[int, ...],
        emit: Emit,
        make_role: Callable[[Engine], Role],
        prefix_cache: bool = True,
        grammars: Grammars | None = None,
        overlap: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.prefix = RankedPages(
            runner.dp,
            pages=pages,
            rows=-(-limits.max_running_requests // runner.dp),
            page_size=runner.spec.page_size,
            enabled=prefix_cache,
        )
        self.limits = limits
        self.emit = emit
        self.clock = clock
        self.trace = Trace()
        self.lengths = OutputLengths()
        self.requests: dict[str, Request] = {}
        self._eos_token_ids = eos_token_ids
        self._inbox = inbox
        self._grammar_queue = GrammarQueue(grammars)
        self._overlap = overlap
        self._flight: Flight | None = None
        self._checked_at = 0  # steps run when the books were last checked
        self._deadlines = Deadlines()
        self._counters = dict.fromkeys(
            ("steps", "prompt_tokens_computed", "generated_tokens", "finished_requests", "failed_requests",
             "aborted_requests", "expired_requests", "cached_tokens", "cache_hit_requests",
             "integrity_checks"), 0)  # fmt: skip
        self.role = make_role(self)

    @property
    def spec(self) -> StateSpec:
        """The KV state's shape."""
        return self.runner.spec

    @property
    def steps(self) -> int:
        """Steps run so far."""
        return self._counters["steps"]

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
        """Dispatch one step and read the one before; without overlap, or with a grammar, read it as well.

        A request that ends by a token of the step before has one more under way, which is discarded. It writes to a
        page that the request has given back by then: whoever gets that page writes to it in a program that is
        dispatched later, and the pool that goes through both orders them on the device.

        Returns:
            Whether there was anything to do.
        """
        plan = self.scheduler.next_step()
        if plan is None:
            return self.settle()
        self._counters["steps"] += 1
        before, self._flight = self._flight, self._dispatch(plan)
        if before is not None:
            self._read(before)
        if self._flight is not None and (not self._overlap or self._flight.has_grammar):
            self.settle()
        return True

    def settle(self) -> bool:
        """Take in the tokens of a step that was dispatched and not read, so that nothing is under way.

        Returns whether there was one: requests may have ended by it, and given back their pages.
        """
        flight, self._flight = self._flight, None
        if flight is not None:
            self._read(flight)
        return flight is not None

    def has_free_row(self) -> bool:
        """Whether one more request may be admitted."""
        return self.prefix.has_free_row

    def start_decoding(self, request: Request, token: OutputToken) -> None:
        """Hand out a request's first token and go on with it. One that was computed again has its tokens: it goes on
        from the newest of them."""
        self.scheduler.add_running(request)
        if request.output_ids:
            return
        now = self.clock()
        request.timeline["first_token_s"] = now - request.arrived
        self.trace.request("first token", request, request.arrived, now)
        frame = self._tell(request, token, self._take_in(request, token.id))
        if frame is not None:
            self.emit(frame)

    def finish(self, request: Request, finish: Finish, token: OutputToken) -> None:
        """End a request with its last token."""
        self._end(request)
        self.emit(tokens_frame(request, token, finish))

    def begin_prompt(self, request: Request, *, spare: int = 0, ranks: Sequence[int] | None = None) -> bool:
        """Give a request the pages that it begins with, cached ones first. False: there are too few now.

        `ranks` are the dp ranks that it may be in, see `RankedPages.begin`. The last prompt token is always computed:
        the first output token is picked from its logits. `spare` pages remain available.
        """
        self.publish_prompts()
        page_size = self.spec.page_size
        pages = self.spec.pages(request.tokens_to_begin)
        cached = (len(request.prefill_ids) - 1) // page_size if request.use_cache else 0
        found = self.give_pages(request, pages, cached=cached, spare=spare, ranks=ranks)
        if found is None:
            return False
        request.computed = found * page_size
        if not request.output_ids:
            request.cached_tokens = request.computed
        return True

    def publish_prompts(self) -> None:
        """Let newcomers use what there is of the prompts of those here: so requests that come together share."""
        for other in self.requests.values():
            if other.pages:
                self.prefix.publish(other.rid, other.prefill_ids[: other.computed], other.pages)

    def give_pages(
        self, request: Request, pages: int, *, cached: int, spare: int = 0, ranks: Sequence[int] | None = None
    ) -> int | None:
        """Give a request its first pages, at most `cached` of them from the prefix cache; `spare` remain available.

        Returns how many are, and so hold its first tokens already, or None: there are too few pages now.
        """
        grant = self.prefix.begin(
            request.rid, request.prefill_ids, pages=pages, cached=cached, spare=spare, ranks=ranks
        )
        if grant is None:
            return None
        request.dp_rank, request.pages = grant.rank, grant.pages
        self._counters["cached_tokens"] += grant.cached * self.spec.page_size
        self._counters["cache_hit_requests"] += grant.cached > 0
        return grant.cached

    def give_back_pages(self, request: Request) -> None:
        """Take a live request's pages: what it has computed stays in the prefix cache as long as there is room."""
        self.prefix.end(request.rid, request.computed_ids, request.pages)
        request.pages = []

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
            "pages": self.prefix.capacity,
            "free_pages": self.prefix.available,  # cached pages that nobody uses are free for the asking
            "cache_pages": self.prefix.pages,
            "cache_locked_pages": self.prefix.locked_pages,
            "cache_evicted_pages_total": self.prefix.evicted_pages,
            "page_bytes": self.spec.page_bytes,
            **self.role.stats(),
        }

    def check_integrity(self) -> None:
        """Raise unless pages and addresses are as they must be."""
        self.prefix.check_integrity()
        if not self.requests and self.prefix.available != self.prefix.capacity:
            raise AssertionError(
                f"no request is live and {self.prefix.available} of {self.prefix.capacity} pages are available"
            )
        self.runner.check_integrity()
        self.role.check_integrity()

    def _take_messages(self) -> Stop | None:
        """Handle all that is in the inbox; a `Stop` ends it. Then fail the requests whose deadline has passed."""
        while True:
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                self._expire()
                return None
            if isinstance(item, Stop):
                return item
            self._handle(item)

    def _wait(self, deadline: float | None) -> None:
        """Sleep until something comes or a deadline is due."""
        if not self.requests and self._checked_at != self._counters["steps"]:
            self._checked_at = self._counters["steps"]  # once after each bout of work: it looks at every page
            self.check_integrity()
            self._counters["integrity_checks"] += 1
        now = self.clock()
        due = min(each for each in (now + IDLE_WAKE, self._deadlines.next(), deadline) if each is not None)
        try:
            item = self._inbox.get(timeout=max(0.0, due - now))
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
                    self._withdraw(request, item.reason)
                    self._forget(request)
                self.emit(Aborted(item.rid))
            case Compiled():
                self._take_grammar(item)
            case Flush():
                self.emit(Flushed(item.id, freed_pages=self.prefix.flush(), locked_pages=self.prefix.pages))
            case Query():
                self.emit(Stats(item.id, self.stats(), self.role.problem()))
            case TraceQuery():
                self.emit(Spans(item.id, self.trace.spans()))
            case _:
                self.role.on_event(item)

    def accept(self, request: Request) -> tuple[int, str] | None:
        """Take a request in, for its role to go on with. Returns status and sentence if it can't be taken."""
        problem = refusal(
            request,
            limits=self.limits,
            live=self.requests,
            spec=self.spec,
            pages=self.prefix.rank_capacity,
            vocab=self.runner.vocab,
            grammars=self._grammar_queue.takes_grammars,
            eos_token_ids=self._eos_token_ids,
            dp=self.runner.dp,
        )
        if problem is None:
            request.arrived = self.clock()
            self.requests[request.rid] = request
            self._deadlines.add(request)
        return problem

    def _submit(self, request: Request) -> None:
        problem = self.accept(request)
        if problem is not None:
            self._counters["failed_requests"] += 1
            self.emit(Failed(request.rid, *problem))
        elif not self._grammar_queue.push(request):
            self.role.submit(request)

    def _take_grammar(self, compiled: Compiled) -> None:
        """A grammar is there: its request goes on, if it still lives."""
        request = self._grammar_queue.pop(compiled)
        if request is None:
            return
        if compiled.matcher is None:
            self.fail(request, 400, compiled.error)
            return
        request.matcher = compiled.matcher
        if not self._follow(request, request.output_ids):
            return
        if request.matcher.complete:
            self.fail(request, 400, "the output so far is a complete answer by its grammar")
        else:
            self.role.submit(request)

    def _follow(self, request: Request, tokens: Sequence[int]) -> bool:
        """Take tokens into a request's grammar, and find what may come next. False: it has failed."""
        if request.matcher is None:
            return True
        try:
            for token in tokens:
                request.matcher.advance(token)
            request.mask = request.matcher.mask()
        except GrammarError as error:
            self.fail(request, error.status, f"structured output: {error}")
            return False
        return True

    def _withdraw(self, request: Request, reason: str) -> None:
        """Nobody waits for a request any more: whoever has it lets go of it."""
        if not self._grammar_queue.discard(request):
            self.role.abort(request, reason)

    def _expire(self) -> None:
        """End the requests whose deadline has passed, wherever they are."""
        now = self.clock()
        for request in self._deadlines.passed(now, self.requests):
            message = (
                f"the request did not end within its deadline of {request.deadline_s:g} s: "
                f"{len(request.output_ids)} of at most {request.sampling.max_new_tokens} tokens were generated"
            )
            waits_for = "its grammar" if request in self._grammar_queue else self.role.waits_for(request)
            message += f", and it waited for {waits_for}" if waits_for else ""
            self._counters["expired_requests"] += 1
            self._withdraw(request, message)
            self.fail(request, 504, message)

    def _dispatch(self, step: StepPlan) -> Flight:
        now = self.clock()
        match step:
            case PrefillStep():
                request = self.requests[step.row.rid]
                if step.start == request.cached_tokens:
                    self.trace.request("queue", request, request.arrived, now)
                self.role.prefilling(request, step)
                running = self.runner.dispatch(step)
                self._counters["prompt_tokens_computed"] += len(step.token_ids)
                ends_prompt = self.scheduler.prefilled(step) is not None
                if not ends_prompt:
                    self.role.prefilled(request, step)
                return Flight(step, [request], running, ends_prompt, now)
            case DecodeStep():
                requests = [self.requests[row.rid] for row in step.rows]
                running = self.runner.dispatch(step)
                for request in requests:
                    request.pending += 1
                return Flight(step, requests, running, dispatched=now)

    def _read(self, flight: Flight) -> None:
        """Wait for a step's tokens and hand them out, but for those of requests that have ended."""
        result, step = flight.running.read(), flight.step
        self.trace.computed(flight, self.clock())
        if isinstance(step, PrefillStep):
            request = flight.requests[0]
            if self.requests.get(request.rid) is not request:
                return
            if request.wants_prompt_logprobs and not request.output_ids:
                known, top = ([None], [[]]) if step.start == 0 else (request.prompt_logprobs, request.prompt_top)
                request.prompt_logprobs = [*known, *result.prompt_logprobs]
                request.prompt_top = [*top, *result.prompt_top]
            if flight.ends_prompt:
                token = OutputToken(result.token_ids[0], result.logprobs[0], result.top[0])
                self.role.prompt_done(request, step, token)
            return
        frames: list[ToFrontend] = []
        going_on = MoreTokens([], [], [])
        for request, token_id, logprob, top in zip(
            flight.requests, result.token_ids, result.logprobs, result.top, strict=True
        ):
            request.pending -= 1
            if self.requests.get(request.rid) is not request:
                continue
            finish = self._take_in(request, token_id)
            if finish is None and not top and request.matcher is None:
                going_on.rids.append(request.rid)
                going_on.token_ids.append(token_id)
                going_on.logprobs.append(logprob)
            else:
                frame = self._tell(request, OutputToken(token_id, logprob, top), finish)
                if frame is not None:
                    frames.append(frame)
        if going_on.rids:
            frames.append(going_on)
        self.emit(*frames)

    def _take_in(self, request: Request, token_id: int) -> Finish | None:
        """A new token of a request. Returns why it ends the request, if it does."""
        request.output_ids.append(token_id)
        self._counters["generated_tokens"] += 1
        return finish_of(request, self._eos_token_ids)

    def _tell(self, request: Request, token: OutputToken, finish: Finish | None) -> Tokens | None:
        """What to tell of a request's newest token, or None if the request has failed by it."""
        if finish is None and not self._follow(request, [token.id]):
            return None
        if finish is None and request.matcher is not None and request.matcher.complete:
            finish = Finish("stop")
        if finish is not None:
            self._end(request)
        return tokens_frame(request, token, finish)

    def _end(self, request: Request) -> None:
        """A request has its last token."""
        now = self.clock()
        request.timeline["total_s"] = now - request.arrived
        self.trace.finished(request, now)
        self._counters["finished_requests"] += 1
        self.lengths.add(len(request.output_ids))
        self._forget(request)

    def _forget(self, request: Request) -> None:
        self.requests.pop(request.rid, None)
        self.scheduler.remove(request.rid)
        self.give_back_pages(request)
