"""What one step computes. The scheduler makes it, every rank of the instance runs it."""

from __future__ import annotations

import msgspec

from pdjax.wire import SamplingParams


class Row(msgspec.Struct, frozen=True):
    """One request's part in a step: its pages in order and how its next token is picked."""

    rid: str
    pages: list[int]
    sampling: SamplingParams
    seed: int
    banned: tuple[int, ...] = ()


class PrefillStep(msgspec.Struct, frozen=True, tag_field="type", tag="prefill"):
    """Compute `token_ids`, positions `start` and on, of one prompt; the token after them is picked from the last."""

    row: Row
    token_ids: list[int]
    start: int

    @property
    def end(self) -> int:
        """Position after the last computed token."""
        return self.start + len(self.token_ids)


class DecodeStep(msgspec.Struct, frozen=True, tag_field="type", tag="decode"):
    """Compute one token of each row, at its position, and pick the next."""

    rows: list[Row]
    token_ids: list[int]
    positions: list[int]


StepPlan = PrefillStep | DecodeStep
