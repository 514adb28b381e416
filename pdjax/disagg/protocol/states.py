"""The states of a room, the same on both sides, and the steps between them."""

from __future__ import annotations

from enum import IntEnum


class RoomState(IntEnum):
    """Values as SGLang's KVPoll has them. Failed and Success are final.

    Attributes:
        final: whether the room has ended. Asked for more often than anything else, hence no property.
    """

    final: bool

    FAILED = 0
    BOOTSTRAPPING = 1  # the two halves have not met yet
    WAITING_FOR_INPUT = 2  # they have met; the prompt is being computed
    TRANSFERRING = 3  # chunks are on their way
    SUCCESS = 4

    def __init__(self, value: int) -> None:
        self.final = value in (0, 4)


LEGAL: dict[RoomState, frozenset[RoomState]] = {
    RoomState.BOOTSTRAPPING: frozenset({RoomState.WAITING_FOR_INPUT, RoomState.FAILED}),
    RoomState.WAITING_FOR_INPUT: frozenset({RoomState.TRANSFERRING, RoomState.FAILED}),
    RoomState.TRANSFERRING: frozenset({RoomState.SUCCESS, RoomState.FAILED}),
    RoomState.FAILED: frozenset(),
    RoomState.SUCCESS: frozenset(),
}


def advance(current: RoomState, new: RoomState) -> RoomState:
    """`new`, if it may follow `current`.

    Raises:
        ValueError: it may not: a machine has a bug.
    """
    if new not in LEGAL[current]:
        raise ValueError(f"a room cannot go from {current.name} to {new.name}")
    return new
