"""The states of a room, the same on both sides, and the steps between them."""

from __future__ import annotations

from enum import IntEnum


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
        return self == 0 or self == 4  # by number: asked for more often than anything else, and enum look-ups are slow


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
