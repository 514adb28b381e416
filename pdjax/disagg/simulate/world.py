"""Clock, links and data paths of a simulated world. Whatever is random comes from one seeded generator."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pdjax.disagg.protocol.messages import ChunkNotice
from pdjax.disagg.protocol.timers import NEVER
from pdjax.disagg.simulate.books import Violation
from pdjax.disagg.simulate.settings import TIMEOUTS

if TYPE_CHECKING:
    from pdjax.disagg.simulate.clients import Room
    from pdjax.disagg.simulate.decode_life import DecodeLife
    from pdjax.disagg.simulate.life import Life
    from pdjax.disagg.simulate.prefill_life import PrefillLife
    from pdjax.transfer.layout import Transfer


LINGER = 0.9 * TIMEOUTS.workers_end  # seconds that the last worker of an instance outlives its leader at most

L = TypeVar("L", bound="Life", covariant=True)


class End(Generic[L]):
    """One side of a link: what its life hears, in order. One that is closed hears nothing more."""

    __slots__ = ("heard_at", "life", "link", "name", "open", "other")

    def __init__(self, link: Link, life: L, name: str) -> None:
        self.link = link
        self.life = life
        self.name = name  # what this side calls the link
        self.open = True
        self.heard_at = 0.0  # when the newest message arrives here
        self.other: End[Life]


class Link:
    """Two leaders' connection: a FIFO each way, and a data path from the prefill to the decode side.

    The other end of one that closes is told after what was sent before.
    """

    __slots__ = ("decode", "landed_at", "path", "prefill", "writes")

    def __init__(self, name: str, prefill_name: str, prefill: PrefillLife, decode: DecodeLife) -> None:
        self.prefill: End[PrefillLife] = End(self, prefill, prefill_name)
        self.decode: End[DecodeLife] = End(self, decode, name)
        self.prefill.other, self.decode.other = self.decode, self.prefill
        self.landed_at: dict[tuple[int, int], float] = {}  # by source and destination rank: each pair has its own path
        self.path = False  # whether the prefill side has opened it
        self.writes: dict[Write, None] = {}


class Write:
    """One piece of a chunk on its way into a slot of one rank. It may land after its sender has failed, or is dead."""

    def __init__(self, id: int, link: Link, chunk: ChunkNotice, room: Room, number: int, transfer: Transfer) -> None:
        self.id = id
        self.link = link
        self.chunk = chunk
        self.room = room  # whose pages it brings
        self.number = number  # of the piece
        self.transfer = transfer
        self.epoch = 0  # of the slot
        self.right = True
        self.told = True  # whether the notice comes with it
        self.reported = False
        self.posted_at = 0.0
        self.lands_at = 0.0
        self.awaited = False  # by a drain


class World:
    """Runs events in order of time. `log`, if given, takes (time, who, what) of everything that happens."""

    def __init__(self, seed: int, log: list[tuple[float, str, str]] | None = None) -> None:
        self.random = random.Random(seed)
        self.draw = self.random.random
        self.now = 0.0
        self.log = log
        self.faults: Counter[str] = Counter()
        self.lost_tests = 0  # test messages that were asked for by broken frames
        self.truncate = 0.0  # how likely a frame is to be cut or scrambled, now
        self.damage = 0.0  # how likely a chunk is to be damaged, now
        self.refuse = 0.0  # how likely a write is to fail, now
        # What is to happen, the next last: the times, negated so that they ascend, and what happens then. With the few
        # dozen events that a world waits for, a search among floats costs half of what a heap of tuples does.
        self._times: list[float] = []
        self._calls: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._pushed = 0
        self._attempts = 0
        self._orphans: dict[DecodeLife, list[Write]] = {}  # writes that nobody reports on any more

    @property
    def events(self) -> int:
        """How many have happened."""
        return self._pushed - len(self._times)

    def after(self, delay: float, call: Callable[..., None], *arguments: Any) -> None:
        """Call something later."""
        self._at(self.now + delay, call, arguments)

    def _at(self, at: float, call: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        """Call something after all that happens until then."""
        self._pushed += 1
        place = bisect_left(self._times, -at)
        self._times.insert(place, -at)
        self._calls.insert(place, (call, arguments))

    def run(self, until: float) -> None:
        """Let everything happen that is due by then."""
        times, calls = self._times, self._calls
        while times and times[-1] >= -until:
            self.now = -times.pop()
            call, arguments = calls.pop()
            call(*arguments)
        self.now = until

    def tell(self, who: str, what: str) -> None:
        """For the log. Where it is asked often, ask `log` first: the sentence costs more than the rest."""
        if self.log is not None:
            self.log.append((self.now, who, what))

    # Links

    def connect(self, name: str, decode: DecodeLife, prefill: PrefillLife | None) -> int:
        """A decode instance asks for a link. `prefill` is who lives at that address; None: nobody. Returns a number for
        the attempt."""
        self._attempts += 1
        attempt = self._attempts
        delay = self.random.uniform(0.002, 0.02)
        if prefill is None or not prefill.alive:
            self.after(delay, decode.link_failed, name, attempt, "connection refused", True)
            return attempt
        if prefill.unreachable:
            self.after(TIMEOUTS.link, decode.link_failed, name, attempt, "its host does not answer", False, True)
            return attempt
        link = Link(name, f"in-{attempt}", prefill, decode)
        if prefill.stopped:
            # Its kernel takes the connection, which it answers if it goes on in time.
            self.after(TIMEOUTS.link, decode.link_failed, name, attempt, "no answer", False)
            prefill.backlog.append((None, self._joined, (link, prefill, decode, attempt)))
        else:
            self.after(delay, self._joined, link, prefill, decode, attempt)
        return attempt

    def _joined(self, link: Link, prefill: PrefillLife, decode: DecodeLife, attempt: int) -> None:
        name = link.decode.name
        if not decode.alive or decode.asked.get(name) != attempt:
            return  # nobody waits for it any more
        if not prefill.alive:
            decode.link_failed(name, attempt, "it died during the handshake", False)
            return
        del decode.asked[name]
        decode.links[name] = link.decode
        prefill.links[link.prefill.name] = link.prefill
        self.tell_end(link.prefill, prefill.link_up, decode.hello)
        self.tell_end(link.decode, decode.link_up, prefill.hello)

    def send(self, end: End[Life], body: bytes) -> None:
        """A frame for one end, which may be cut or scrambled on its way."""
        if self.truncate and self.draw() < self.truncate:
            self.faults["frame"] += 1
            self.lost_tests += b"path_test" in body
            self.tell(end.other.life.name, f"the next frame to {end.life.name} is broken on its way")
            body = body[: self.random.randrange(len(body))] if self.draw() < 0.5 else b"\xc1" + body
        self.tell_end(end, end.life.frame, body)

    def tell_end(self, end: End[Life], call: Callable[..., None], *arguments: Any) -> None:
        """Something that one end of a link learns in order."""
        at = self.now + self.draw() * 0.004
        if at < end.heard_at:
            at = end.heard_at
        end.heard_at = at
        self._at(at, self._arrive, (end, call, arguments))

    def _arrive(self, end: End[Life], call: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        life = end.life
        if not end.open or not life.alive:
            return
        if life.stopped:
            life.backlog.append((end, call, arguments))
            return
        call(end, *arguments)
        life.turn()

    def end(self, end: End[Life], *, gone: bool, reason: str) -> None:
        """One side's end closes, by its wish or its death."""
        if end.open:
            end.open = False
            self.tell_end(end.other, end.other.life.link_down, reason, gone)

    # Data paths

    def post(self, write: Write) -> None:
        """Start a write."""
        link, piece, slot = write.link, write.transfer.piece, write.chunk.slot
        prefill, decode = link.prefill.life, link.decode.life
        if piece.source in prefill.lost_ranks:
            return  # nobody is there to send it, or to say so
        if not link.path or piece.destination in decode.lost_ranks or (self.refuse and self.draw() < self.refuse):
            self.faults["write"] += link.path
            self.after(0.001, self._report, write, "no path" if not link.path else "the transport failed")
            return
        ring = decode.slots
        if not ring.out[slot]:
            raise Violation(f"{prefill.name} writes into slot {slot} of {decode.name}, which is free")
        write.epoch = ring.epochs[slot]
        if self.damage and self.draw() < self.damage:
            self.faults["damage"] += 1
            write.right = False
        pair = piece.source, piece.destination
        at = max(self.now + self.draw() * 0.01, link.landed_at.get(pair, 0.0))
        link.landed_at[pair] = write.lands_at = at
        link.writes[write] = None
        self._at(at, self._land, (write, at))

    def _land(self, write: Write, due: float) -> None:
        if write.lands_at != due:
            return  # put off
        link, slot = write.link, write.chunk.slot
        link.writes.pop(write, None)
        decode = link.decode.life
        if decode.alive and write.transfer.piece.destination not in decode.lost_ranks:
            ring = decode.slots
            if not ring.out[slot] or ring.epochs[slot] != write.epoch:
                raise Violation(
                    f"a write of {link.prefill.life.name} has landed in slot {slot} of {decode.name} after that was "
                    "released", write.chunk.room
                )  # fmt: skip
            ring.content[slot][write.number] = write
            if write.told:
                decode.receive(decode.notice, write)
        self.after(self.draw() * 0.002, self._report, write, None)

    def _report(self, write: Write, error: str | None) -> None:
        if not write.reported:
            write.reported = True
            prefill = write.link.prefill.life
            prefill.receive(prefill.write_ended, write.id, error)

    def post_test(self, link: Link, id: int, number: int) -> None:
        """Start a test message."""
        prefill = link.prefill.life
        if not link.path or (self.refuse and self.draw() < self.refuse):
            self.faults["write"] += link.path
            self.after(0.001, prefill.receive, prefill.write_ended, id, "the transport failed")
            return
        right = True
        if self.damage and self.draw() < self.damage:
            self.faults["damage"] += 1
            right = False
        self.after(self.draw() * 0.01, self._land_test, link, id, number, right)

    def _land_test(self, link: Link, id: int, number: int, right: bool) -> None:
        prefill = link.prefill.life
        decode = link.decode.life
        if link.path and decode.alive:
            decode.receive(decode.test_came, number, right)
        prefill.receive(prefill.write_ended, id, None if link.path else "the path was closed")

    def close_path(self, link: Link, *, by_death: bool) -> None:
        """No more writes. Those on their way are reported as failed, and may land all the same, up to much later."""
        link.path = False
        for write in list(link.writes):
            if not by_death:
                self.after(0.001, self._report, write, "the path was closed")
            # Workers outlive their leader for a moment, in which they carry out what it has ordered.
            lingers = by_death and write.transfer.piece.source > 0
            self._orphan(write, self.draw() * LINGER if lingers else 0.0)

    def lose_rank(self, life: Life, rank: int) -> None:
        """The process of a rank has died. Nobody reports on its writes any more."""
        life.lost_ranks.add(rank)
        self.tell(life.name, f"loses the process of rank {rank}")
        for end in life.links.values():
            for write in list(end.link.writes):
                if end is end.link.prefill and write.transfer.piece.source == rank:
                    write.reported = True
                    self._orphan(write, 0.0)

    def _orphan(self, write: Write, delay: float) -> None:
        """A write whose sender knows no more of it lands late, and half of them without a word."""
        if self.draw() < 0.5:
            write.told = False
        write.posted_at = self.now + delay
        write.lands_at = write.posted_at + self.draw() * 0.5
        self.after(write.lands_at - self.now, self._land, write, write.lands_at)
        self._orphans.setdefault(write.link.decode.life, []).append(write)

    def hasten(self, decode: DecodeLife, seconds: float) -> None:
        """To a decode instance, so much time has passed at once: what was to be sent to it meanwhile has been."""
        for write in self._orphans.get(decode, ()):
            if write.posted_at > self.now:
                write.posted_at = max(self.now, write.posted_at - seconds)
                write.lands_at = write.posted_at + self.draw() * 0.5
                self.after(write.lands_at - self.now, self._land, write, write.lands_at)

    def lose_host(self, prefill: PrefillLife, seconds: float) -> None:
        """The cable of a prefill instance's host is pulled for so long. What it has sent comes after that, but for what
        a drain waits for, which takes it for granted that what was sent is there in a moment."""
        prefill.stand_still(seconds)
        prefill.unreachable = True
        writes = [write for end in prefill.links.values() for write in end.link.writes]
        for write in [*writes, *(each for each in self._orphaned() if each.link.prefill.life is prefill)]:
            if write.lands_at > self.now and not write.awaited:
                write.lands_at = self.now + seconds + self.draw() * 0.5
                self._at(write.lands_at, self._land, (write, write.lands_at))

    def cut_off(self, decode: DecodeLife, lives: list[PrefillLife]) -> None:
        """Nothing that these have sent, or send over their links of now, lands any more."""
        for link in [end.link for life in lives for end in life.links.values() if end.link.decode.life is decode]:
            link.path = False
            for write in list(link.writes):
                self.after(0.001, self._report, write, "the connection was closed")
                write.lands_at = NEVER
            link.writes.clear()
        for write in self._orphaned():
            if write.link.decode.life is decode and write.link.prefill.life in lives:
                write.lands_at = NEVER
        if decode in self._orphans:
            self._orphans[decode] = [write for write in self._orphans[decode] if write.lands_at < NEVER]

    def _orphaned(self) -> list[Write]:
        return [write for writes in self._orphans.values() for write in writes]

    def drain(self, decode: DecodeLife, id: int) -> None:
        """Tell when all has landed that was sent by now and that nobody reports on any more."""
        orphans = [write for write in self._orphans.pop(decode, ()) if write.lands_at > self.now]
        if orphans:
            self._orphans[decode] = orphans
        sent = [write for write in orphans if write.posted_at <= self.now]
        for write in sent:
            write.awaited = True
        dry = max((write.lands_at for write in sent), default=self.now) + 0.01
        self.after(dry - self.now, decode.receive, decode.drained, id)
