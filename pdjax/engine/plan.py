"""What one step computes. The scheduler makes it, every rank of the instance runs it."""

from __future__ import annotations

import msgspec

from pdjax.wire import SamplingParams

NO_SLOT = 2**31 - 1  # past any table of slots: reads are clipped, writes are dropped
ON_DEVICE = -1  # in place of a token id: the one that the step before has picked for this slot


class History(msgspec.Struct, frozen=True):
    """The tokens that a request's penalties look back on: its prompt, and its output but for the newest token."""

    prompt_ids: list[int]
    output_ids: list[int]


class Row(msgspec.Struct, frozen=True):
    """One request's part in a step: its pages in order and how its next token is picked.

    `slot` is its place in the tables that stay on the device. `history` comes with the first step in which a request
    that needs them uses its slot: before that step the slot's tables are written from it and from `sampling`. `mask`
    has a bit for each token that a grammar allows, as little-endian 32-bit words; empty for all. `top` is how many of
    the best tokens are told. `pages` are those of its `dp_rank`.
    """

    rid: str
    pages: list[int]
    sampling: SamplingParams
    seed: int
    banned: tuple[int, ...] = ()
    slot: int = NO_SLOT
    history: History | None = None
    mask: bytes = b""
    top: int = 0
    dp_rank: int = 0


class PrefillStep(msgspec.Struct, frozen=True, tag_field="type", tag="prefill"):
    """Compute `token_ids`, positions `start` and on, of one prompt; the token after them is picked from the last.

    `targets`, if any, are the prompt's tokens at the positions after those of `token_ids`, one fewer at its end: their
    log-probabilities are told too.
    """

    row: Row
    token_ids: list[int]
    start: int
    targets: list[int] = []

    @property
    def end(self) -> int:
        """Position after the last computed token."""
        return self.start + len(self.token_ids)


class DecodeStep(msgspec.Struct, frozen=True, tag_field="type", tag="decode"):
    """Compute one token of each row, at its position, and pick the next. A token may be `ON_DEVICE`."""

    rows: list[Row]
    token_ids: list[int]
    positions: list[int]


StepPlan = PrefillStep | DecodeStep
