"""A room as its prefill side sees it: events in, actions out."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import msgspec

from pdjax.disagg.protocol import messages as wire
from pdjax.disagg.protocol.actions import Action, Close, Fail, Send, StartPrefill, Succeed, Transfer
from pdjax.disagg.protocol.states import RoomState, advance


class Requested(msgspec.Struct, frozen=True, gc=False):
    """The client's request has come."""

    prompt_tokens: int
    prompt_digest: bytes


class Received(msgspec.Struct, frozen=True, gc=False):
    """A message about this room has come over a link."""

    link: str
    message: wire.RoomMessage


class ChunkPlanned(msgspec.Struct, frozen=True, gc=False):
    """The pages of a chunk are about to be computed: time to ask for its slot."""

    chunk: int
    first_page: int
    pages: int


class ChunkComputed(msgspec.Struct, frozen=True, gc=False):
    """The pages of a planned chunk are computed."""

    chunk: int


class PromptDone(msgspec.Struct, frozen=True, gc=False):
    """The whole prompt is computed."""

    first_token: int
    logprob: float
    queue_s: float
    prefill_s: float
    cached_tokens: int = 0
    top: list[tuple[int, float]] = []
    prompt_logprobs: list[float | None] = []  # one a prompt token, if asked for
    prompt_top: list[list[tuple[int, float]]] = []


class WriteStarted(msgspec.Struct, frozen=True, gc=False):
    """A `Transfer` has been gathered and handed to the backend."""

    chunk: int


class WriteEnded(msgspec.Struct, frozen=True, gc=False):
    """A started write is over; `error` says why it failed."""

    chunk: int
    error: str | None = None


class LinkLost(msgspec.Struct, frozen=True, gc=False):
    """The link to the other side has ended; `reason` is a sentence. `gone`: so has its process, without doubt."""

    reason: str
    gone: bool = True


class Cancel(msgspec.Struct, frozen=True, gc=False):
    """This side gives the room up."""

    status: int
    reason: str


class Tick(msgspec.Struct, frozen=True, gc=False):
    """Time has passed."""


Event = (
    Requested
    | Received
    | ChunkPlanned
    | ChunkComputed
    | PromptDone
    | WriteStarted
    | WriteEnded
    | LinkLost
    | Cancel
    | Tick
)


LOGPROBS_A_MESSAGE = 2048  # prompt tokens: with 20 of the best tokens at each, well under a link's largest message


@dataclass
class _Chunk:
    first_page: int
    pages: int
    computed: bool = False
    slot: int | None = None
    posted: bool = False


@dataclass(frozen=True)
class Timeouts:
    """Seconds; see `pdjax.config.Disagg`."""

    bootstrap: float
    waiting: float
    transfer: float
    alloc: float = 300.0
    link: float = 5.0
    peer: float = 8.0
    heartbeat: float = 1.0


