"""What one process of an instance brings to transfers, as a sender or as a receiver."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pdjax.cache.spec import StateSpec
from pdjax.engine.runner import Runner
from pdjax.transfer.backend import TransferBackend
from pdjax.transfer.layout import Layout
from pdjax.transfer.slot_memory import Device


@dataclass(frozen=True)
class Part:
    """A process's part of the data plane.

    Attributes:
        layout: of the instance.
        devices: of this process, by the numbers of their ranks in the layout.
        slots: of each rank's staging, for chunks of up to `chunk_pages` pages.
        verify: whether pieces carry checksums.
    """

    runner: Runner
    layout: Layout
    devices: dict[int, Device]
    slots: int
    chunk_pages: int
    backend: TransferBackend
    verify: bool

    @property
    def state(self) -> StateSpec:
        """The pool's state as transfers know it."""
        return self.layout.state(self.runner.spec)

    @property
    def staging(self) -> dict[str, Any]:
        """What the staging of each rank is made of beside its part of the pool."""
        slot_pages = self.layout.slot_pages(self.chunk_pages)
        return {"slots": self.slots, "slot_pages": slot_pages, "backend": self.backend}
