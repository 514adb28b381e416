"""A room as its decode side sees it: events in, actions out."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import msgspec

from pdjax.disagg.protocol import messages as wire
from pdjax.disagg.protocol.actions import Action, Close, Drain, Fail, FreeSlot, GrantSlot, Scatter, Send, StartDecode
from pdjax.disagg.protocol.prefill_room import Cancel, LinkLost, Received, Tick, Timeouts
from pdjax.disagg.protocol.states import RoomState, advance


class Waits(msgspec.Struct, frozen=True, gc=False):
    """The room waits for `what`, and fails if that takes longer than `seconds`."""

    what: str
    seconds: float


class Reserved(msgspec.Struct, frozen=True, gc=False):
    """The link to the prefill side stands: claim the room. `has_pages`: the request's pages are reserved, too."""

    link: str
    generation: int
    prompt_tokens: int
    prompt_digest: bytes
    pages: int  # that hold the prompt
    has_pages: bool = True
    first_page: int = 0  # of these, the first that is not filled already


class PagesFound(msgspec.Struct, frozen=True, gc=False):
    """A room that was claimed without pages has them now."""


class PeerGone(msgspec.Struct, frozen=True, gc=False):
    """The prefill side of a room whose link was lost is known to have ended."""


class Relinked(msgspec.Struct, frozen=True, gc=False):
    """The prefill side of a room that failed with its link is there again, the same process."""

    link: str


class SlotFound(msgspec.Struct, frozen=True, gc=False):
    """A staging slot for a chunk that a `GrantSlot` asked for."""

    chunk: int
    slot: int


class Landed(msgspec.Struct, frozen=True, gc=False):
    """A chunk's bytes are in its slot."""

    notice: wire.ChunkNotice


class Damaged(msgspec.Struct, frozen=True, gc=False):
    """A chunk's bytes are in its slot, and are not those that were sent."""

    notice: wire.ChunkNotice


class Scattered(msgspec.Struct, frozen=True, gc=False):
    """A landed chunk is in the request's pages."""

    chunk: int


class Drained(msgspec.Struct, frozen=True, gc=False):
    """After a `Drain`: whatever the lost writer had sent has landed."""


Event = (
    Waits
    | Reserved
    | PagesFound
    | Received
    | SlotFound
    | Landed
    | Damaged
    | Scattered
    | LinkLost
    | PeerGone
    | Relinked
    | Drained
    | Cancel
    | Tick
)


MAX_RESENDS = 2  # of one chunk


