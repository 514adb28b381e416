"""Simulated instances: the very machines of `pdjax.disagg.protocol`, over modelled pools, slots and times.

A *life* is one process. It may stand still, jump in time, and die; what lives at the same address later is another one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pdjax.disagg.protocol import messages
from pdjax.disagg.protocol.instance import Instance
from pdjax.disagg.protocol.timers import NEVER
from pdjax.disagg.protocol.topology import FOLLOW_BOOTSTRAP_ROOM, LOOKUP, dp_rank_of
from pdjax.disagg.simulate.books import Slots
from pdjax.disagg.simulate.settings import Settings, registration
from pdjax.disagg.simulate.world import End, World

if TYPE_CHECKING:
    from pdjax.disagg.simulate.clients import Clients, Room

M = TypeVar("M", bound=Instance[Any, Any, Any, Any])

STEP = 0.002  # seconds of a step of a few pages


class Life(Generic[M]):
    """What both roles have: a clock, a backlog while it stands still, links."""

    machine: M  # the role's
    role = ""

    def __init__(self, world: World, clients: Clients, index: int, life: int, settings: Settings, policy: str) -> None:
        self.world = world
        self.layout = clients.draw_layout()
        self.lost_ranks: set[int] = set()  # whose processes have died
        self.clients = clients
        self.index = index
        self.name = f"{self.role}{index}.{life}"
        self.alive = True
        self.stopped = False
        self.unreachable = False  # its host: nothing reaches it, or comes from it
        self.offset = 0.0  # of its clock
        self.links: dict[str, End[Life]] = {}  # this side of each
        self.rooms: dict[str, Room] = {}  # live requests, by id
        self.slots = Slots(self.name, settings.slots)
        self.registration = registration(self.role, world.random.getrandbits(62), settings, policy, self.layout)
        self.hello = messages.encode(self.registration)
        self._dp_policy = LOOKUP if self.registration.instance % 2 else FOLLOW_BOOTSTRAP_ROOM
        # What has come while it stands still; what came over a link counts only if that stands.
        self.backlog: deque[tuple[End[Life] | None, Callable[..., None], tuple[Any, ...]]] = deque()
        self._wake_at = NEVER

    def receive(self, call: Callable[..., None], *arguments: Any) -> None:
        """Something has happened to this process: now, or when it goes on, or never."""
        if not self.alive:
            return
        if self.stopped:
            self.backlog.append((None, call, arguments))
            return
        call(*arguments)
        self.turn()

    def frame(self, end: End[Life], body: bytes) -> None:
        """Event: a frame has come over a link."""
        self.machine.frame(end.name, body, self.world.now + self.offset)

    def link_down(self, end: End[Life], reason: str, gone: bool) -> None:
        """Event: the other end has closed."""
        raise NotImplementedError

    def turn(self) -> None:
        """What an engine's loop does between steps."""
        now = self.world.now + self.offset
        deadline = self.machine.tick(now)
        if deadline < self._wake_at:
            self._wake_at = deadline
            self.world.after(max(deadline - now, 0.0) + 1e-6, self._wake, deadline)

    def _wake(self, at: float) -> None:
        if self._wake_at == at:
            self._wake_at = NEVER
            if self.alive and not self.stopped:
                self.turn()

    @property
    def now(self) -> float:
        """By its own clock."""
        return self.world.now + self.offset

    @property
    def at_rest(self) -> bool:
        """Whether it is there, and nothing is out of its place."""
        return self.alive and not self.stopped and not any(self.slots.out)

    def dp_rank_of(self, room: Room) -> int | None:
        """By this life's policy."""
        return dp_rank_of(room.number, self.layout, None, self._dp_policy)

    def stand_still(self, seconds: float) -> None:
        """As after SIGSTOP, for so long."""
        if self.alive and not self.stopped:
            self.stopped = True
            self.world.tell(self.name, f"stands still for {seconds:.1f} s")
            self.world.after(seconds, self.go_on)

    def go_on(self) -> None:
        """As after SIGCONT: with all that has come meanwhile."""
        if not self.alive or not self.stopped:
            return
        self.stopped = self.unreachable = False
        self.world.tell(self.name, "goes on")
        while self.backlog:
            end, call, arguments = self.backlog.popleft()
            if end is None:
                call(*arguments)
            elif end.open:
                call(end, *arguments)
        self.turn()

    def jump(self, seconds: float) -> None:
        """The clock goes forward."""
        self.offset += seconds
        self.world.tell(self.name, f"has its clock jump by {seconds:.1f} s")
        self.receive(lambda: None)

    def die(self) -> None:
        """SIGKILL."""
        self.alive = False
        self.world.tell(self.name, "dies")
        for end in list(self.links.values()):
            if self.role == "prefill":
                self.world.close_path(end.link, by_death=True)
            self.world.end(end, gone=True, reason="the peer has died")
        self.links.clear()
        self.clients.died(self)

    # What both machines ask of a host

    def send(self, link: str, body: bytes) -> None:
        """See `Host`."""
        if self.world.log is not None:
            self.world.tell(self.name, f"sends on {link}: {messages.decode_message(body)}")
        end = self.links.get(link)
        if end is not None:
            self.world.send(end.other, body)

    def close(self, link: str) -> None:
        """See `Host`."""
        end = self.links.pop(link, None)
        if end is not None:
            self.world.end(end, gone=False, reason="closed by the peer")

    def take_slot(self) -> int | None:
        """See `Host`."""
        return self.slots.take()

    def free_slot(self, slot: int) -> None:
        """See `Host`."""
        self.slots.give_back(slot)

    def say(self, text: str) -> None:
        """See `Host`."""
        self.world.tell(self.name, f"says: {text}")

    def check_home(self) -> None:
        """Raise unless nothing is held for anybody."""
        self.machine.check_integrity()
        self.slots.check_home()
