"""A simulated prefill instance."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from pdjax.disagg.pieces import Tally, plan_of_chunk
from pdjax.disagg.protocol import messages
from pdjax.disagg.protocol.asks import PrefillAsk
from pdjax.disagg.protocol.hosts import Given
from pdjax.disagg.protocol.prefill_instance import PrefillInstance
from pdjax.disagg.simulate.books import Pages, Violation
from pdjax.disagg.simulate.life import STEP, Life
from pdjax.disagg.simulate.settings import SPEC, TIMEOUTS, Settings
from pdjax.disagg.simulate.world import End, Link, World, Write
from pdjax.transfer.layout import Chunk, Layout

if TYPE_CHECKING:
    from pdjax.disagg.simulate.clients import Clients, Room


class PrefillLife(Life[PrefillInstance]):
    """A prefill instance: one prompt at a time, a few pages a step. See `PrefillHost`."""

    role = "prefill"

    def __init__(self, world: World, clients: Clients, index: int, life: int, settings: Settings, policy: str) -> None:
        super().__init__(world, clients, index, life, settings, policy)
        self.machine = PrefillInstance(self, registration=self.registration, timeouts=TIMEOUTS)
        # Of each dp rank.
        self.pages = [Pages(f"{self.name}/{rank}", settings.prefill_pages) for rank in range(self.layout.dp)]
        self._peers: dict[str, Layout] = {}
        self._sending = Tally()  # chunks, over their pieces
        self._step_pages = settings.slot_pages
        self._queue: deque[str] = deque()
        self._done: dict[str, int] = {}  # computed pages
        self._rank_of: dict[str, int] = {}  # dp ranks of those that have pages
        self._served: dict[str, str] = {}  # link that a request's pages go to
        self._stepping = False

    def submit(self, room: Room, rid: str) -> None:
        """A request comes."""
        self.rooms[rid] = room
        self.machine.submit(PrefillAsk(rid, room.number, room.pages, room.digest, room.priority, self.now), self.now)

    def cancel(self, rid: str, reason: str) -> None:
        """A client goes."""
        room = self.rooms.pop(rid, None)
        if room is not None:
            self._forget(rid)
            self.machine.cancel(rid, reason, self.now)

    def link_up(self, end: End, hello: bytes) -> None:
        """Event."""
        self.machine.link_up(end.name, hello, self.now)

    def link_down(self, end: End, reason: str, gone: bool) -> None:
        """Event."""
        end.open = False
        self.links.pop(end.name, None)
        self.world.tell(self.name, f"hears that {end.name} has ended: {reason}")
        self.machine.link_down(end.name, reason, self.now)
        self._close(end.link)

    def write_ended(self, id: int, error: str | None) -> None:
        """Event of the data path: a piece has ended."""
        over = self._sending.ended(id, error)
        if over is not None:
            self.machine.write_ended(id, over.error, self.now)

    def open_path(self, link: str, peer: messages.Registration) -> str | None:
        """See `PrefillHost`."""
        end = self.links.get(link)
        if end is not None:
            end.link.path = True
            self._peers[link] = peer.layout
        return None

    def close_path(self, link: str) -> None:
        """See `PrefillHost`."""
        end = self.links.get(link)
        if end is not None:
            self._close(end.link)

    def _close(self, link: Link) -> None:
        if link.path:
            self.world.close_path(link, by_death=False)

    def rebootstrap(self, rid: str, room: int, token_ids: list[int], priority: int) -> tuple[int, str] | None:
        """See `PrefillHost`."""
        self.rooms[rid] = self.clients.computed_again(room, token_ids)
        return None

    def begin_prompt(self, rid: str) -> Given | None:
        """See `PrefillHost`."""
        room = self.rooms[rid]
        rank = self.dp_rank_of(room)
        if rank is None:
            rank = max(range(self.layout.dp), key=lambda each: len(self.pages[each].free))
        if self.pages[rank].take(rid, room.pages) is None:
            return None
        self._rank_of[rid] = rank
        self._queue.append(rid)
        self._done[rid] = room.cached_pages
        if not self._stepping:
            self._stepping = True
            self.world.after(0.0, self.receive, self._step, "", 0)
        return Given(room.cached_pages, rank)

    def _step(self, rid: str, end: int) -> None:
        """A step ends, and the next begins."""
        self.machine.steps += 1
        now, queue, done = self.now, self._queue, self._done
        if rid in done:
            done[rid] = end
            if end < self.rooms[rid].pages:
                self.machine.computed(rid, now)
            else:
                queue.remove(rid)
                self.machine.prompt_done(rid, 1, -0.5, [], 0, now)
        while queue and queue[0] not in done:
            queue.popleft()
        if not queue:
            self._stepping = False
            return
        rid = queue[0]
        first = done[rid]
        end = min(first + self._step_pages, self.rooms[rid].pages)
        self.machine.computing(rid, first, end, now)
        self.world.after(STEP, self.receive, self._step, rid, end)

    def write(self, id: int, link: str, slot: int, rid: str, notice: messages.ChunkNotice, deadline: float) -> None:
        """See `PrefillHost`."""
        room, end = self.rooms[rid], self.links.get(link)
        if rid not in self.pages[notice.source_dp_rank].owned:
            raise Violation(f"{self.name} gathers pages of {rid}, which has none", room.number)
        if notice.first_page + notice.pages > self._done[rid] and rid in self._queue:
            raise Violation(f"{self.name} sends pages of {rid} before they are computed", room.number)
        if self._served.setdefault(rid, link) != link:
            raise Violation(f"{rid} is sent to two decode instances: its room was claimed twice", room.number)
        if end is None:
            raise Violation(f"{self.name} writes on a link that is gone", room.number)
        plan = plan_of_chunk(SPEC, self.layout, self._peers[link], notice)
        transfers = plan.transfers(Chunk(notice.first_page, notice.pages, room.pages))
        self._sending.begin(id, len(transfers))
        for number, transfer in enumerate(transfers):
            self.world.post(Write(id, end.link, notice, room, number, transfer))

    def test_path(self, id: int, link: str, number: int, deadline: float) -> None:
        """See `PrefillHost`."""
        end = self.links.get(link)
        if end is not None:
            self._sending.begin(id, 1)
            self.world.post_test(end.link, id, number)

    def finish(self, rid: str) -> None:
        """See `PrefillHost`."""
        room = self.rooms.pop(rid)
        self._forget(rid)
        self.clients.prefill_ended(room, rid, None)

    def fail(self, rid: str, status: int, reason: str) -> None:
        """See `Host`."""
        room = self.rooms.pop(rid)
        self._forget(rid)
        self.clients.prefill_ended(room, rid, reason, status)

    def _forget(self, rid: str) -> None:
        rank = self._rank_of.pop(rid, None)
        if rank is not None:
            self.pages[rank].give_back(rid)
        self._done.pop(rid, None)
        self._served.pop(rid, None)

    def check_home(self) -> None:
        """Raise unless nothing is held for anybody."""
        super().check_home()
        for pages in self.pages:
            pages.check_home()