@dataclass
class DecodeRoom:
    """The machine. `handle` is the only way in; times are seconds of one clock that never goes back.

    Under the policy `prefill_complete` a room is claimed before it has pages, gets them when the prompt is computed,
    and is granted no slot until then.

    Slots are what must outlive a failure: a granted slot that has not landed may still be written to, so it is freed
    only by the prefill side's `AbortAck`, or when that side is known to be gone and the transfer worker has run dry. A
    lost link alone is no such proof: the slots stay in quarantine until one of the two comes. Pages are written by this
    side's own scatters only, and are free as soon as `Fail` is out.
    """

    room: int
    timeouts: Timeouts
    page_bytes: int
    deadline: float | None = None
    timer: float | None = None  # see `Timers`
    state: RoomState = RoomState.BOOTSTRAPPING
    link: str | None = None
    peer: str = ""  # the link's name, also once it is lost
    generation: int | None = None
    waits_for: str = ""
    has_pages: bool = True
    _pages: int = 0
    _first_page: int = 0
    _granted: dict[int, int] = field(default_factory=dict)  # chunk -> slot that may still be written to
    _landed: dict[int, int] = field(default_factory=dict)  # chunk -> slot that waits for its scatter
    _covered: set[int] = field(default_factory=set)  # pages that hold their part of the prompt
    _pages_of: dict[int, range] = field(default_factory=dict)
    _damaged: Counter[int] = field(default_factory=Counter)  # chunk -> how often it did not verify
    _scattered: int = 0
    _handoff: wire.Handoff | None = None
    _prompt_tokens: int = 0
    _prompt: list[wire.PromptLogprobs] = field(default_factory=list)
    _failure: tuple[int, str] = (0, "")  # status and reason
    _relinked: bool = False
    _closed: bool = False

    @property
    def closed(self) -> bool:
        """Whether the room is over and holds nothing."""
        return self._closed

    @property
    def handed_over(self) -> bool:
        """Whether the prefill side has computed the prompt."""
        return self._handoff is not None

    @property
    def granted_slots(self) -> int:
        """Slots that the prefill side may still write to; of an ended room, those in quarantine."""
        return len(self._granted)

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take one event at time `now`, return what is to be done, in order."""
        match event:
            case Received(link, message) if link == self.link and message.generation == self.generation:
                return self._receive(message, now)
            case Waits(what, seconds) if not self.state.final:
                self.waits_for, self.deadline = f"waited {seconds:g} s for {what}", now + seconds
                return []
            case Reserved() if not self.state.final:
                self.link = self.peer = event.link
                self.generation, self._pages = event.generation, event.pages
                self._first_page, self._covered = event.first_page, set(range(event.first_page))
                self._prompt_tokens = event.prompt_tokens
                self.waits_for, self.has_pages = "", event.has_pages
                self.state = advance(self.state, RoomState.WAITING_FOR_INPUT)
                self.deadline = now + self.timeouts.waiting
                claim = wire.Claim(
                    self.room, event.generation, event.prompt_tokens, event.prompt_digest, event.first_page
                )
                return [Send(event.link, claim)]
            case PagesFound() if not self.state.final:
                self.has_pages, self.waits_for = True, ""
                self._expect_more(now)
                return []
            case SlotFound(chunk, slot):
                return self._grant(chunk, slot, now)
            case Landed(notice) if notice.generation == self.generation:
                return self._land(notice, now)
            case Damaged(notice) if notice.generation == self.generation:
                return self._send_again(notice, now)
            case Scattered(chunk):
                slot = self._landed.pop(chunk)
                self._covered.update(self._pages_of[chunk])
                self._scattered += 1
                return [FreeSlot(slot), *(self._close_when_dry() if self.state.final else self._complete(now))]
            case LinkLost(reason, gone):
                self.link = None
                failed = self._fail(502, reason, now)
                return [*failed, Drain()] if gone and self._granted else failed
            case PeerGone() if self._granted:
                return [Drain()]
            case Relinked(link) if self.generation is not None and self._granted:
                self.link, self._relinked = link, True
                return self._ask_again(now)
            case Drained():
                return self._free_granted()
            case Cancel(status, reason):
                return self._give_up(status, reason, now)
            case Tick() if not self.state.final and self.deadline is not None and now >= self.deadline:
                return self._give_up(504, self._overdue(), now)
            case Tick() if self._granted and self.state.final and self.deadline is not None and now >= self.deadline:
                return self._ask_again(now)
        return []

    def _receive(self, message: wire.RoomMessage, now: float) -> list[Action]:
        match message:
            case wire.SlotRequest(chunk=chunk) if not self.state.final:
                return [GrantSlot(chunk)]
            case wire.PromptLogprobs() if not self.state.final and self._handoff is None:
                self._prompt.append(message)
                return self._check_prompt(now)
            case wire.Handoff() if not self.state.final and self._handoff is None:
                self._handoff = message
                if not message.chunks and self.state is RoomState.WAITING_FOR_INPUT:  # all of it was here
                    self.state = advance(self.state, RoomState.TRANSFERRING)
                if self.has_pages:
                    self.deadline = now + self.timeouts.transfer
                else:
                    self.waits_for = f"has waited {self.timeouts.alloc:g} s for free pages"
                    self.deadline = now + self.timeouts.alloc
                return self._complete(now)
            case wire.Abort(status=status, reason=reason):
                return self._fail(status, reason, now)
            case wire.AbortAck() if self._relinked and self._granted:
                return [Drain()]  # writes that failed with the old path may still be on their way out of it
            case wire.AbortAck():
                return self._free_granted()
        return []

    def _grant(self, chunk: int, slot: int, now: float) -> list[Action]:
        if self.state.final or self.link is None:
            return [FreeSlot(slot), *self._close_when_dry()]
        if self.state is RoomState.WAITING_FOR_INPUT:
            self.state = advance(self.state, RoomState.TRANSFERRING)
        self._granted[chunk] = slot
        return [Send(self.link, wire.SlotGrant(self.room, self._claimed(), chunk, slot))]

    def _land(self, notice: wire.ChunkNotice, now: float) -> list[Action]:
        slot = self._granted.get(notice.chunk)
        if slot is None or slot != notice.slot:
            return []
        del self._granted[notice.chunk]
        if self.state.final:
            return [FreeSlot(slot), *self._close_when_dry()]
        end = notice.first_page + notice.pages
        # Pages before the first that was asked for may be others', too, and are never written.
        fits = (
            self._first_page <= notice.first_page < end <= self._pages
            and notice.nbytes == notice.pages * self.page_bytes
        )
        if not fits:
            reason = (
                f"chunk {notice.chunk} of room {self.room} speaks of {notice.nbytes} bytes for pages "
                f"[{notice.first_page}, {end}) of [{self._first_page}, {self._pages}) with {self.page_bytes} bytes each"
            )
            return [FreeSlot(slot), *self._give_up(502, reason, now)]
        self._landed[notice.chunk] = slot
        self._pages_of[notice.chunk] = range(notice.first_page, end)
        self._expect_more(now)
        return [Scatter(notice.chunk, slot, notice.first_page, notice.pages)]

    def _send_again(self, notice: wire.ChunkNotice, now: float) -> list[Action]:
        """Grant the same slot again, a few times; the prefill side keeps its pages until the room is complete."""
        slot = self._granted.get(notice.chunk)
        if slot is None or slot != notice.slot:
            return []
        if self.state.final or self.link is None:
            del self._granted[notice.chunk]
            return [FreeSlot(slot), *self._close_when_dry()]
        self._damaged[notice.chunk] += 1
        if self._damaged[notice.chunk] > MAX_RESENDS:
            del self._granted[notice.chunk]
            reason = f"chunk {notice.chunk} of room {self.room} arrived damaged {self._damaged[notice.chunk]} times"
            return [FreeSlot(slot), *self._give_up(502, reason, now)]
        self._expect_more(now)
        return [Send(self.link, wire.SlotGrant(self.room, self._claimed(), notice.chunk, slot))]

    def _complete(self, now: float) -> list[Action]:
        """Success takes both the handoff and every chunk, in whichever order they come."""
        if self._handoff is None or self._scattered < self._handoff.chunks or self.link is None:
            return []
        if len(self._covered) != self._pages:
            reason = f"room {self.room} got {len(self._covered)} of its {self._pages} pages"
            return self._give_up(502, reason, now)
        self.state = advance(self.state, RoomState.SUCCESS)
        return [
            StartDecode(self._handoff, tuple(self._prompt)),
            Send(self.link, wire.Complete(self.room, self._claimed())),
            *self._close_when_dry(),
        ]

    def _check_prompt(self, now: float) -> list[Action]:
        told = sum(len(part.logprobs) for part in self._prompt)
        if told <= self._prompt_tokens:
            return []
        reason = f"room {self.room} was told of {told} log-probabilities for a prompt of {self._prompt_tokens} tokens"
        return self._give_up(502, reason, now)

    def _give_up(self, status: int, reason: str, now: float) -> list[Action]:
        """Fail for a cause of this side's, and tell the other side first."""
        if self.state.final:
            return []
        told: list[Action] = []
        if self.link is not None:
            told = [Send(self.link, wire.Abort(self.room, self._claimed(), status, reason))]
        return told + self._fail(status, reason, now)

    def _fail(self, status: int, reason: str, now: float) -> list[Action]:
        if self.state.final:
            return []
        self.state = advance(self.state, RoomState.FAILED)
        self._failure = (status, reason)
        self.deadline = now + self.timeouts.transfer
        return [Fail(status, reason), *self._close_when_dry()]

    def _ask_again(self, now: float) -> list[Action]:
        """An ended room still has slots out: its abort, or the answer, may have been lost."""
        self.deadline = now + self.timeouts.transfer
        if self.link is None or self.generation is None:
            return []
        return [Send(self.link, wire.Abort(self.room, self.generation, *self._failure))]

    def _free_granted(self) -> list[Action]:
        freed: list[Action] = [FreeSlot(slot) for slot in self._granted.values()]
        self._granted.clear()
        return freed + self._close_when_dry()

    def _close_when_dry(self) -> list[Action]:
        if self._granted or self._landed or self._closed or not self.state.final:
            return []
        self._closed = True
        return [Close()]

    def _expect_more(self, now: float) -> None:
        """A chunk has come: the wait for the next, or for the handoff, begins."""
        self.deadline = now + (self.timeouts.transfer if self._handoff else self.timeouts.waiting)

    def _overdue(self) -> str:
        if self.waits_for:
            return f"room {self.room} {self.waits_for}"
        if self._handoff is None:
            return f"the prefill instance did not compute room {self.room} within {self.timeouts.waiting:g} s"
        return f"no chunk of room {self.room} landed for {self.timeouts.transfer:g} s"

    def _claimed(self) -> int:
        assert self.generation is not None, "only a claimed room has a generation"
        return self.generation
