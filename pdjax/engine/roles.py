"""What the engine asks of a role."""

from __future__ import annotations

from typing import Protocol

from pdjax.engine.plan import PrefillStep
from pdjax.engine.request import OutputToken, Request


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
        """A prefill step that does not end the prompt was dispatched; a later program finds its pages written."""
        ...

    def prompt_done(self, request: Request, step: PrefillStep, token: OutputToken) -> None:
        """The last prefill step of a prompt has run and picked the first token."""
        ...

    def waits_for(self, request: Request) -> str:
        """What a live request waits for, in words; empty: it is being worked on."""
        ...

    def problem(self) -> str | None:
        """Why this instance cannot serve, although its engine steps; None if it can."""
        ...

    def stats(self) -> dict[str, float]:
        """Gauges and counters (`_total`) of the role."""
        ...

    def check_integrity(self) -> None:
        """Raise if the role's books do not add up. Called when nothing is going on."""
        ...
