"""What a decode instance decides about its links: when to make one, whether it carries data, what its end means."""

from __future__ import annotations

from pdjax.disagg.protocol import messages
from pdjax.disagg.protocol.actions import Action
from pdjax.disagg.protocol.asks import DECODE_COUNTERS, DecodeAsk
from pdjax.disagg.protocol.decode_room import DecodeRoom, Reserved
from pdjax.disagg.protocol.hosts import DecodeHost, Given
from pdjax.disagg.protocol.instance import Instance
from pdjax.disagg.protocol.path_tests import PathTests
from pdjax.disagg.protocol.prefill_room import Timeouts
from pdjax.disagg.protocol.pulse import Peer
from pdjax.disagg.protocol.quarantine import Quarantine
from pdjax.disagg.protocol.timers import Timed


class Job:
    """A request whose prompt is not here yet. `held`: chunks that ask for slots before the request has pages.
    `followers`: requests with the same prompt, which wait for it."""

    def __init__(self, ask: DecodeAsk, room: DecodeRoom) -> None:
        self.ask = ask
        self.room = room
        self.pages: Given | None = None
        self.met = 0.0
        self.held: list[int] = []
        self.followers: list[Job] = []


class Link(Peer[DecodeRoom]):
    """A prefill instance: `registration` is None until the link stands; `awaiting` are the jobs that wait for it and
    for its data path to pass a test."""

    def __init__(self) -> None:
        super().__init__()
        self.registration: messages.Registration | None = None
        self.awaiting: dict[int, Job] = {}  # by room


