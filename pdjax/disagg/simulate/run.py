"""One seed: a world with its requests and faults, checked all along and at the end."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from pdjax.disagg.simulate.books import Violation
from pdjax.disagg.simulate.clients import Clients, pick
from pdjax.disagg.simulate.life import Life
from pdjax.disagg.simulate.prefill_life import PrefillLife
from pdjax.disagg.simulate.settings import TIMEOUTS, Settings
from pdjax.disagg.simulate.world import Link, World
from pdjax.transfer.layout import LayoutError

CHECK_EVERY = 1.0  # seconds between looks at the requests' bounds
LAST_FAULTS = 2.0  # seconds in which those that have begun show
SETTLE = 75.0  # seconds after the last fault in which everything has ended
# What a machine with a bug may raise.
BUGS = (Violation, AssertionError, ValueError, KeyError, IndexError, TypeError, LayoutError)


@dataclass
class Outcome:
    """What a seed came to. `problem` is None if nothing that must never happen has; `log` is of the room it was."""

    seed: int
    rooms: int = 0
    served: int = 0
    recomputed: int = 0
    events: int = 0
    simulated_s: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    problem: str | None = None
    log: list[str] = field(default_factory=list)


def run_seed(seed: int, settings: Settings | None = None, *, explain: bool = True) -> Outcome:
    """Play a world. If it fails and `explain`, play it again, with a log."""
    settings = settings or Settings()
    world = World(seed)
    play = _Play(world, settings, seed)
    outcome = Outcome(seed)
    room = None
    try:
        play.run()
    except Violation as violation:
        outcome.problem, room = str(violation), violation.room
    except BUGS as error:
        outcome.problem = f"{type(error).__name__}: {error}"
    outcome.rooms, outcome.served = play.clients.rooms, play.clients.served
    outcome.recomputed = play.clients.recomputed
    outcome.events, outcome.simulated_s = world.events, world.now
    outcome.faults = Counter({kind: count for kind, count in world.faults.items() if count})
    if outcome.problem is not None and explain:
        outcome.log = _explain(seed, settings, room)
    return outcome


def _explain(seed: int, settings: Settings, room: int | None) -> list[str]:
    """The log of a failing seed: of one room and of what happened to instances and links, or the last of everything."""
    entries: list[tuple[float, str, str]] = []
    world = World(seed, entries)
    try:
        _Play(world, settings, seed).run()
    except BUGS as error:
        entries.append((world.now, "world", f"{type(error).__name__}: {error}"))
    if room is not None:
        entries = [entry for entry in entries if f"room={room}," in entry[2] or f"room {room}" in entry[2]
                   or not entry[2].startswith(("sends", "is sent", "prefill half", "decode half"))]  # fmt: skip
    return [f"{at:10.4f} {who:12} {what}" for at, who, what in entries[-400:]]


class _Play:
    def __init__(self, world: World, settings: Settings, seed: int) -> None:
        self.world = world
        self.settings = settings
        self.calm = settings.calm_every > 0 and seed % settings.calm_every == 0
        self.random = world.random
        several_ranks = settings.ranks_every > 0 and seed % settings.ranks_every == 0
        self.clients = Clients(world, settings, calm=self.calm, several_ranks=several_ranks)

    def run(self) -> None:
        """Requests and faults, then peace, then a fresh request for every pair. Raises `Violation`."""
        world, settings, clients = self.world, self.settings, self.clients
        span = settings.rooms * settings.arrival / settings.prefill
        self._arrivals = iter(sorted(self.random.random() * span for _ in range(settings.rooms)))
        self._await_request()
        if not self.calm:
            for _ in range(settings.faults):
                world.after(self.random.random() * span, self._fault)
        self._run_checked(span)
        self._make_peace()
        self._settle(world.now + SETTLE + clients.delay)
        self._probe()
        self._run_checked(world.now + 10.0)
        clients.check_all_ended()
        if settings.spares and clients.lost:
            raise Violation(f"{clients.lost} requests were lost, and only one prefill instance was touched")
        self._check_home()

    def _settle(self, until: float) -> None:
        """Run until all is at rest, or should be: what is out of its place by then is found at the end."""
        self._run_checked(self.world.now + LAST_FAULTS)
        lives = (self.clients.prefills, self.clients.decodes)
        while self.world.now < until:
            if not self.clients.waiting and all(life.at_rest for side in lives for life in side):
                return
            self._run_checked(min(self.world.now + CHECK_EVERY, until))

    def _run_checked(self, until: float) -> None:
        while self.world.now < until:
            self.world.run(min(self.world.now + CHECK_EVERY, until))
            self.clients.check_bounds()

    def _await_request(self) -> None:
        at = next(self._arrivals, None)
        if at is not None:
            self.world.after(at - self.world.now, self._request)

    def _request(self) -> None:
        self._await_request()
        clients = self.clients
        clients.request(pick(self.random, len(clients.prefills)), pick(self.random, len(clients.decodes)))

    def _probe(self) -> None:
        """A request for every pair, or, if those are many, for every instance: all of them must be served."""
        prefills, decodes = len(self.clients.prefills), len(self.clients.decodes)
        pairs = [(p, d) for p in range(prefills) for d in range(decodes)]
        if len(pairs) > 64:
            pairs = [(index % prefills, index % decodes) for index in range(max(prefills, decodes))]
        self.random.shuffle(pairs)
        probes = []
        for index, (prefill, decode) in enumerate(pairs):
            self.world.run(self.world.now + 0.01)
            probes.append(self.clients.request(prefill, decode, plain=True))
            if index % 8 == 7:
                self.world.run(self.world.now + 0.1)
        self.world.run(self.world.now + 8.0)
        for probe in probes:
            if probe.decode_end != "" or probe.prefill_end != "":
                raise Violation(
                    f"after all was well again, prefill {probe.prefill} and decode {probe.decode} did not serve "
                    f"request {probe.id}: {probe.prefill_end!r}, {probe.decode_end!r}", probe.number
                )  # fmt: skip

    def _check_home(self) -> None:
        lives: list[Life] = [*self.clients.prefills, *self.clients.decodes]
        for life in lives:
            life.check_home()

    def _fault(self) -> None:
        clients, draw = self.clients, self.random
        side = clients.prefills if draw.random() < 0.5 else clients.decodes
        life = side[pick(draw, len(side))]
        kinds: tuple[str, ...] = ("kill", "stop", "long stop", "jump", "cut", "path", "frames", "damage", "writes")
        if self.settings.spares:
            life, kinds = clients.prefills[0], kinds[:6]
        if life.layout.ranks > 1:
            kinds = (*kinds, "worker")
        elif isinstance(life, PrefillLife):
            kinds = (*kinds, "unreachable")
        kind = draw.choice(kinds)
        if kind in ("kill", "stop", "long stop", "jump", "cut", "path", "worker", "unreachable"):
            clients.disturbed_links = True
        if kind == "kill" and life.alive:
            self.world.faults["kill"] += 1
            self._kill(life)
        elif kind == "worker" and life.alive:
            # The rest of the instance notices, and ends.
            self.world.faults["worker lost"] += 1
            self.world.lose_rank(life, draw.randrange(1, life.layout.ranks))
            self.world.after(draw.random(), self._kill, life)
        elif kind in ("stop", "long stop"):
            seconds = draw.random() if kind == "stop" else draw.uniform(1, 4) * TIMEOUTS.peer
            self.world.faults[kind] += 1
            clients.delay += seconds
            life.stand_still(seconds)
        elif kind == "unreachable" and isinstance(life, PrefillLife) and life.alive and not life.stopped:
            seconds = draw.uniform(1, 12) * TIMEOUTS.peer
            self.world.faults["host out of reach"] += 1
            clients.delay += seconds
            self.world.lose_host(life, seconds)
        elif kind == "jump":
            self.world.faults["clock jump"] += 1
            life.jump(draw.uniform(0.5, 20))
        elif kind == "cut" and life.links:
            self.world.faults["link cut"] += 1
            link = draw.choice(list(life.links.values())).link
            for end in (link.prefill, link.decode):
                self.world.tell_end(end, end.life.link_down, "it was cut", False)
        elif kind == "path":
            links = [end.link for end in life.links.values() if end.link.path]
            if links:
                self.world.faults["path lost"] += 1
                link = draw.choice(links)
                link.prefill.life.receive(self._lose_path, link)
        elif kind in ("frames", "damage", "writes"):
            name = {"frames": "truncate", "damage": "damage", "writes": "refuse"}[kind]
            setattr(self.world, name, draw.uniform(0.01, 0.3))
            self.world.after(draw.uniform(0.05, 0.5), setattr, self.world, name, 0.0)

    def _kill(self, life: Life) -> None:
        if life.alive:
            life.die()
            self.world.after(self.random.expovariate(1), self._restart, life)

    def _lose_path(self, link: Link) -> None:
        prefill = link.prefill.life
        prefill.machine.path_lost(link.prefill.name, "the transport failed", prefill.now)

    def _restart(self, life: Life) -> None:
        """Another process takes a dead one's place, at the same address."""
        clients = self.clients
        if isinstance(life, PrefillLife):
            clients.prefills[life.index] = clients.new_prefill(life.index)
        else:
            clients.decodes[life.index] = clients.new_decode(life.index)

    def _make_peace(self) -> None:
        """No more faults; whoever stands still goes on in its own time, and so do those who are to start again."""
        self.world.truncate = self.world.damage = self.world.refuse = 0.0
        for kind in ("truncate", "damage", "refuse"):
            self.world.after(1.0, setattr, self.world, kind, 0.0)
