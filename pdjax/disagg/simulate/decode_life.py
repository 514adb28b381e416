"""A simulated decode instance."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdjax.disagg.protocol import messages
from pdjax.disagg.protocol.asks import DecodeAsk
from pdjax.disagg.protocol.decode_instance import DecodeInstance
from pdjax.disagg.simulate.books import Pages, Violation
from pdjax.disagg.simulate.life import RIGHT, WRONG, Life
from pdjax.disagg.simulate.settings import TIMEOUTS, Settings
from pdjax.disagg.simulate.world import Link, World

if TYPE_CHECKING:
    from pdjax.disagg.simulate.clients import Clients, Room


class DecodeLife(Life):
    """A decode instance: requests keep their pages for as long as they generate. See `DecodeHost`."""

    role = "decode"

    def __init__(self, world: World, clients: Clients, index: int, life: int, settings: Settings, policy: str) -> None:
        super().__init__(world, clients, index, life, settings, policy)
        self.machine = DecodeInstance(self, registration=self.registration, timeouts=TIMEOUTS)
        self.pages = Pages(self.name, settings.decode_pages)
        self.asked: set[str] = set()  # links that were asked for and have not come up
        self._content: dict[str, dict[int, object]] = {}  # what a request's pages hold
        self._decoding: set[str] = set()

    def submit(self, room: Room, rid: str) -> None:
        """A request comes."""
        self.rooms[rid] = room
        ask = DecodeAsk(
            rid, room.number, f"p{room.prefill}", 1, room.pages, room.digest, room.pages, room.priority, self.now
        )
        self.machine.submit(ask, self.now)

    def cancel(self, rid: str, reason: str) -> None:
        """A client goes."""
        if self.rooms.pop(rid, None) is not None:
            self._forget(rid)
            if rid in self._decoding:
                self._decoding.discard(rid)
            else:
                self.machine.cancel(rid, reason, self.now)

    def link_up(self, link: Link, hello: bytes) -> None:
        """Event."""
        self.machine.link_up(link.name, hello, self.now)

    def link_failed(self, link: str, reason: str, gone: bool) -> None:
        """The world's answer to `connect`."""
        self.receive(self._link_failed, None, link, reason, gone)

    def _link_failed(self, _: Link | None, link: str, reason: str, gone: bool) -> None:
        if link in self.asked:
            self.asked.discard(link)
            self.machine.link_failed(link, reason, self.now, gone=gone)

    def link_down(self, link: Link, reason: str, gone: bool) -> None:
        """Event."""
        link.open[self] = False
        if self.links.get(link.name) is link:
            del self.links[link.name]
        self.world.tell(self.name, f"hears that {link.name} has ended: {reason}")
        self.machine.link_down(link.name, reason, self.now, gone=gone)

    def frame(self, link: Link, body: bytes) -> None:
        """Event."""
        self.machine.frame(link.name, body, self.now)

    def notice(self, link: Link | None, payload: bytes) -> None:
        """Event of the data path."""
        self.machine.landed(payload, self.now)

    def drained(self, link: Link | None, id: int) -> None:
        """Event of the data path."""
        self.machine.drained(id, self.now)

    def close(self, link: str) -> None:
        """See `Host`."""
        self.asked.discard(link)
        super().close(link)

    def connect(self, link: str, host: str, port: int) -> None:
        """See `DecodeHost`."""
        self.asked.add(link)
        self.world.connect(link, self, self.clients.prefills[int(host.removeprefix("p"))])

    def draw(self) -> int:
        """See `DecodeHost`."""
        return self.world.random.getrandbits(63)

    def reserve(self, rid: str) -> bool:
        """See `DecodeHost`."""
        room = self.rooms[rid]
        if self.pages.take(rid, room.pages + room.growth) is None:
            return False
        self._content[rid] = {}
        return True

    def checksum(self, slot: int, nbytes: int) -> int | None:
        """See `DecodeHost`."""
        if not 0 <= slot < len(self.slots.out):
            return None
        return RIGHT if self.slots.right[slot] else WRONG

    def landed(self, rid: str, notice: messages.ChunkNotice) -> None:
        """See `DecodeHost`."""

    def scatter(self, rid: str, slot: int, first_page: int, pages: int) -> None:
        """See `DecodeHost`."""
        held = self._content.get(rid)
        room = self.rooms[rid]
        if held is None:
            raise Violation(f"{self.name} scatters into pages that {rid} does not have", room.number)
        content = self.slots.content[slot]
        if not isinstance(content, tuple) or content[1:] != (first_page, pages):
            raise Violation(f"{self.name} scatters {content} as pages {first_page}+{pages} of {rid}", room.number)
        for page in range(first_page, first_page + pages):
            held[page] = content[0]

    def drain(self, id: int) -> None:
        """See `DecodeHost`."""
        self.world.drain(self, id)

    def start(
        self, rid: str, handoff: messages.Handoff, prompt: tuple[messages.PromptLogprobs, ...], met: float
    ) -> None:
        """See `DecodeHost`: the pages must hold what this very request's prefill has computed."""
        room = self.rooms[rid]
        held = self._content[rid]
        if any(getattr(held.get(page), "digest", None) != room.digest for page in range(room.pages)):
            missing = [page for page in range(room.pages) if getattr(held.get(page), "digest", None) != room.digest]
            raise Violation(f"{self.name} decodes {rid} from pages that are not its own: {missing}", room.number)
        self.clients.decode_started(room, rid)
        self._decoding.add(rid)
        self.world.after(room.generates, self.receive, self._generated, None, rid)

    def _generated(self, link: Link | None, rid: str) -> None:
        room = self.rooms.get(rid)
        if room is not None and rid in self._decoding:
            self._decoding.discard(rid)
            del self.rooms[rid]
            self._forget(rid)
            self.clients.decode_ended(room, rid, None)

    def fail(self, rid: str, status: int, reason: str) -> None:
        """See `Host`."""
        room = self.rooms.pop(rid)
        self._forget(rid)
        self.clients.decode_ended(room, rid, reason, status)

    def _forget(self, rid: str) -> None:
        self.pages.give_back(rid)
        self._content.pop(rid, None)

    def check_home(self) -> None:
        """Raise unless nothing is held for anybody."""
        super().check_home()
        self.pages.check_home()
