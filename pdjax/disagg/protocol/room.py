"""What the two room machines have in common."""

from __future__ import annotations

from pdjax.disagg.protocol.states import BOOTSTRAPPING, LEGAL, RoomState
from pdjax.disagg.protocol.timers import Timed


class Room(Timed):
    """A room as one of its sides sees it.

    Attributes:
        room: its number.
        state: see `RoomState`.
        ended: whether the state is final; `closed`, that it holds nothing any more either.
        link: to the other side, while there is one.
        generation: of its claim, once it is claimed.
    """

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room
        self.state: RoomState = BOOTSTRAPPING
        self.ended = False
        self.link: str | None = None
        self.generation: int | None = None

    @property
    def awaited(self) -> str:
        """What the room waits for, in words."""
        raise NotImplementedError

    def advance(self, new: RoomState) -> None:
        """Take the step to another state.

        Raises:
            ValueError: there is none: a machine has a bug.
        """
        if new not in LEGAL[self.state]:
            raise ValueError(f"a room cannot go from {self.state.name} to {new.name}")
        self.state = new
        self.ended = new.final
