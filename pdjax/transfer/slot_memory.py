"""Where the network finds what JAX has in a staging slot."""

from __future__ import annotations

from enum import Enum
from typing import Any

from pdjax.transfer.backend import TransferBackend

Device = Any  # jax.Device, which type checkers take for a variable


class SlotMemory(Enum):
    """Of one device's slots."""

    SHARED = "what JAX has is in the host's memory, where the network reads and writes it"
    DIRECT = "the network reads and writes the device's own memory"
    COPIED = "the network reads and writes the host's memory, and what is there is copied from and to the device"


def shares_memory(device: Device) -> bool:
    """Whether what JAX has on a device is in the host's memory."""
    return device.platform == "cpu"


def memory_of(device: Device, backend: TransferBackend) -> SlotMemory:
    """How a device's slots are reached by a backend."""
    if shares_memory(device):
        return SlotMemory.SHARED
    return SlotMemory.DIRECT if backend.device_memory else SlotMemory.COPIED
