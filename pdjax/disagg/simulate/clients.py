"""Requests, their clients and the router between: who sends what where, gives up, and must get an answer in time."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from pdjax.disagg.protocol import messages
from pdjax.disagg.simulate.books import Violation
from pdjax.disagg.simulate.decode_life import DecodeLife
from pdjax.disagg.simulate.life import Life
from pdjax.disagg.simulate.prefill_life import PrefillLife
from pdjax.disagg.simulate.settings import LAYOUTS, ONE_RANK, TIMEOUTS, Settings
from pdjax.disagg.simulate.world import World
from pdjax.transfer.layout import Layout

if TYPE_CHECKING:
    from collections import Counter

TEXTS = 4  # that several requests begin with
MOST_PAGES = 24  # more than a prompt and what is generated after it have
ENDS = 2 * TIMEOUTS.alloc + 2 * TIMEOUTS.link + TIMEOUTS.bootstrap  # all that a room may wait for once

# A reason that a client is told must be true: each goes with what must have happened.
SELF_MADE, CONTEST, LINK, DAMAGE = "abort", "contest", "link", "damage"
WRITE, TEST, WAIT = "write", "test", "wait"
REASONS = (
    ("was aborted", SELF_MADE),
    ("is in use by another request", CONTEST),
    ("is claimed already", CONTEST),
    ("have different prompts", CONTEST),
    ("failed its test", TEST),
    ("the link to the", LINK),
    ("no link to the", LINK),
    ("the path to the", LINK),
    ("arrived damaged", DAMAGE),
    ("sending a chunk to the decode instance failed", WRITE),
    ("waited", WAIT),
    ("no prefill request came", WAIT),
    ("no decode instance claimed", WAIT),
    ("did not compute", WAIT),
    ("was not computed and sent", WAIT),
    ("did not confirm", WAIT),
    ("no chunk of room", WAIT),
)


LOST = (502, 503, 504)  # what a router computes anew
RECOMPUTES = 2


class Room:
    """One request of a client, or another attempt at it. `number` is the room's, which others may use at the same time
    (`contested`). `earlier` are the attempts that were lost, `later` is the one that took this one's place."""

    def __init__(
        self,
        id: int,
        number: int,
        digest: bytes,
        prefill: int,
        decode: int,
        pages: int,
        cached_pages: int,
        growth: int,
        generates: float,
        *,
        priority: int = 0,
        text: int = 0,
        common: int = 0,
        follows: int = 0,
        leaves: int = 0,
        begun: bool = False,
        contested: bool = False,
        halves: int = 2,
        final: bool = False,
    ) -> None:
        self.id = id
        self.number = number
        self.digest = digest
        self.prefill = prefill
        self.decode = decode
        self.pages = pages
        self.cached_pages = cached_pages
        self.growth = growth
        self.generates = generates
        self.priority = priority
        self.text = text  # requests of one text begin alike, for `common` pages
        self.common = common
        self.follows = follows  # the request that this is one more sample of
        self.leaves = leaves  # how often it loses its pages while it generates, and is computed again
        self.begun = begun  # by an instance that is lost: no prefill half, and outputs are computed with the prompt
        self.contested = contested
        self.halves = halves  # 1: only one of them is ever sent
        self.final = final  # not computed anew if it is lost
        self.aborted = False
        self.halved = False  # its prefill half was given up, and its decode half was not
        self.earlier: tuple[Room, ...] = ()
        self.later: Room | None = None
        self.started = 0
        self.answered = False
        self.prefill_end: str | None = None  # empty: served
        self.decode_end: str | None = None
        shared, own = text * MOST_PAGES, (int.from_bytes(digest, "big") + TEXTS) * MOST_PAGES
        # The prompt, one token a page: those that requests share, and its own; and what it generates before it leaves.
        self.tokens = [*range(shared, shared + common), *range(own + common, own + pages)]
        self.outputs = list(range(own + pages, own + pages + growth))

    def again(self, id: int, number: int) -> Room:
        """Another request for the same."""
        return Room(
            id, number, self.digest, self.prefill, self.decode, self.pages, self.cached_pages, self.growth,
            self.generates, priority=self.priority, text=self.text, common=self.common, follows=self.follows,
            leaves=self.leaves, begun=self.begun,
        )  # fmt: skip


