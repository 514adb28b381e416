"""A backend that moves no bytes and keeps everything else: regions, checks, notices, deadlines and the death of peers.

For measuring what everything but the transfer costs, and for machines without UCX; the state that arrives is whatever
the destination's memory held.
"""

from __future__ import annotations

from pdjax.transfer.backend import BackendOptions, EventSink
from pdjax.transfer.courier import CourierBackend


def create(on_event: EventSink, options: BackendOptions) -> CourierBackend:
    """Start it. Raises `TransferError`."""
    return CourierBackend(on_event, FakeMover, host=options.host)


class FakeMover:
    """See `Mover`: whatever it is asked to move has landed."""

    name = "fake"
    receives = False
    dry_s = 0.1

    def register(self, address: int, nbytes: int) -> None:
        """Nothing is done with memory."""

    def describe(self) -> bytes:
        """Nothing to say."""
        return b""

    def connect(self, peer: str, description: bytes) -> None:
        """Nothing to prepare."""

    def disconnect(self, peer: str) -> None:
        """Nothing to let go of."""

    def move(self, peer: str, source: int, destination: int, nbytes: int) -> None:
        """Move nothing."""

    def outcome(self, handle: None) -> str:
        """All is well."""
        return ""

    def abandon(self, handle: None) -> None:
        """There is nothing to give up."""

    def progress(self) -> None:
        """Nothing is on its way."""

    def path(self) -> str:
        """In words."""
        return "fake: nothing is moved"

    def close(self) -> None:
        """Nothing to release."""
