"""Clock, links and data paths of a simulated world. Whatever is random comes from one seeded generator."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pdjax.disagg.protocol.messages import ChunkNotice
from pdjax.disagg.simulate.books import Violation
from pdjax.disagg.simulate.settings import TIMEOUTS

if TYPE_CHECKING:
    from pdjax.disagg.simulate.decode_life import DecodeLife
    from pdjax.disagg.simulate.life import Life
    from pdjax.disagg.simulate.prefill_life import PrefillLife


class Link:
    """Two leaders' connection: a FIFO each way, and a data path from the prefill to the decode side.

    An end that is closed hears nothing more of it, and the other end is told after what was sent before.
    """

    __slots__ = ("decode", "heard_at", "landed_at", "name", "open", "path", "prefill", "prefill_name", "writes")

    def __init__(self, name: str, prefill_name: str, prefill: PrefillLife, decode: DecodeLife) -> None:
        self.name = name  # on the decode side
        self.prefill_name = prefill_name
        self.prefill = prefill
        self.decode = decode
        self.open: dict[Life, bool] = {prefill: True, decode: True}
        self.heard_at: dict[Life, float] = {prefill: 0.0, decode: 0.0}  # when each side's newest message arrives
        self.landed_at = 0.0
        self.path = False  # whether the prefill side has opened it
        self.writes: dict[int, Write] = {}

    def name_at(self, life: Life) -> str:
        """What a side calls it."""
        return self.name if life is self.decode else self.prefill_name

    def other(self, life: Life) -> Life:
        """The other side."""
        return self.decode if life is self.prefill else self.prefill


class Write:
    """Bytes on their way into a slot. They may land after their sender has failed, or is dead."""

    __slots__ = ("content", "epoch", "id", "lands_at", "link", "notice", "reported", "right", "slot")

    def __init__(self, id: int, link: Link, slot: int, epoch: int, content: object, notice: ChunkNotice) -> None:
        self.id = id
        self.link = link
        self.slot = slot
        self.epoch = epoch
        self.content = content
        self.notice: ChunkNotice | None = notice
        self.right = True
        self.reported = False
        self.lands_at = 0.0


class World:
    """Runs events in order of time. `log`, if given, takes (time, who, what) of everything that happens."""

    def __init__(self, seed: int, log: list[tuple[float, str, str]] | None = None) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.log = log
        self.faults: Counter[str] = Counter()
        self.truncate = 0.0  # how likely a frame is to be cut or scrambled, now
        self.damage = 0.0  # how likely a chunk is to be damaged, now
        self.refuse = 0.0  # how likely a write is to fail, now
        self.events = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._pushed = 0
        self._links = 0
        self._orphans: dict[DecodeLife, list[Write]] = {}  # writes that nobody reports on any more

    def after(self, delay: float, call: Callable[..., None], *arguments: Any) -> None:
        """Call something later."""
        self._pushed += 1
        heapq.heappush(self._heap, (self.now + delay, self._pushed, call, arguments))

    def run(self, until: float) -> None:
        """Let everything happen that is due by then."""
        heap, pop = self._heap, heapq.heappop
        while heap and heap[0][0] <= until:
            self.now, _, call, arguments = pop(heap)
            self.events += 1
            call(*arguments)
        self.now = max(self.now, until)

    def tell(self, who: str, what: str) -> None:
        """For the log."""
        if self.log is not None:
            self.log.append((self.now, who, what))

    # Links

    def connect(self, name: str, decode: DecodeLife, prefill: PrefillLife | None) -> None:
        """A decode instance asks for a link. `prefill` is who lives at that address; None: nobody."""
        delay = self.random.uniform(0.002, 0.02)
        if prefill is None or not prefill.alive:
            self.after(delay, decode.link_failed, name, "connection refused", True)
        elif prefill.stopped:
            self.after(TIMEOUTS.link, decode.link_failed, name, "no answer", False)
        else:
            self._links += 1
            link = Link(name, f"in-{self._links}", prefill, decode)
            self.after(delay, self._joined, link)

    def _joined(self, link: Link) -> None:
        if not link.decode.alive or link.name not in link.decode.asked:
            return  # nobody waits for it any more
        if not link.prefill.alive:
            link.decode.link_failed(link.name, "it died during the handshake", False)
            return
        link.decode.asked.discard(link.name)
        link.decode.links[link.name] = link
        link.prefill.links[link.prefill_name] = link
        self.send_event(link, link.prefill, link.prefill.link_up, link.decode.hello)
        self.send_event(link, link.decode, link.decode.link_up, link.prefill.hello)

    def send(self, link: Link, sender: Life, body: bytes) -> None:
        """A frame, which may be cut or scrambled on its way."""
        if self.truncate and self.random.random() < self.truncate:
            self.faults["frame"] += 1
            self.tell(sender.name, f"the next frame to {link.other(sender).name} is broken on its way")
            body = body[: self.random.randrange(len(body))] if self.random.random() < 0.5 else b"\xc1" + body
        receiver = link.decode if sender is link.prefill else link.prefill
        self.send_event(link, receiver, receiver.frame, body)

    def send_event(self, link: Link, receiver: Life, call: Callable[..., None], *arguments: Any) -> None:
        """Something that the other end of a link learns in order."""
        heard = link.heard_at
        at = self.now + self.random.random() * 0.004
        if at < heard[receiver]:
            at = heard[receiver]
        heard[receiver] = at
        self._pushed += 1
        heapq.heappush(self._heap, (at, self._pushed, self._arrive, (link, receiver, call, arguments)))

    def _arrive(self, link: Link, receiver: Life, call: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        if not link.open[receiver]:
            return
        if receiver.stopped or not receiver.alive:
            receiver.receive(call, link, *arguments)
        else:
            call(link, *arguments)
            receiver.turn()

    def end(self, link: Link, side: Life, *, gone: bool, reason: str) -> None:
        """One side's end closes, by its wish or its death."""
        if link.open[side]:
            link.open[side] = False
            other = link.other(side)
            self.send_event(link, other, other.link_down, reason, gone)

    # Data paths

    def post(self, write: Write) -> None:
        """Start a write."""
        link = write.link
        if not link.path or (self.refuse and self.random.random() < self.refuse):
            self.faults["write"] += link.path
            self.after(0.001, self._report, write, "no path" if not link.path else "the transport failed")
            return
        ring = link.decode.slots
        if not ring.out[write.slot]:
            raise Violation(f"{link.prefill.name} writes into slot {write.slot} of {link.decode.name}, which is free")
        write.epoch = ring.epochs[write.slot]
        if self.damage and self.random.random() < self.damage:
            self.faults["damage"] += 1
            write.right = False
        link.landed_at = write.lands_at = max(link.landed_at, self.now + self.random.random() * 0.01)
        link.writes[write.id] = write
        self.after(write.lands_at - self.now, self._land, write, write.lands_at)

    def _land(self, write: Write, due: float) -> None:
        if write.lands_at != due:
            return  # put off
        link = write.link
        link.writes.pop(write.id, None)
        decode = link.decode
        if decode.alive:
            ring = decode.slots
            if not ring.out[write.slot] or ring.epochs[write.slot] != write.epoch:
                raise Violation(f"a write of {link.prefill.name} has landed in slot {write.slot} of {decode.name} "
                                "after that was released")  # fmt: skip
            ring.content[write.slot] = write.content
            ring.right[write.slot] = write.right
            if write.notice is not None:
                decode.receive(decode.notice, None, write.notice)
        self.after(self.random.random() * 0.002, self._report, write, None)

    def _report(self, write: Write, error: str | None) -> None:
        if not write.reported:
            write.reported = True
            link = write.link
            link.prefill.receive(link.prefill.write_ended, None, write.id, error)

    def post_test(self, link: Link, id: int, number: int) -> None:
        """Start a test message."""
        if not link.path or (self.refuse and self.random.random() < self.refuse):
            self.faults["write"] += link.path
            self.after(0.001, link.prefill.receive, link.prefill.write_ended, None, id, "the transport failed")
            return
        right = True
        if self.damage and self.random.random() < self.damage:
            self.faults["damage"] += 1
            right = False
        self.after(self.random.random() * 0.01, self._land_test, link, id, number, right)

    def _land_test(self, link: Link, id: int, number: int, right: bool) -> None:
        if link.path and link.decode.alive:
            link.decode.tests[number] = right
            link.decode.receive(link.decode.test_came, None, number)
        error = None if link.path else "the path was closed"
        link.prefill.receive(link.prefill.write_ended, None, id, error)

    def close_path(self, link: Link, *, by_death: bool) -> None:
        """No more writes. Those on their way are reported as failed, and may land all the same, up to much later."""
        link.path = False
        for write in list(link.writes.values()):
            if not by_death:
                self.after(0.001, self._report, write, "the path was closed")
            if self.random.random() < 0.5:
                write.notice = None  # a part of the bytes lands, and nobody says so
            late = self.random.random() * 0.5
            write.lands_at = self.now + late
            self.after(late, self._land, write, write.lands_at)
            self._orphans.setdefault(link.decode, []).append(write)

    def drain(self, decode: DecodeLife, id: int) -> None:
        """Tell when all that nobody reports on any more has landed."""
        orphans = [write for write in self._orphans.pop(decode, ()) if write.lands_at > self.now]
        if orphans:
            self._orphans[decode] = orphans
        dry = max((write.lands_at for write in orphans), default=self.now) + 0.01
        self.after(dry - self.now, decode.receive, decode.drained, None, id)