class Clients:
    """All requests of a world, and the instances that live now, by index."""

    def __init__(self, world: World, settings: Settings, *, calm: bool, several_ranks: bool) -> None:
        self.world = world
        self.random = world.random
        self.settings = settings
        self.calm = calm
        self.several_ranks = several_ranks
        self.policy = messages.EARLY if self.random.random() < 0.5 else messages.PREFILL_COMPLETE
        self._lives = 0
        self.prefills: list[PrefillLife] = []
        self.decodes: list[DecodeLife] = []
        self.prefills = [self.new_prefill(index) for index in range(settings.prefill)]
        self.decodes = [self.new_decode(index) for index in range(settings.decode)]
        self.rooms = 0
        self.served = 0
        self.failed = 0
        self.recomputed = 0
        self.lost = 0  # requests that were lost as often as a router computes them
        self.disturbed_links = False  # whether any link or instance was touched so far
        self._open: dict[tuple[int, str], tuple[Life, Room, float]] = {}  # halves that wait, and when they must end
        self._used: list[Room] = []  # some, whose numbers are used again
        self.delay = 0.0  # by how much standing still and the like may have held answers up

    @property
    def waiting(self) -> int:
        """Halves of requests that have not ended."""
        return len(self._open)

    def draw_layout(self) -> Layout:
        """Of an instance that starts."""
        return self.random.choice(LAYOUTS) if self.several_ranks else ONE_RANK

    def new_prefill(self, index: int) -> PrefillLife:
        """Start a process."""
        self._lives += 1
        return PrefillLife(self.world, self, index, self._lives, self.settings, self.policy)

    def new_decode(self, index: int) -> DecodeLife:
        """Start a process."""
        self._lives += 1
        return DecodeLife(self.world, self, index, self._lives, self.settings, self.policy)

    @property
    def faults(self) -> Counter[str]:
        """By kind."""
        return self.world.faults

    def computed_again(self, number: int, tokens: list[int]) -> Room:
        """What a decode instance asks a prefill instance for, and no client."""
        room = Room(0, number, b"", 0, 0, pages=len(tokens), cached_pages=0, growth=0, generates=0.0)
        room.tokens = tokens
        return room

    def request(self, prefill: int, decode: int, *, plain: bool = False) -> Room:
        """A client asks. Unless `plain`, it may do so in one of the wrong ways."""
        draw = self.random
        self.rooms += 1
        pages = draw.choice((1, 1, 2, 3, 3, 4, 6, 9, 14))
        text, common = (draw.randrange(TEXTS), draw.randrange(pages + 1)) if draw.random() < 0.5 else (0, 0)
        room = Room(
            id=self.rooms,
            number=draw.getrandbits(62) if self.rooms > 1 else 0,
            digest=self.rooms.to_bytes(8, "big"),
            prefill=prefill,
            decode=decode,
            pages=pages,
            cached_pages=draw.randrange(pages) if draw.random() < 0.2 else 0,
            growth=draw.randrange(8),
            generates=draw.expovariate(10),
            priority=int(draw.random() < 0.2),
            text=text,
            common=common,
            leaves=draw.randint(1, 2) if not plain and draw.random() < 0.1 else 0,
            begun=not plain and draw.random() < 0.05,
            final=plain,
        )
        if not plain and not room.begun and draw.random() < 0.08:
            self._sample_again(room, draw.randint(1, 3))
        kind = draw.random() if not plain else 1.0
        if kind < 0.02 and not self.calm and not room.begun:
            room.halves = 1
            self.faults["half a request"] += 1
        elif kind < 0.04 and self._used:
            other = draw.choice(self._used)
            room.number, room.contested, other.contested = other.number, True, True
            self._used.append(room)
            self.faults["room number reused"] += 1
        elif kind < 0.07:
            self.faults["abort"] += 1
            self.world.after(draw.expovariate(20), self._abort, room)
        elif kind < 0.09:
            self.faults["slow consumer"] += 1
            room.generates = draw.uniform(0.5, 2)
        elif kind < 0.11:
            room.contested = True
            self.faults["duplicate room"] += 1
            self._duplicate(room)
        if not plain and draw.random() < 0.1:
            self._used.append(room)
        self._dispatch(room)
        return room

    def _sample_again(self, room: Room, samples: int) -> None:
        """More samples of a request's prompt."""
        for _ in range(samples):
            self.rooms += 1
            sample = room.again(self.rooms, self.random.getrandbits(62))
            sample.follows = room.id
            self.world.after(self.random.random() * 0.02, self._dispatch, sample)

    def _dispatch(self, room: Room) -> None:
        draw = self.random
        if room.begun:
            self.world.after(draw.random() * 0.01, self._submit, room, "decode")
            return
        first, second = ("prefill", "decode") if draw.random() < 0.5 else ("decode", "prefill")
        self.world.after(draw.random() * 0.004, self._submit, room, first)
        if room.halves == 2:
            self.world.after(draw.random() * 0.01, self._submit, room, second)

    def _duplicate(self, room: Room) -> None:
        """Another request under the same number, at other instances as it may be."""
        self.rooms += 1
        draw = self.random
        same = draw.random() < 0.5
        twin = Room(
            id=self.rooms,
            number=room.number,
            digest=room.digest if same else self.rooms.to_bytes(8, "big"),
            prefill=room.prefill,
            decode=draw.randrange(len(self.decodes)),
            pages=room.pages,
            cached_pages=0,
            growth=0,
            generates=0.1,
            text=room.text if same else 0,
            common=room.common if same else 0,
            contested=True,
            halves=draw.choice((1, 2)),
        )
        self.world.after(draw.random() * 0.02, self._submit, twin, "decode")
        if twin.halves == 2:
            self.world.after(draw.random() * 0.02, self._submit, twin, "prefill")

    def _submit(self, room: Room, side: str) -> None:
        life: PrefillLife | DecodeLife
        life = self.prefills[room.prefill] if side == "prefill" else self.decodes[room.decode]
        if room.aborted or not life.alive:
            self._end(room, side, "was aborted: the instance is not there", 503)
            return
        # Each chunk that lands starts the wait for the next one anew.
        chunks = -(-(room.pages + room.growth) // self.settings.slot_pages) + 1
        bound = (1 + room.leaves) * (ENDS + (chunks + 2) * TIMEOUTS.waiting + room.generates)
        if room.follows:
            bound += TIMEOUTS.alloc + TIMEOUTS.waiting
        self._open[room.id, side] = (life, room, self.world.now + bound)
        if self.world.log is not None:
            self.world.tell(life.name, f"is sent its half of request {room.id}, room {room.number}, {room.pages} pages")
        life.receive(self._take, life, room)

    def _take(self, life: PrefillLife | DecodeLife, room: Room) -> None:
        if (room.id, life.role) in self._open:
            life.submit(room, f"r{room.id}")

    def _abort(self, room: Room) -> None:
        """The client goes away: the router tells both sides, or only one."""
        while room.later is not None:
            room = room.later
        room.aborted = True
        room.halved = (room.id, "prefill") in self._open and self.random.random() < 0.5
        both = (self.prefills[room.prefill], self.decodes[room.decode])
        for life in both[:1] if room.halved else both:
            if (room.id, life.role) in self._open:
                self._end(room, life.role, "was aborted: by its client")
                life.receive(self._cancel, life, room)

    def _cancel(self, life: PrefillLife | DecodeLife, room: Room) -> None:
        life.cancel(f"r{room.id}", "the client left")

    def prefill_ended(self, room: Room, rid: str, reason: str | None, status: int = 200) -> None:
        """A prefill half has been answered, unless no client waits for it: see `computed_again`."""
        if room.id:
            self._end(room, "prefill", reason, status)

    def decode_started(self, room: Room, rid: str) -> None:
        """A decode half has its prompt."""
        room.started += 1
        if room.started > 1:
            raise Violation(f"room {room.number} has started to decode {room.started} times", room.number)

    def decode_ended(self, room: Room, rid: str, reason: str | None, status: int = 200) -> None:
        """A decode half has been answered."""
        answered = (room.id, "decode") in self._open
        if answered and any(other.answered for other in room.earlier):
            raise Violation(f"request {room.id} was answered before", room.number)
        room.answered = answered and reason is None
        self._end(room, "decode", reason, status)
        if reason is None:
            self.served += 1
        else:
            self.failed += 1

    def _end(self, room: Room, side: str, reason: str | None, status: int = 499) -> None:
        self._open.pop((room.id, side), None)
        if self.world.log is not None:
            self.world.tell(f"client {room.id}", f"{side} half of room {room.number}: {reason or 'served'}")
        if side == "prefill":
            room.prefill_end = reason or ""
        else:
            room.decode_end = reason or ""
        if reason is None:
            return
        self._check_reason(room, reason)
        if status in LOST and self._recompute(room):
            return
        room.final = True
        # A router stops the other half; but it may have died, or there may be none: what then, the bounds say.
        if not room.aborted and self.random.random() < 0.6:
            room.aborted = True
            other = self.decodes[room.decode] if side == "prefill" else self.prefills[room.prefill]
            if (room.id, other.role) in self._open:
                self.world.after(self.random.random() * 0.01, self._stop_other, room, other)

    def _recompute(self, room: Room) -> bool:
        """A router gives up both halves of a room that was lost before its first token, and asks others, if it can."""
        if room.aborted or room.contested or room.final or room.halves < 2 or room.started:
            return False
        if len(room.earlier) >= RECOMPUTES:
            self.lost += 1
            return False
        room.aborted = True
        for life in (self.prefills[room.prefill], self.decodes[room.decode]):
            if self._open.pop((room.id, life.role), None) is not None:
                self.world.after(self.random.random() * 0.01, life.receive, self._cancel, life, room)
        earlier = (*room.earlier, room)
        self.rooms += 1
        self.recomputed += 1
        again = room.again(self.rooms, self.random.getrandbits(62))
        again.prefill = self._other(len(self.prefills), {other.prefill for other in earlier})
        again.decode = self._other(len(self.decodes), {other.decode for other in earlier})
        again.earlier = earlier
        room.later = again
        self.world.tell(f"client {room.id}", f"room {room.number} is lost: computed anew as room {again.number}")
        self._dispatch(again)
        return True

    def _other(self, count: int, tried: set[int]) -> int:
        return self.random.choice([index for index in range(count) if index not in tried] or range(count))

    def _stop_other(self, room: Room, life: PrefillLife | DecodeLife) -> None:
        if (room.id, life.role) in self._open:
            self._open.pop((room.id, life.role))
            life.receive(self._cancel, life, room)

    def _check_reason(self, room: Room, reason: str) -> None:
        if not reason:
            raise Violation(f"request {room.id} failed without a reason", room.number)
        kind = next((kind for words, kind in REASONS if words in reason), None)
        if kind is None:
            raise Violation(f"request {room.id} was told what nobody knows of: {reason!r}", room.number)
        ended_elsewhere = room.aborted or room.prefill_end not in (None, "") or room.decode_end not in (None, "")
        # A data path that fails its test takes its link with it.
        faults = self.faults["write"] > 0 or self.faults["damage"] > 2 or self.world.lost_tests > 0
        path = self.disturbed_links or faults
        allowed = {
            SELF_MADE: ended_elsewhere,
            # That its first prompt has come may not be known when it is to be computed again.
            CONTEST: room.contested or (room.leaves > 0 and (self.faults["frame"] > 0 or self.disturbed_links)),
            LINK: path,
            DAMAGE: self.faults["damage"] > 2,
            TEST: path,
            WRITE: self.faults["write"] > 0 or self.disturbed_links,
            WAIT: not self.calm or ((room.halves < 2 or room.contested or ended_elsewhere) and not room.halved),
        }[kind]
        if not allowed:
            raise Violation(f"request {room.id} was told what is not true: {reason!r}", room.number)

    def died(self, life: Life) -> None:
        """Whoever waits for a process that has died is told so by the router."""
        for (_, side), (other, room, _) in list(self._open.items()):
            if other is life:
                self._end(room, side, f"was aborted: {life.name} has died", 502)

    def check_bounds(self) -> None:
        """Raise if a request should have ended by now."""
        now = self.world.now - self.delay
        for (id, side), (_, room, bound) in self._open.items():
            if bound < now:
                raise Violation(
                    f"the {side} half of request {id}, room {room.number}, has not ended in time", room.number
                )

    def check_all_ended(self) -> None:
        """Raise if any request waits."""
        for (id, side), (_, room, _) in self._open.items():
            raise Violation(f"the {side} half of request {id} never ended", room.number)


def pick(draw: random.Random, count: int) -> int:
    """An index, the first ones more often: load is never even."""
    return int(count * draw.random() ** 1.3)
