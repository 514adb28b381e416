"""The states of a room, the same on both sides, and the steps between them."""

from __future__ import annotations

from enum import IntEnum
from typing import Final


class RoomState(IntEnum):
    """Values as SGLang's KVPoll has them. Failed and Success are final."""

    FAILED = 0
    BOOTSTRAPPING = 1  # the two halves have not met yet
    WAITING_FOR_INPUT = 2  # they have met; the prompt is being computed
    TRANSFERRING = 3  # chunks are on their way
    SUCCESS = 4

    @property
    def final(self) -> bool:
        """Whether the room has ended."""
        return self in (FAILED, SUCCESS)


# By name: the machines ask for them so often that the way through the enum shows.
FAILED: Final = RoomState.FAILED
BOOTSTRAPPING: Final = RoomState.BOOTSTRAPPING
WAITING_FOR_INPUT: Final = RoomState.WAITING_FOR_INPUT
TRANSFERRING: Final = RoomState.TRANSFERRING
SUCCESS: Final = RoomState.SUCCESS

LEGAL: dict[RoomState, frozenset[RoomState]] = {
    BOOTSTRAPPING: frozenset({WAITING_FOR_INPUT, FAILED}),
    WAITING_FOR_INPUT: frozenset({TRANSFERRING, FAILED}),
    TRANSFERRING: frozenset({SUCCESS, FAILED}),
    FAILED: frozenset(),
    SUCCESS: frozenset(),
}
