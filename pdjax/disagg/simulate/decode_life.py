"""A simulated decode instance."""

from __future__ import annotations

from itertools import repeat
from typing import TYPE_CHECKING

from pdjax.cache.ranks import RankedPages, RankGrant
from pdjax.disagg.pieces import Arrival, LandingBook
from pdjax.disagg.protocol import messages
from pdjax.disagg.protocol.asks import FIRST_OF_ALL, DecodeAsk
from pdjax.disagg.protocol.decode_instance import DecodeInstance
from pdjax.disagg.protocol.hosts import Given
from pdjax.disagg.simulate.books import Violation
from pdjax.disagg.simulate.life import Life
from pdjax.disagg.simulate.settings import SPEC, TIMEOUTS, Settings
from pdjax.disagg.simulate.world import End, World, Write
from pdjax.transfer.layout import Chunk

if TYPE_CHECKING:
    from pdjax.disagg.simulate.clients import Clients, Room


LAG = 0.02  # seconds at most until the last process of an instance has done what its leader has


class DecodeLife(Life[DecodeInstance]):
    """A decode instance: requests keep their pages for as long as they generate. See `DecodeHost`."""

    role = "decode"

    def __init__(self, world: World, clients: Clients, index: int, life: int, settings: Settings, policy: str) -> None:
        super().__init__(world, clients, index, life, settings, policy)
        self.machine = DecodeInstance(self, registration=self.registration, timeouts=TIMEOUTS)
        self.prefix = RankedPages(
            self.layout.dp, pages=settings.decode_pages + 1, rows=settings.decode_pages, page_size=1, enabled=True
        )
        self.asked: dict[str, int] = {}  # links that were asked for and have not come up: the number of the attempt
        self._granted: dict[str, RankGrant] = {}  # by request
        self._book = LandingBook(SPEC, self.layout)
        self._arrived: dict[int, Arrival] = {}  # the chunk that the machine is being told of, by slot
        self._emptying: set[int] = set()  # slots that some process has yet to copy out
        # By rank: the token that each page of its pool holds a part of; None: a part is not there.
        self._content: list[dict[int, int | None]] = [{} for _ in range(self.layout.ranks)]
        self._places = [self.layout.places(SPEC, dp_rank) for dp_rank in range(self.layout.dp)]
        self._decoding: set[str] = set()
        self._texts: dict[str, list[int]] = {}  # what the pages of a request are to hold before it decodes
        self._left: dict[str, int] = {}  # how often a request has lost its pages

    @property
    def at_rest(self) -> bool:
        """See `Life`. A path that is being tested may turn out to have lost its test."""
        return super().at_rest and not self.machine.tests_paths

    def submit(self, room: Room, rid: str) -> None:
        """A request comes."""
        self.rooms[rid] = room
        if room.begun:
            self._compute_all(rid, room)
            return
        self._texts[rid] = room.tokens
        ask = DecodeAsk(
            rid, room.number, f"p{room.prefill}", 1, room.pages, room.digest, room.pages, room.priority, self.now,
            follows=f"r{room.follows}",
        )  # fmt: skip
        self.machine.submit(ask, self.now)

    def _compute_all(self, rid: str, room: Room) -> None:
        """The prefill side is asked for a prompt, and for what was generated after it, by the claim."""
        text = self._texts[rid] = room.tokens + room.outputs
        ask = DecodeAsk(
            rid, room.number, f"p{room.prefill}", 1, len(text), messages.prompt_digest(text), len(text), room.priority,
            FIRST_OF_ALL, tokens=messages.pack_tokens(text),
        )  # fmt: skip
        self.machine.submit(ask, self.now)

    def cancel(self, rid: str, reason: str) -> None:
        """A client goes."""
        if self.rooms.pop(rid, None) is not None:
            decoding = rid in self._decoding
            self._forget(rid)
            if not decoding:
                self.machine.cancel(rid, reason, self.now)

    def jump(self, seconds: float) -> None:
        """See `Life`."""
        self.world.hasten(self, seconds)
        super().jump(seconds)

    def link_up(self, end: End, hello: bytes) -> None:
        """Event."""
        self.machine.link_up(end.name, hello, self.now)

    def link_failed(self, link: str, attempt: int, reason: str, gone: bool, unreachable: bool = False) -> None:
        """The world's answer to `connect`."""
        self.receive(self._link_failed, link, attempt, reason, gone, unreachable)

    def _link_failed(self, link: str, attempt: int, reason: str, gone: bool, unreachable: bool) -> None:
        if self.asked.get(link) == attempt:
            del self.asked[link]
            self.machine.link_failed(link, reason, self.now, gone=gone, unreachable=unreachable)

    def link_down(self, end: End, reason: str, gone: bool) -> None:
        """Event."""
        end.open = False
        if self.links.get(end.name) is end:
            del self.links[end.name]
        self.world.tell(self.name, f"hears that {end.name} has ended: {reason}")
        self.machine.link_down(end.name, reason, self.now, gone=gone)

    def notice(self, write: Write) -> None:
        """Event of the data path: a piece has landed."""
        piece = messages.PieceNotice(
            chunk=write.chunk,
            prompt_tokens=write.room.pages,
            layout=write.link.prefill.life.layout,
            piece=write.number,
            rank=write.transfer.piece.destination,
            offset=write.transfer.destination_offset,
            nbytes=write.transfer.nbytes,
            posted_at=0.0,
            checksum=None,
        )
        arrival = self._book.landed(piece, intact=write.right)
        if arrival is not None:
            slot = arrival.chunk.slot
            self._arrived[slot] = arrival
            self.machine.landed(arrival.chunk, self.now, damaged=arrival.damaged)
            del self._arrived[slot]

    def test_came(self, number: int, right: bool) -> None:
        """Event of the data path."""
        self.machine.test_came(number, self.now, right=right)

    def drained(self, id: int) -> None:
        """Event of the data path."""
        self.machine.drained(id, self.now)

    def close(self, link: str) -> None:
        """See `Host`."""
        self.asked.pop(link, None)
        super().close(link)

    def free_slot(self, slot: int) -> None:
        """See `Host`."""
        self._book.forget(slot)
        if slot in self._emptying:
            self._emptying.remove(slot)
            self.world.after(self.world.draw() * LAG, self.receive, self._emptied, slot)
        else:
            super().free_slot(slot)

    def _emptied(self, slot: int) -> None:
        super().free_slot(slot)
        self.machine.slot_freed(self.now)

    def connect(self, link: str, host: str, port: int) -> None:
        """See `DecodeHost`."""
        self.asked[link] = self.world.connect(link, self, self.clients.prefills[int(host.removeprefix("p"))])

    def draw(self) -> int:
        """See `DecodeHost`."""
        return self.world.random.getrandbits(63)

    def reserve(self, rid: str, *, share: bool) -> Given | None:
        """See `DecodeHost`."""
        room, text = self.rooms[rid], self._texts[rid]
        cached = len(text) if share else 0
        rank = self.dp_rank_of(room)
        ranks = None if rank is None else [rank]
        grant = self.prefix.begin(rid, text, pages=len(text) + room.growth, cached=cached, ranks=ranks)
        if grant is None:
            return None
        self._granted[rid] = grant
        return Given(grant.cached, grant.rank)

    def landed(self, rid: str, notice: messages.ChunkNotice, *, damaged: bool) -> None:
        """See `DecodeHost`."""

    def scatter(self, rid: str, slot: int, first_page: int, pages: int) -> None:
        """See `DecodeHost`."""
        room, grant = self.rooms[rid], self._granted.get(rid)
        if grant is None:
            raise Violation(f"{self.name} scatters into pages that {rid} does not have", room.number)
        if first_page < grant.cached:
            raise Violation(f"{self.name} scatters into pages that {rid} shares with others", room.number)
        if len(self._content) > 1:
            self._emptying.add(slot)
        arrival, landed = self._arrived[slot], self.slots.content[slot]
        plan = arrival.plan
        chunk = Chunk(first_page, pages, len(self._texts[rid]))
        lacking: set[int] = set()  # ranks
        parts: list[tuple[int, range]] = []
        for number, transfer in enumerate(plan.transfers(chunk)):
            write, rank = landed.get(number), transfer.piece.destination
            if write is None:
                lacking.add(rank)
            elif (write.chunk.first_page, write.chunk.pages) != (first_page, pages):
                raise Violation(f"{self.name} scatters {write.chunk} as {first_page}+{pages} of {rid}", room.number)
            parts.append((rank, plan.pages(chunk, transfer.piece.page_class)))
        for rank, part in parts:
            mine = slice(part.start, part.stop, part.step)
            held = repeat(None) if rank in lacking else landed[0].room.tokens[mine]
            self._content[rank].update(zip(grant.pages[mine], held, strict=False))

    def drain(self, id: int, cut_off: tuple[bytes, ...]) -> None:
        """See `DecodeHost`."""
        instances = {int(each.split()[0]) for each in cut_off}
        if instances:
            self.world.cut_off(
                self, [life for life in self.clients.prefills if life.registration.instance in instances]
            )
        self.world.drain(self, id)

    def start(
        self, rid: str, handoff: messages.Handoff, prompt: tuple[messages.PromptLogprobs, ...], met: float
    ) -> None:
        """See `DecodeHost`: the pages must hold what a prefill of this very prompt, or one that begins alike, has
        computed."""
        room, grant, text = self.rooms[rid], self._granted[rid], self._texts[rid]
        for place in self._places[grant.rank]:
            mine = slice(place.page_class, len(text), self.layout.cp)
            held = list(map(self._content[place.rank].get, grant.pages[mine]))
            if held != text[mine]:
                raise Violation(
                    f"{self.name} decodes {rid} from pages that are not its own, on rank {place.rank}: it has {held} "
                    f"for {text[mine]}", room.number
                )  # fmt: skip
        self.prefix.publish(rid, text, grant.pages)
        left = self._left.get(rid, 0)
        if not left:
            self.clients.decode_started(room, rid)
        self._decoding.add(rid)
        then = self._lose_pages if left < room.leaves else self._generated
        self.world.after(room.generates, self.receive, then, rid)

    def _lose_pages(self, rid: str) -> None:
        """There is no room for it, and no host memory: it is computed again."""
        if rid not in self._decoding:
            return
        room, grant = self.rooms[rid], self._granted.pop(rid)
        self.clients.faults["pages lost"] += 1
        self._decoding.discard(rid)
        self._left[rid] = self._left.get(rid, 0) + 1
        self.prefix.end(rid, self._texts[rid], grant.pages)
        self._compute_all(rid, room)

    def _generated(self, rid: str) -> None:
        room = self.rooms.get(rid)
        if room is not None and rid in self._decoding:
            del self.rooms[rid]
            self._forget(rid)
            self.clients.decode_ended(room, rid, None)

    def fail(self, rid: str, status: int, reason: str) -> None:
        """See `Host`."""
        room = self.rooms.pop(rid)
        self._forget(rid)
        self.clients.decode_ended(room, rid, reason, status)

    def _forget(self, rid: str) -> None:
        self._texts.pop(rid, None)
        self._left.pop(rid, None)
        grant = self._granted.pop(rid, None)
        if grant is not None:
            # What its growth would have written is nobody's prompt; nor is that of one which has not begun.
            self.prefix.end(rid, [], grant.pages)
        self._decoding.discard(rid)

    def check_home(self) -> None:
        """Raise unless nothing is held for anybody."""
        super().check_home()
        self.prefix.check_integrity()
        if self.prefix.available != self.prefix.capacity:
            raise Violation(f"{self.name}: {self.prefix.capacity - self.prefix.available} pages are not home")
