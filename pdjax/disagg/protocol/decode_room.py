"""A room as its decode side sees it: events in, actions out. Each event is a method."""

from __future__ import annotations

import msgspec

from pdjax.disagg.protocol import messages as wire
from pdjax.disagg.protocol.actions import Action, Drain, Fail, FreeSlot, GrantSlot, Scatter, Send, StartDecode
from pdjax.disagg.protocol.prefill_room import Timeouts
from pdjax.disagg.protocol.room import Room
from pdjax.disagg.protocol.states import BOOTSTRAPPING, FAILED, SUCCESS, TRANSFERRING, WAITING_FOR_INPUT


class Reserved(msgspec.Struct, frozen=True, gc=False):
    """What a room is claimed with. `has_pages`: the request's pages are reserved, too. `tokens`: see `Rebootstrap`."""

    link: str
    generation: int
    prompt_tokens: int
    prompt_digest: bytes
    pages: int  # that hold the prompt
    has_pages: bool = True
    first_page: int = 0  # of these, the first that is not filled already
    dp_rank: int = 0
    tokens: bytes = b""
    priority: int = 0


MAX_RESENDS = 2  # of one chunk


class DecodeRoom(Room):
    """The machine. Each event is a method that returns what is to be done, in order; `now` is in seconds of one clock
    that never goes back.

    Under the policy `prefill_complete` a room is claimed before it has pages, gets them when the prompt is computed,
    and is granted no slot until then.

    Slots are what must outlive a failure: a granted slot that has not landed may still be written to, so it is freed
    only by the prefill side's `AbortAck`, or when that side is known to be gone and the transfer worker has run dry. A
    lost link alone is no such proof: the slots stay in quarantine until one of the two comes. Pages are written by this
    side's own scatters only, and are free as soon as `Fail` is out.
    """

    def __init__(self, room: int, timeouts: Timeouts, page_bytes: int) -> None:
        super().__init__(room)
        self.timeouts = timeouts
        self.page_bytes = page_bytes
        self.peer = ""  # the link's name, also once it is lost
        self.waits_for = ""
        self.waits_seconds = 0.0
        self.has_pages = True
        self.dp_rank = 0  # that has the pages
        self._pages = 0
        self._first_page = 0
        self._granted: dict[int, int] = {}  # chunk -> slot that may still be written to
        self._covered = 0  # bits of the pages that hold their part of the prompt
        self._damaged: dict[int, int] = {}  # chunk -> how often it did not verify
        self._scattered = 0
        self._handoff: wire.Handoff | None = None
        self._prompt_tokens = 0
        self._prompt: tuple[wire.PromptLogprobs, ...] = ()
        self._failure: tuple[int, str] = (0, "")  # status and reason
        self._relinked = False

    @property
    def awaited(self) -> str:
        """What the room waits for, in words."""
        if self.waits_for or self.state is BOOTSTRAPPING:
            return self.waits_for
        return "its prompt to be computed" if self._handoff is None else "its pages to arrive"

    @property
    def granted_slots(self) -> int:
        """Slots that the prefill side may still write to; of an ended room, those in quarantine."""
        return len(self._granted)

    def waits(self, what: str, seconds: float, now: float) -> None:
        """The room waits for `what`, and fails if that takes longer than `seconds`."""
        if not self.ended:
            self.waits_for, self.waits_seconds, self.deadline = what, seconds, now + seconds

    def reserved(self, told: Reserved, now: float) -> list[Action]:
        """The link to the prefill side stands: claim the room."""
        if self.ended:
            return []
        self.link = self.peer = told.link
        self.generation, self._pages, self._prompt_tokens = told.generation, told.pages, told.prompt_tokens
        self._first_page, self._covered = told.first_page, _bits(0, told.first_page)
        self.waits_for, self.has_pages, self.dp_rank = "", told.has_pages, told.dp_rank
        self.advance(WAITING_FOR_INPUT)
        self.deadline = now + self.timeouts.waiting
        claim = self.room, told.generation, told.prompt_tokens, told.prompt_digest, told.first_page
        if told.tokens:
            return [Send(told.link, wire.Rebootstrap(*claim, tokens=told.tokens, priority=told.priority))]
        return [Send(told.link, wire.Claim(*claim))]

    def pages_found(self, dp_rank: int, now: float) -> None:
        """A room that was claimed without pages has them now, in a dp rank."""
        if not self.ended:
            self.has_pages, self.dp_rank, self.waits_for = True, dp_rank, ""
            self._expect_more(now)

    def received(self, link: str, message: wire.RoomMessage, now: float) -> list[Action]:
        """A message about this room has come over a link."""
        if link != self.link or message.generation != self.generation:
            return []
        match message:
            case wire.SlotRequest(chunk=chunk) if not self.ended:
                return [GrantSlot(chunk)]
            case wire.Handoff() if not self.ended and self._handoff is None:
                return self._take_over(message, now)
            case wire.PromptLogprobs() if not self.ended and self._handoff is None:
                self._prompt = (*self._prompt, message)
                return self._check_prompt(now)
            case wire.Abort(status=status, reason=reason):
                return self._fail(status, reason, now)
            case wire.AbortAck() if self._relinked and self._granted:
                return [Drain()]  # writes that failed with the old path may still be on their way out of it
            case wire.AbortAck():
                return self.drained()
        return []

    def slot_found(self, chunk: int, slot: int) -> list[Action]:
        """There is a staging slot for a chunk that a `GrantSlot` asked for."""
        if self.ended or self.link is None:
            self._close_when_dry()
            return [FreeSlot(slot)]
        if self.state is WAITING_FOR_INPUT:
            self.advance(TRANSFERRING)
        self._granted[chunk] = slot
        return [self._grant(self.link, chunk, slot)]

    def landed(self, notice: wire.ChunkNotice, now: float) -> list[Action]:
        """A chunk's bytes are in its slot."""
        slot = self._granted.get(notice.chunk)
        if slot is None or slot != notice.slot or notice.generation != self.generation:
            return []
        del self._granted[notice.chunk]
        if self.ended:
            self._close_when_dry()
            return [FreeSlot(slot)]
        end = notice.first_page + notice.pages
        # Pages before the first that was asked for may be others', too, and are never written.
        fits = (
            self._first_page <= notice.first_page < end <= self._pages
            and notice.destination_dp_rank == self.dp_rank
            and notice.nbytes == notice.pages * self.page_bytes
        )
        if not fits:
            reason = (
                f"chunk {notice.chunk} of room {self.room} speaks of {notice.nbytes} bytes for pages "
                f"[{notice.first_page}, {end}) of dp rank {notice.destination_dp_rank}; its pages are "
                f"[{self._first_page}, {self._pages}) of dp rank {self.dp_rank}, with {self.page_bytes} bytes each"
            )
            return [FreeSlot(slot), *self.cancel(502, reason, now)]
        self._covered |= _bits(notice.first_page, end)
        self._scattered += 1
        self._expect_more(now)
        return [Scatter(slot, notice.first_page, notice.pages), FreeSlot(slot), *self._complete(now)]

    def damaged(self, notice: wire.ChunkNotice, now: float) -> list[Action]:
        """A chunk's bytes are in its slot, and are not those that were sent: grant the same slot again, a few times.
        The prefill side keeps its pages until the room is complete."""
        slot = self._granted.get(notice.chunk)
        if slot is None or slot != notice.slot or notice.generation != self.generation:
            return []
        if self.ended or self.link is None:
            del self._granted[notice.chunk]
            self._close_when_dry()
            return [FreeSlot(slot)]
        times = self._damaged[notice.chunk] = self._damaged.get(notice.chunk, 0) + 1
        if times > MAX_RESENDS:
            del self._granted[notice.chunk]
            reason = f"chunk {notice.chunk} of room {self.room} arrived damaged {times} times"
            return [FreeSlot(slot), *self.cancel(502, reason, now)]
        self._expect_more(now)
        return [self._grant(self.link, notice.chunk, slot)]

    def link_lost(self, reason: str, now: float, *, gone: bool) -> list[Action]:
        """The link to the prefill side has ended; `reason` is a sentence. `gone`: so has its process, without doubt."""
        self.link = None
        failed = self._fail(502, reason, now)
        return [*failed, Drain()] if gone and self._granted else failed

    def peer_gone(self, cut_off: tuple[bytes, ...] = ()) -> list[Action]:
        """The prefill side of a room whose link was lost is known to have ended, or is to be cut off: see `Drain`."""
        return [Drain(cut_off)] if self._granted else []

    def relinked(self, link: str, now: float) -> list[Action]:
        """The prefill side of a room that failed with its link is there again, the same process."""
        if self.generation is None or not self._granted:
            return []
        self.link, self._relinked = link, True
        return self._ask_again(now)

    def drained(self) -> list[Action]:
        """Whatever the prefill side had sent has landed, and it sends no more."""
        freed: list[Action] = [FreeSlot(slot) for slot in self._granted.values()]
        self._granted.clear()
        self._close_when_dry()
        return freed

    def cancel(self, status: int, reason: str, now: float) -> list[Action]:
        """This side gives the room up, and tells the other side first."""
        if self.ended:
            return []
        told: list[Action] = []
        if self.link is not None:
            told = [Send(self.link, wire.Abort(self.room, self._claimed(), status, reason))]
        return told + self._fail(status, reason, now)

    def tick(self, now: float) -> list[Action]:
        """Time has passed."""
        if now < self.deadline:
            return []
        if not self.ended:
            return self.cancel(504, self._overdue(), now)
        return self._ask_again(now) if self._granted else []

    def _take_over(self, handoff: wire.Handoff, now: float) -> list[Action]:
        self._handoff = handoff
        if not handoff.chunks and self.state is WAITING_FOR_INPUT:  # all of it was here
            self.advance(TRANSFERRING)
        if self.has_pages:
            self.deadline = now + self.timeouts.transfer
        else:
            self.waits("free pages", self.timeouts.alloc, now)
        return self._complete(now)

    def _complete(self, now: float) -> list[Action]:
        """Success takes both the handoff and every chunk, in whichever order they come."""
        if self._handoff is None or self._scattered < self._handoff.chunks or self.link is None:
            return []
        if self._covered != _bits(0, self._pages):
            reason = f"room {self.room} got {self._covered.bit_count()} of its {self._pages} pages"
            return self.cancel(502, reason, now)
        self.advance(SUCCESS)
        self._close_when_dry()
        return [StartDecode(self._handoff, self._prompt), Send(self.link, wire.Complete(self.room, self._claimed()))]

    def _check_prompt(self, now: float) -> list[Action]:
        told = sum(len(part.logprobs) for part in self._prompt)
        if told <= self._prompt_tokens:
            return []
        reason = f"room {self.room} was told of {told} log-probabilities for a prompt of {self._prompt_tokens} tokens"
        return self.cancel(502, reason, now)

    def _fail(self, status: int, reason: str, now: float) -> list[Action]:
        if self.ended:
            return []
        self.advance(FAILED)
        self._failure = (status, reason)
        self.deadline = now + self.timeouts.transfer
        self._close_when_dry()
        return [Fail(status, reason)]

    def _ask_again(self, now: float) -> list[Action]:
        """An ended room still has slots out: its abort, or the answer, may have been lost."""
        self.deadline = now + self.timeouts.transfer
        if self.link is None or self.generation is None:
            return []
        return [Send(self.link, wire.Abort(self.room, self.generation, *self._failure))]

    def _grant(self, link: str, chunk: int, slot: int) -> Send:
        return Send(link, wire.SlotGrant(self.room, self._claimed(), chunk, slot, self.dp_rank))

    def _close_when_dry(self) -> None:
        if self.ended and not self._granted:
            self.closed = True

    def _expect_more(self, now: float) -> None:
        """A chunk has come: the wait for the next, or for the handoff, begins."""
        self.deadline = now + (self.timeouts.transfer if self._handoff else self.timeouts.waiting)

    def _overdue(self) -> str:
        if self.waits_for:
            return f"room {self.room} waited {self.waits_seconds:g} s for {self.waits_for}"
        if self._handoff is None:
            return f"the prefill instance did not compute room {self.room} within {self.timeouts.waiting:g} s"
        return f"no chunk of room {self.room} landed for {self.timeouts.transfer:g} s"

    def _claimed(self) -> int:
        assert self.generation is not None, "only a claimed room has a generation"
        return self.generation


def _bits(first: int, end: int) -> int:
    """A number with the bits [first, end) set."""
    return (1 << end) - (1 << first)
