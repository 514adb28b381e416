"""What one process of an instance brings to transfers, as a sender or as a receiver."""

from __future__ import annotations

from dataclasses import dataclass

from pdjax.engine.runner import Runner
from pdjax.transfer.backend import TransferBackend
from pdjax.transfer.layout import Layout
from pdjax.transfer.staging import Device


@dataclass(frozen=True)
class Part:
    """A process's part of the data plane.

    Attributes:
        layout: of the instance.
        devices: of this process, by the numbers of their ranks in the layout.
        slots: of each rank's staging, of `slot_pages` pages each.
        verify: whether pieces carry checksums.
    """

    runner: Runner
    layout: Layout
    devices: dict[int, Device]
    slots: int
    slot_pages: int
    backend: TransferBackend
    verify: bool
