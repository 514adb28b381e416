"""A step between its dispatch and the reading of its tokens."""

from __future__ import annotations

from dataclasses import dataclass

from pdjax.engine.plan import PrefillStep, StepPlan
from pdjax.engine.request import Request
from pdjax.engine.runner import RunningStep


@dataclass(frozen=True)
class Flight:
    """A step that was dispatched and not read. A row's request may have ended since, and its id be another's."""

    step: StepPlan
    requests: list[Request]
    running: RunningStep
    ends_prompt: bool = False
    dispatched: float = 0.0  # seconds of the engine's clock

    @property
    def has_grammar(self) -> bool:
        """Whether the next step's masks depend on the tokens of this one."""
        rows = [self.step.row] if isinstance(self.step, PrefillStep) else self.step.rows
        return any(row.mask for row in rows)
