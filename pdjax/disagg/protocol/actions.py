"""What a room machine asks its instance to do."""

from __future__ import annotations

from pdjax.disagg.protocol.messages import Handoff, PromptLogprobs, RoomMessage


class Send:
    """Put a message on the room's link."""

    __match_args__ = ("link", "message")

    def __init__(self, link: str, message: RoomMessage) -> None:
        self.link = link
        self.message = message


class Fail:
    """The room has failed: tell the client, give back the request's pages."""

    __match_args__ = ("status", "reason")

    def __init__(self, status: int, reason: str) -> None:
        self.status = status
        self.reason = reason


class StartPrefill:
    """Prefill side: the decode side is ready, compute the prompt."""


class Transfer:
    """Prefill side: gather these pages of the request and write them into the peer's slot."""

    __match_args__ = ("chunk", "slot", "dp_rank", "first_page", "pages")

    def __init__(self, chunk: int, slot: int, dp_rank: int, first_page: int, pages: int) -> None:
        self.chunk = chunk
        self.slot = slot
        self.dp_rank = dp_rank  # of the peer
        self.first_page = first_page
        self.pages = pages


class Succeed:
    """Prefill side: the decode side has everything."""


class GrantSlot:
    """Decode side: find a free staging slot for this chunk, now or later, and report it as `SlotFound`."""

    __match_args__ = ("chunk",)

    def __init__(self, chunk: int) -> None:
        self.chunk = chunk


class Scatter:
    """Decode side: move a landed chunk from its slot into the request's pages."""

    __match_args__ = ("slot", "first_page", "pages")

    def __init__(self, slot: int, first_page: int, pages: int) -> None:
        self.slot = slot
        self.first_page = first_page
        self.pages = pages


class FreeSlot:
    """Decode side: nothing writes into this slot any more."""

    __match_args__ = ("slot",)

    def __init__(self, slot: int) -> None:
        self.slot = slot


class Drain:
    """Decode side: the writer is gone; run the transfer worker dry, then report `Drained`. `cut_off`: descriptions of a
    writer's processes that are out of reach instead: first see to it that nothing of theirs comes any more."""

    __match_args__ = ("cut_off",)

    def __init__(self, cut_off: tuple[bytes, ...] = ()) -> None:
        self.cut_off = cut_off


class StartDecode:
    """Decode side: the whole prompt is in its pages; go on from the first token."""

    __match_args__ = ("handoff", "prompt")

    def __init__(self, handoff: Handoff, prompt: tuple[PromptLogprobs, ...] = ()) -> None:
        self.handoff = handoff
        self.prompt = prompt


Action = Send | Fail | StartPrefill | Transfer | Succeed | GrantSlot | Scatter | FreeSlot | Drain | StartDecode
