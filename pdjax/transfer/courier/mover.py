"""What a library that moves bytes has to offer; `CourierBackend` makes a whole backend of it."""

from __future__ import annotations

from typing import Any, Protocol


class Mover(Protocol):
    """All methods are called on the backend's one thread, and return in milliseconds at most (`move` may copy).

    Attributes:
        name: the backend's.
        receives: whether bytes of peers land only while `progress` is called.
        dry_s: seconds after which nothing of a peer that is gone can land any more.
    """

    name: str
    receives: bool
    dry_s: float

    def register(self, address: int, nbytes: int) -> None:
        """Make memory known to the library. Raises `TransferError`."""
        ...

    def describe(self) -> bytes:
        """What a peer's mover needs to `connect`. Raises `TransferError`."""
        ...

    def connect(self, peer: str, description: bytes) -> None:
        """Prepare to move bytes to a described peer. Raises `TransferError`."""
        ...

    def disconnect(self, peer: str) -> None:
        """Let go of a peer."""
        ...

    def move(self, peer: str, source: int, destination: int, nbytes: int) -> Any:
        """Start to move bytes, at least one, between addresses here and over there. Returns a handle for `outcome`.

        Raises:
            TransferError: it cannot be started.
        """
        ...

    def outcome(self, handle: Any) -> str | None:
        """None while it moves, "" once the bytes have landed, else what went wrong. Then the handle is spent."""
        ...

    def abandon(self, handle: Any) -> None:
        """Nobody will ask for this handle's outcome."""
        ...

    def progress(self) -> None:
        """Let bytes of peers land."""
        ...

    def path(self) -> str:
        """How bytes move, in words."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...
