"""What a room machine asks its instance to do."""

from __future__ import annotations

from dataclasses import dataclass

from pdjax.disagg.protocol.messages import Handoff, RoomMessage


@dataclass(frozen=True)
class Send:
    """Put a message on the room's link."""

    link: str
    message: RoomMessage


@dataclass(frozen=True)
class Fail:
    """The room has failed: tell the client, give back the request's pages."""

    status: int
    reason: str


@dataclass(frozen=True)
class StartPrefill:
    """Prefill side: the decode side is ready, compute the prompt."""


@dataclass(frozen=True)
class Transfer:
    """Prefill side: gather these pages of the request and write them into the peer's slot."""

    chunk: int
    slot: int
    first_page: int
    pages: int


@dataclass(frozen=True)
class Succeed:
    """Prefill side: the decode side has everything."""


@dataclass(frozen=True)
class GrantSlot:
    """Decode side: find a free staging slot for this chunk, now or later, and report it as `SlotFound`."""

    chunk: int


@dataclass(frozen=True)
class Scatter:
    """Decode side: move a landed chunk from its slot into the request's pages, then report `Scattered`."""

    chunk: int
    slot: int
    first_page: int
    pages: int


@dataclass(frozen=True)
class FreeSlot:
    """Decode side: nothing writes into this slot any more."""

    slot: int


@dataclass(frozen=True)
class Drain:
    """Decode side: the writer is gone; run the transfer worker dry, then report `Drained`."""


@dataclass(frozen=True)
class StartDecode:
    """Decode side: the whole prompt is in its pages; go on from the first token."""

    handoff: Handoff


@dataclass(frozen=True)
class Close:
    """The room is over and holds nothing: forget it."""


Action = Send | Fail | StartPrefill | Transfer | Succeed | GrantSlot | Scatter | FreeSlot | Drain | StartDecode | Close
