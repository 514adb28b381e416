"""What the engine asks of a role, and the role that needs no other instance: unified."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Protocol

from pdjax.engine.plan import PrefillStep
from pdjax.engine.request import Request

if TYPE_CHECKING:
    from pdjax.engine.engine import Engine


class Role(Protocol):
    """Called on the device thread only, between steps."""

    name: str

    def submit(self, request: Request) -> None:
        """A request has arrived and has passed the engine's own checks."""
        ...

    def abort(self, request: Request, reason: str) -> None:
        """Nobody waits for this live request any more; the role gives back what it holds for it."""
        ...

    def on_event(self, event: object) -> None:
        """Something that was posted to the engine for the role: a network or transfer event."""
        ...

    def poll(self, now: float) -> float | None:
        """Admit what can be admitted, fire what is due. Returns when to call again at the latest (monotonic)."""
        ...

    def prefilling(self, request: Request, step: PrefillStep) -> None:
        """A prefill step is about to run."""
        ...

    def prefilled(self, request: Request, step: PrefillStep) -> None:
        """A prefill step that does not end the prompt has run."""
        ...

    def prompt_done(self, request: Request, step: PrefillStep, token: int, logprob: float) -> None:
        """The last prefill step of a prompt has run and picked the first token."""
        ...

    def stats(self) -> dict[str, float]:
        """Gauges and counters (`_total`) of the role."""
        ...

    def check_integrity(self) -> None:
        """Raise if the role's books do not add up. Called when nothing is going on."""
        ...


class Unified:
    """Prefills and decodes in one instance. A request is admitted when all pages it can need are free, in order."""

    name = "unified"

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._waiting: deque[Request] = deque()

    def submit(self, request: Request) -> None:
        """Queue for admission."""
        self._waiting.append(request)

    def abort(self, request: Request, reason: str) -> None:
        """Leave the queue, if still there."""
        if request in self._waiting:
            self._waiting.remove(request)

    def on_event(self, event: object) -> None:
        """A unified instance has no peers."""
        raise TypeError(f"a unified instance was sent {type(event).__name__}")

    def poll(self, now: float) -> float | None:
        """Admit from the front while pages last."""
        engine = self._engine
        while self._waiting and engine.has_free_row():
            request = self._waiting[0]
            pages = engine.allocator.allocate(request.rid, engine.spec.pages(request.max_tokens))
            if pages is None:
                break
            request.pages = pages
            engine.scheduler.add_prefill(self._waiting.popleft())
        return None

    def prefilling(self, request: Request, step: PrefillStep) -> None:
        """Note how long the request waited."""
        if step.start == 0:
            request.timeline["queue_s"] = self._engine.clock() - request.arrived

    def prefilled(self, request: Request, step: PrefillStep) -> None:
        """The next chunk follows by itself."""

    def prompt_done(self, request: Request, step: PrefillStep, token: int, logprob: float) -> None:
        """Decode here."""
        request.timeline["prefill_s"] = self._engine.clock() - request.arrived - request.timeline["queue_s"]
        self._engine.start_decoding(request, token, logprob)

    def stats(self) -> dict[str, float]:
        """Length of the queue."""
        return {"waiting_requests": len(self._waiting)}

    def check_integrity(self) -> None:
        """Nothing beyond the engine's own books."""
