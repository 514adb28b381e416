"""What a room machine asks its instance to do."""

from __future__ import annotations

import msgspec

from pdjax.disagg.protocol.messages import Handoff, PromptLogprobs, RoomMessage


class Send(msgspec.Struct, frozen=True, gc=False):
    """Put a message on the room's link."""

    link: str
    message: RoomMessage


class Fail(msgspec.Struct, frozen=True, gc=False):
    """The room has failed: tell the client, give back the request's pages."""

    status: int
    reason: str


class StartPrefill(msgspec.Struct, frozen=True, gc=False):
    """Prefill side: the decode side is ready, compute the prompt."""


class Transfer(msgspec.Struct, frozen=True, gc=False):
    """Prefill side: gather these pages of the request and write them into the peer's slot."""

    chunk: int
    slot: int
    dp_rank: int  # of the peer
    first_page: int
    pages: int


class Succeed(msgspec.Struct, frozen=True, gc=False):
    """Prefill side: the decode side has everything."""


class GrantSlot(msgspec.Struct, frozen=True, gc=False):
    """Decode side: find a free staging slot for this chunk, now or later, and report it as `SlotFound`."""

    chunk: int


class Scatter(msgspec.Struct, frozen=True, gc=False):
    """Decode side: move a landed chunk from its slot into the request's pages."""

    slot: int
    first_page: int
    pages: int


class FreeSlot(msgspec.Struct, frozen=True, gc=False):
    """Decode side: nothing writes into this slot any more."""

    slot: int


class Drain(msgspec.Struct, frozen=True, gc=False):
    """Decode side: the writer is gone; run the transfer worker dry, then report `Drained`."""


class StartDecode(msgspec.Struct, frozen=True, gc=False):
    """Decode side: the whole prompt is in its pages; go on from the first token."""

    handoff: Handoff
    prompt: tuple[PromptLogprobs, ...] = ()


Action = Send | Fail | StartPrefill | Transfer | Succeed | GrantSlot | Scatter | FreeSlot | Drain | StartDecode