@dataclass
class PrefillRoom:
    """The machine. `handle` is the only way in; times are seconds of one clock that never goes back.

    The room is born by whichever comes first, the client's request or the decode side's claim. An ended room stays
    until no write of it is on its way; then it says so to the decode side (`AbortAck`) and closes. `hold` is how many
    seconds more than `Timeouts.transfer` the decode side may take once the prompt is computed.
    """

    room: int
    timeouts: Timeouts
    state: RoomState = RoomState.BOOTSTRAPPING
    deadline: float | None = None
    timer: float | None = None  # see `Timers`
    link: str | None = None
    generation: int | None = None
    hold: float = 0.0
    _requested: Requested | None = None
    _claim: wire.Claim | None = None
    _chunks: dict[int, _Chunk] = field(default_factory=dict)
    _writing: Counter[int] = field(default_factory=Counter)  # writes on their way, by chunk
    _prompt_done: bool = False
    _closed: bool = False

    @property
    def closed(self) -> bool:
        """Whether the room is over and holds nothing."""
        return self._closed

    @property
    def met(self) -> bool:
        """Whether both halves have come."""
        return self._requested is not None and self._claim is not None

    @property
    def awaits_claim(self) -> bytes | None:
        """The digest of the prompt, if its request has come and has never been claimed."""
        if self._requested is None or self._claim is not None:
            return None
        return self._requested.prompt_digest

    @property
    def first_page(self) -> int:
        """The first page that the decode side wants."""
        return self._claim.first_page if self._claim is not None else 0

    @property
    def prompt_done(self) -> bool:
        """Whether the prompt is computed."""
        return self._prompt_done

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take one event at time `now`, return what is to be done, in order."""
        match event:
            case Received(link, message):
                return self._receive(link, message, now)
            case Requested():
                self._requested = event
                return self._meet(now)
            case ChunkPlanned(chunk, first_page, pages) if not self.state.final:
                self._chunks[chunk] = _Chunk(first_page, pages)
                return [self._send(wire.SlotRequest(self.room, self._claimed(), chunk))]
            case ChunkComputed(chunk) if not self.state.final:
                self._chunks[chunk].computed = True
                return self._transfer(chunk, now)
            case PromptDone() if not self.state.final:
                self._prompt_done = True
                if not self._chunks:  # the decode side has all of it
                    self.state = advance(self.state, RoomState.TRANSFERRING)
                self._expect(now, self.timeouts.transfer + self.hold)
                return self._hand_over(event)
            case WriteStarted(chunk):
                self._writing[chunk] += 1
                return []
            case WriteEnded(chunk, error):
                self._writing -= Counter([chunk])
                if self.state.final:
                    return self._close_when_dry()
                self._expect(now, self.timeouts.transfer + self.hold if self._prompt_done else self.timeouts.waiting)
                return self._give_up(502, f"sending a chunk to the decode instance failed: {error}") if error else []
            case LinkLost(reason):
                self.link = None
                return self._fail(502, reason)
            case Cancel(status, reason):
                return self._give_up(status, reason)
            case Tick() if not self.state.final and self.deadline is not None and now >= self.deadline:
                return self._give_up(504, self._overdue())
        return []

    def _receive(self, link: str, message: wire.RoomMessage, now: float) -> list[Action]:
        if isinstance(message, wire.Claim) and self.generation not in (None, message.generation):
            reason = f"room {self.room} is claimed already"
            return [
                Send(link, wire.Abort(self.room, message.generation, 409, reason)),
                Send(link, wire.AbortAck(self.room, message.generation)),
            ]
        if isinstance(message, wire.Claim):
            if self._claim is None and not self.state.final:
                self.link, self.generation, self._claim = link, message.generation, message
                return self._meet(now)
            return []
        if message.generation != self.generation:
            return []
        if self.link is None and isinstance(message, wire.Abort):
            self.link = link  # the decode side has come back to hear that nothing more will be written
        if link != self.link:
            return []
        match message:
            case wire.SlotGrant(chunk=chunk, slot=slot) if not self.state.final and chunk in self._chunks:
                # A second grant of a chunk means that it arrived damaged: it is gathered and sent again.
                self._chunks[chunk].slot = slot
                self._chunks[chunk].posted = False
                return self._transfer(chunk, now)
            case wire.Complete() if self.state is RoomState.TRANSFERRING:
                self.state = advance(self.state, RoomState.SUCCESS)
                return [Succeed(), *self._close_when_dry()]
            case wire.Abort(status=status, reason=reason):
                return self._fail(status, reason)
        return []

    def _meet(self, now: float) -> list[Action]:
        """Start the prefill once both the request and the claim are here and speak of the same prompt."""
        if self.state.final:
            return []
        if self._requested is None or self._claim is None:
            self._expect(now, self.timeouts.bootstrap)
            return []
        if self._claim.prompt_digest != self._requested.prompt_digest:
            return self._give_up(
                400,
                f"the two halves of room {self.room} have different prompts: prefill got "
                f"{self._requested.prompt_tokens} tokens, decode {self._claim.prompt_tokens}",
            )
        self.state = advance(self.state, RoomState.WAITING_FOR_INPUT)
        self._expect(now, self.timeouts.waiting)
        return [StartPrefill()]

    def _transfer(self, chunk: int, now: float) -> list[Action]:
        entry = self._chunks[chunk]
        if not entry.computed or entry.slot is None or entry.posted:
            return []
        entry.posted = True
        if self.state is RoomState.WAITING_FOR_INPUT:
            self.state = advance(self.state, RoomState.TRANSFERRING)
        return [Transfer(chunk, entry.slot, entry.first_page, entry.pages)]

    def _hand_over(self, done: PromptDone) -> list[Action]:
        generation = self._claimed()
        parts = [slice(at, at + LOGPROBS_A_MESSAGE) for at in range(0, len(done.prompt_logprobs), LOGPROBS_A_MESSAGE)]
        told = [
            wire.PromptLogprobs(self.room, generation, done.prompt_logprobs[part], done.prompt_top[part])
            for part in parts
        ]
        handoff = wire.Handoff(
            self.room,
            generation,
            len(self._chunks),
            done.first_token,
            done.logprob,
            done.queue_s,
            done.prefill_s,
            done.cached_tokens,
            done.top,
        )
        return [self._send(message) for message in (*told, handoff)]

    def _give_up(self, status: int, reason: str) -> list[Action]:
        """Fail for a cause of this side's, and tell the other side first."""
        if self.state.final:
            return []
        told: list[Action] = []
        if self.link is not None and self.generation is not None:
            told = [self._send(wire.Abort(self.room, self.generation, status, reason))]
        return told + self._fail(status, reason)

    def _fail(self, status: int, reason: str) -> list[Action]:
        if self.state.final:
            return self._close_when_dry()
        self.state = advance(self.state, RoomState.FAILED)
        return [Fail(status, reason), *self._close_when_dry()]

    def _close_when_dry(self) -> list[Action]:
        if self._writing or self._closed:
            return []
        self._closed = True
        if self.state is RoomState.FAILED and self.link is not None and self.generation is not None:
            return [self._send(wire.AbortAck(self.room, self.generation)), Close()]
        return [Close()]

    def _expect(self, now: float, seconds: float) -> None:
        self.deadline = now + seconds

    def _overdue(self) -> str:
        if self._requested is None:
            return f"no prefill request came for room {self.room} within {self.timeouts.bootstrap:g} s"
        if self._claim is None:
            return f"no decode instance claimed room {self.room} within {self.timeouts.bootstrap:g} s"
        if not self._prompt_done:
            return f"the prompt of room {self.room} was not computed and sent within {self.timeouts.waiting:g} s"
        return f"the decode instance did not confirm room {self.room} within {self.timeouts.transfer + self.hold:g} s"

    def _claimed(self) -> int:
        assert self.generation is not None, "chunks are planned for claimed rooms only"
        return self.generation

    def _send(self, message: wire.RoomMessage) -> Send:
        assert self.link is not None, "an unclaimed room has nobody to talk to"
        return Send(self.link, message)
