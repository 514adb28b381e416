"""A room as its prefill side sees it: events in, actions out. Each event is a method."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from pdjax.disagg.protocol import messages as wire
from pdjax.disagg.protocol.actions import Action, Fail, Send, StartPrefill, Succeed, Transfer
from pdjax.disagg.protocol.room import Room
from pdjax.disagg.protocol.states import BOOTSTRAPPING, FAILED, SUCCESS, TRANSFERRING, WAITING_FOR_INPUT


class PromptDone(msgspec.Struct, frozen=True, gc=False):
    """What a prompt has come to once the whole of it is computed."""

    first_token: int
    logprob: float
    queue_s: float
    prefill_s: float
    cached_tokens: int = 0
    top: list[tuple[int, float]] = []
    prompt_logprobs: list[float | None] = []  # one a prompt token, if asked for
    prompt_top: list[list[tuple[int, float]]] = []


LOGPROBS_A_MESSAGE = 2048  # prompt tokens: with 20 of the best tokens at each, well under a link's largest message


class _Chunk:
    def __init__(self, first_page: int, pages: int) -> None:
        self.first_page = first_page
        self.pages = pages
        self.computed = False
        self.grant: wire.SlotGrant | None = None
        self.posted = False


@dataclass(frozen=True)
class Timeouts:
    """Seconds; see `pdjax.config.Disagg`.

    Attributes:
        workers_end: in which an instance's other processes have ended once its leader's has: JAX's own bound is 10.
    """

    bootstrap: float
    waiting: float
    transfer: float
    alloc: float = 300.0
    link: float = 5.0
    peer: float = 8.0
    heartbeat: float = 1.0
    workers_end: float = 15.0


class PrefillRoom(Room):
    """The machine. Each event is a method that returns what is to be done, in order; `now` is in seconds of one clock
    that never goes back.

    The room is born by whichever comes first, the client's request or the decode side's claim. An ended room stays
    until no write of it is on its way; then it says so to the decode side (`AbortAck`) and is `closed`. `hold`
    is how many seconds more than `Timeouts.transfer` the decode side may take once the prompt is computed.
    """

    def __init__(self, room: int, timeouts: Timeouts, hold: float = 0.0) -> None:
        super().__init__(room)
        self.timeouts = timeouts
        self.hold = hold
        self.computed = False  # the whole prompt
        self._requested: tuple[int, bytes] | None = None  # tokens and digest of the prompt
        self._claim: wire.Claim | None = None
        self._chunks: dict[int, _Chunk] = {}
        self._writing = 0  # writes on their way

    @property
    def met(self) -> bool:
        """Whether both halves have come."""
        return self._requested is not None and self._claim is not None

    @property
    def awaits_claim(self) -> bytes | None:
        """The digest of the prompt, if its request has come and has never been claimed."""
        if self._requested is None or self._claim is not None:
            return None
        return self._requested[1]

    @property
    def first_page(self) -> int:
        """The first page that the decode side wants."""
        return self._claim.first_page if self._claim is not None else 0

    def requested(self, prompt_tokens: int, prompt_digest: bytes, now: float) -> list[Action]:
        """The client's request has come."""
        self._requested = prompt_tokens, prompt_digest
        return self._meet(now)

    def received(self, link: str, message: wire.RoomMessage, now: float) -> list[Action]:
        """A message about this room has come over a link."""
        if isinstance(message, wire.Claim):
            return self._claimed_by(link, message, now)
        if message.generation != self.generation:
            return []
        if self.link is None and isinstance(message, wire.Abort):
            self.link = link  # the decode side has come back to hear that nothing more will be written
        if link != self.link:
            return []
        match message:
            case wire.SlotGrant(chunk=chunk) if not self.ended and chunk in self._chunks:
                # A second grant of a chunk means that it arrived damaged: it is gathered and sent again.
                self._chunks[chunk].grant = message
                self._chunks[chunk].posted = False
                return self._transfer(chunk)
            case wire.Complete() if self.state is TRANSFERRING:
                self.advance(SUCCESS)
                self._close_when_dry()
                return [Succeed()]
            case wire.Abort(status=status, reason=reason):
                return self._fail(status, reason)
        return []

    def chunk_planned(self, chunk: int, first_page: int, pages: int) -> list[Action]:
        """The pages of a chunk are about to be computed: time to ask for its slot."""
        if self.ended:
            return []
        self._chunks[chunk] = _Chunk(first_page, pages)
        return [self._send(wire.SlotRequest(self.room, self._claimed(), chunk))]

    def chunk_computed(self, chunk: int) -> list[Action]:
        """The pages of a planned chunk are computed."""
        if self.ended:
            return []
        self._chunks[chunk].computed = True
        return self._transfer(chunk)

    def prompt_done(self, done: PromptDone, now: float) -> list[Action]:
        """The whole prompt is computed."""
        if self.ended:
            return []
        self.computed = True
        if not self._chunks:  # the decode side has all of it
            self.advance(TRANSFERRING)
        self.deadline = now + self.timeouts.transfer + self.hold
        return self._hand_over(done)

    def write_started(self) -> None:
        """A `Transfer` has been handed to the backend."""
        self._writing += 1

    def write_ended(self, error: str | None, now: float) -> list[Action]:
        """A started write is over; `error` says why it failed."""
        self._writing -= 1
        if self.ended:
            return self._close_when_dry()
        self.deadline = now + (self.timeouts.transfer + self.hold if self.computed else self.timeouts.waiting)
        return self.cancel(502, f"sending a chunk to the decode instance failed: {error}") if error else []

    def link_lost(self, reason: str) -> list[Action]:
        """The link to the decode side has ended; `reason` is a sentence."""
        self.link = None
        return self._fail(502, reason)

    def cancel(self, status: int, reason: str) -> list[Action]:
        """This side gives the room up, and tells the other side first."""
        if self.ended:
            return []
        told: list[Action] = []
        if self.link is not None and self.generation is not None:
            told = [self._send(wire.Abort(self.room, self.generation, status, reason))]
        return told + self._fail(status, reason)

    @property
    def awaited(self) -> str:
        """What the room waits for, in words."""
        if self.state is BOOTSTRAPPING:
            return "its other half"
        return "the decode side's word that all has arrived" if self.computed else "its prompt to be computed"

    def tick(self, now: float) -> list[Action]:
        """Time has passed."""
        return self.cancel(504, self._overdue()) if now >= self.deadline else []

    def _claimed_by(self, link: str, claim: wire.Claim, now: float) -> list[Action]:
        if self.generation not in (None, claim.generation):
            reason = f"room {self.room} is claimed already"
            return [
                Send(link, wire.Abort(self.room, claim.generation, 409, reason)),
                Send(link, wire.AbortAck(self.room, claim.generation)),
            ]
        if self._claim is not None or self.ended:
            return []
        self.link, self.generation, self._claim = link, claim.generation, claim
        return self._meet(now)

    def _meet(self, now: float) -> list[Action]:
        """Start the prefill once both the request and the claim are here and speak of the same prompt."""
        if self.ended:
            return []
        if self._requested is None or self._claim is None:
            self.deadline = now + self.timeouts.bootstrap
            return []
        prompt_tokens, prompt_digest = self._requested
        if self._claim.prompt_digest != prompt_digest:
            return self.cancel(
                400,
                f"the two halves of room {self.room} have different prompts: prefill got {prompt_tokens} tokens, "
                f"decode {self._claim.prompt_tokens}",
            )
        self.advance(WAITING_FOR_INPUT)
        self.deadline = now + self.timeouts.waiting
        return [StartPrefill()]

    def _transfer(self, chunk: int) -> list[Action]:
        entry = self._chunks[chunk]
        grant = entry.grant
        if not entry.computed or grant is None or entry.posted:
            return []
        entry.posted = True
        if self.state is WAITING_FOR_INPUT:
            self.advance(TRANSFERRING)
        return [Transfer(chunk, grant.slot, grant.dp_rank, entry.first_page, entry.pages)]

    def _hand_over(self, done: PromptDone) -> list[Action]:
        generation = self._claimed()
        parts = [slice(at, at + LOGPROBS_A_MESSAGE) for at in range(0, len(done.prompt_logprobs), LOGPROBS_A_MESSAGE)]
        told: list[wire.RoomMessage] = [
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

    def _fail(self, status: int, reason: str) -> list[Action]:
        if self.ended:
            return self._close_when_dry()
        self.advance(FAILED)
        return [Fail(status, reason), *self._close_when_dry()]

    def _close_when_dry(self) -> list[Action]:
        if self._writing or self.closed:
            return []
        self.closed = True
        if self.state is FAILED and self.link is not None and self.generation is not None:
            return [self._send(wire.AbortAck(self.room, self.generation))]
        return []

    def _overdue(self) -> str:
        if self._requested is None:
            return f"no prefill request came for room {self.room} within {self.timeouts.bootstrap:g} s"
        if self._claim is None:
            return f"no decode instance claimed room {self.room} within {self.timeouts.bootstrap:g} s"
        if not self.computed:
            return f"the prompt of room {self.room} was not computed and sent within {self.timeouts.waiting:g} s"
        return f"the decode instance did not confirm room {self.room} within {self.timeouts.transfer + self.hold:g} s"

    def _claimed(self) -> int:
        assert self.generation is not None, "chunks are planned for claimed rooms only"
        return self.generation

    def _send(self, message: wire.RoomMessage) -> Send:
        assert self.link is not None, "an unclaimed room has nobody to talk to"
        return Send(self.link, message)