class DecodeLinks(Instance[DecodeHost, DecodeRoom, Job, Link]):
    """The part of `DecodeInstance` that speaks of links and of their data paths."""

    def __init__(self, host: DecodeHost, *, registration: messages.Registration, timeouts: Timeouts) -> None:
        super().__init__(host, timeouts=timeouts, counters=DECODE_COUNTERS)
        self._registration = registration
        self._paths = PathTests(timeouts.peer)
        self._quarantine = Quarantine(timeouts.workers_end)

    @property
    def tests_paths(self) -> bool:
        """Whether a test message is awaited."""
        return self._paths.under_way

    def link_up(self, link: str, hello: bytes, now: float) -> None:
        """A link that was asked for stands."""
        try:
            peer = messages.decode_registration(hello)
            problem = messages.mismatch(peer, self._registration)
        except messages.ProtocolError as error:
            peer, problem = None, str(error)
        if peer is None or problem is not None:
            self._host.close(link)
            # A peer that fitted before and does not now is another process in its place.
            sentence = f"the instances do not fit together: {problem}"
            self._drop_link(link, 502, sentence, now, gone=peer is not None)
            return
        entry = self._peers[link]
        entry.registration = peer
        self._host.say(f"linked to the prefill instance at {link}")
        self._come_back(link, entry, peer.instance, now)
        for job in entry.awaiting.values():
            self._wait_for_test(job, link, now)
        self._test_path(link, self._paths.up(link, now))

    def link_failed(self, link: str, reason: str, now: float, *, gone: bool = False, unreachable: bool = False) -> None:
        """A link that was asked for did not come up. `gone`: nobody listens there any more. `unreachable`: not even the
        host has answered, so whoever may be alive there loses nothing more by being cut off."""
        self._drop_link(link, 503, f"no link to the prefill instance at {link}: {reason}", now, gone=gone)
        if unreachable:
            for processes, rooms in self._quarantine.cut_off(link):
                self._host.say(f"what the prefill instance at {link} still sends is refused from now on: {reason}")
                for room in rooms:
                    self._do(room, room.peer_gone(processes), now)

    def link_down(self, link: str, reason: str, now: float, *, gone: bool = False) -> None:
        """A link has ended. `gone`: because the peer's process has."""
        self._drop_link(link, 502, f"the link to the prefill instance at {link} ended: {reason}", now, gone=gone)

    def _meet(self, job: Job, now: float) -> None:
        """Claim the room, now or when the link stands."""
        name = job.ask.link
        link = self._peers.get(name)
        if link is None:
            link = self._peers[name] = Link()
            self._host.connect(name, job.ask.host, job.ask.port)
        if self._paths.passed(name):
            self._claim(job, name, link, now)
            return
        link.awaiting[job.ask.room] = job
        if link.registration is not None:
            self._wait_for_test(job, name, now)
            return
        self._wait(job.room, f"a link to the prefill instance at {name}", 2 * self._timeouts.link, now)

    def _claim(self, job: Job, name: str, link: Link, now: float) -> None:
        ask = job.ask
        generation = self._host.draw()
        link.rooms[generation] = job.room
        if len(link.rooms) == 1:
            self._busy(link, now)
        claim = Reserved(
            name,
            generation,
            ask.prompt_tokens,
            ask.prompt_digest,
            ask.pages,
            has_pages=job.pages is not None,
            first_page=job.pages.filled if job.pages is not None else 0,
            dp_rank=job.pages.dp_rank if job.pages is not None else 0,
            tokens=ask.tokens,
            priority=ask.priority,
        )
        self._do(job.room, job.room.reserved(claim, now), now)

    def _wait_for_test(self, job: Job, link: str, now: float) -> None:
        what = f"a test message from the prefill instance at {link} over the data path"
        self._wait(job.room, what, 2 * self._timeouts.peer, now)

    def _test_paths(self, now: float) -> None:
        due = self._paths.due(now)
        self._timers.watch(self._paths)
        for link, number in due.tests:
            self._test_path(link, number)
        for link in due.overdue:
            self._path_failed(link, f"no test message came within {self._timeouts.peer:g} s", now)

    def _test_path(self, link: str, number: int) -> None:
        self.counters["path_tests"] += 1
        self._timers.watch(self._paths)
        self._host.send(link, messages.encode(messages.PathTest(number)))

    def test_came(self, number: int, now: float, *, right: bool) -> None:
        """A test message has come to every process. A link whose data path works may be used by those who wait for
        it."""
        link = self._paths.link_of(number)
        if link is None:
            return
        again = self._paths.came(link, now, right=right)
        if again is not None:
            self._test_path(link, again)
        elif not right:
            self._path_failed(link, "what came is not what was sent", now)
        else:
            self._health.moved(now)
            entry = self._peers[link]
            awaiting, entry.awaiting = entry.awaiting, {}
            for job in awaiting.values():
                self._claim(job, link, entry, now)

    def _path_failed(self, link: str, cause: str, now: float) -> None:
        self.counters["failed_path_tests"] += 1
        reason = f"the path from the prefill instance at {link} failed its test: {cause}"
        self._health.failed(reason, now)
        self._host.say(reason)
        self._host.send(link, messages.encode(messages.PathFailed(cause)))
        self._host.close(link)
        self._drop_link(link, 502, reason, now, gone=False)

    def _seek_lost_peers(self, now: float) -> None:
        due = self._quarantine.due(now)
        self._timers.watch(self._quarantine)
        for room in due.rooms:
            self._do(room, room.peer_gone(), now)
        for link, host, port in due.links:
            if link not in self._peers:
                self._peers[link] = Link()
                self._host.connect(link, host, port)

    def _come_back(self, link: str, entry: Link, instance: int, now: float) -> None:
        """A prefill instance is there again. If it is the same process, it says what has become of its writes; if it is
        another one in its place, the first has ended."""
        for generation, room in self._quarantine.back(link, instance, now).items():
            if not room.closed:
                entry.rooms[generation] = room
                self._do(room, room.relinked(link, now), now)
        self._seek_lost_peers(now)
        if entry.rooms:
            self._busy(entry, now)

    def _drop_link(self, link: str, status: int, reason: str, now: float, *, gone: bool) -> None:
        """Fail the rooms of a link that is gone or never stood; the next request makes a new one."""
        entry = self._peers.pop(link, None)
        self._paths.down(link)
        if entry is not None:
            for job in entry.awaiting.values():
                self._do(job.room, job.room.cancel(status, reason, now), now)
            if entry.registration is not None:
                self._lose(link, entry.registration, dict(entry.rooms), reason, now, gone=gone)
        if gone:
            self._quarantine.gone(link, now)
            self._seek_lost_peers(now)

    def _lose(
        self,
        link: str,
        peer: messages.Registration,
        rooms: dict[int, DecodeRoom],
        reason: str,
        now: float,
        *,
        gone: bool,
    ) -> None:
        workers = peer.processes > 1
        for room in rooms.values():
            self._do(room, room.link_lost(reason, now, gone=gone and not workers), now)
        unsure = {generation: room for generation, room in rooms.items() if room.granted_slots}
        if unsure and (workers or not gone):
            processes = tuple(dict.fromkeys(rank.transfer for rank in peer.ranks))
            self._quarantine.put(link, peer.instance, unsure, now, processes=processes, workers=workers)
            self._timers.watch(self._quarantine)
            self._host.say(f"{len(unsure)} rooms' staging slots are in quarantine: {reason}")

    def _give_up(self, link: str, sentence: str, now: float) -> None:
        reason = f"the link to the prefill instance at {link} is given up: {sentence}"
        self._host.say(reason)
        self._host.close(link)
        self._drop_link(link, 502, reason, now, gone=False)

    def _fire(self, timed: Timed, now: float) -> None:
        if isinstance(timed, DecodeRoom):
            self._do(timed, timed.tick(now), now)
        elif timed is self._pulse:
            self._beat(now)
        elif timed is self._paths:
            self._test_paths(now)
        else:
            self._seek_lost_peers(now)

    def _wait(self, room: DecodeRoom, what: str, seconds: float, now: float) -> None:
        room.waits(what, seconds, now)
        self._timers.watch(room)

    def _do(self, room: DecodeRoom, actions: list[Action], now: float) -> None:
        """What a room asks for after an event."""
        if actions:
            self._carry_out(room, actions, now)
        if room.closed:
            self._close(room)
            return
        if room.ended and room.generation is not None:
            self._ending[room.generation] = room
        if room.deadline < room.timer:
            self._timers.watch(room)
