"""Whether a backend moves a device's memory: tried at start, before anything relies on it."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from pdjax.transfer import cuda
from pdjax.transfer.backend import EventSink, Notice, TransferBackend, TransferError, Write, WriteFailed
from pdjax.transfer.slot_memory import Device

_NBYTES = 1 << 20
_BOUND = 5.0  # seconds


def problem_with_device_memory(devices: Sequence[Device], create: Callable[[EventSink], TransferBackend]) -> str | None:
    """Let a backend of its own write to itself, from one array on each device to another. Returns why they cannot be
    left to it, as a sentence, or None.

    Args:
        create: the backend, with the first device in its options.
    """
    events: queue.SimpleQueue[object] = queue.SimpleQueue()
    try:
        for device in devices:
            if device.platform == "gpu":
                cuda.flush_of(device.local_hardware_id)
        backend = create(events.put)
    except TransferError as error:
        return str(error)
    try:
        if not backend.device_memory:
            return f"{backend.name} moves the host's only"
        problems = (_try(device, number, backend, events) for number, device in enumerate(devices))
        return next((problem for problem in problems if problem is not None), None)
    except TransferError as error:
        return str(error)
    finally:
        backend.close()


def _try(device: Device, number: int, backend: TransferBackend, events: queue.SimpleQueue[object]) -> str | None:
    region, target_region = 2 * number, 2 * number + 1
    words = np.random.default_rng(0).integers(0, 1 << 32, _NBYTES // 4, np.uint32)
    with jax.default_device(device):
        source, target = jax.block_until_ready((jnp.array(words), jnp.zeros(words.shape, np.uint32)))
    backend.register_device_memory(region, source.unsafe_buffer_pointer(), _NBYTES)
    backend.register_device_memory(target_region, target.unsafe_buffer_pointer(), _NBYTES, writable=True)
    peer = f"itself, with {device}"
    backend.connect(peer, backend.describe())
    until = time.monotonic() + _BOUND
    backend.write(Write(number, peer, region, 0, target_region, 0, _NBYTES, b"proof", deadline=until))
    while True:
        try:
            event = events.get(timeout=max(until + 1 - time.monotonic(), 0))
        except queue.Empty:
            return f"a write within {device} was not done within {_BOUND:g} s"
        if isinstance(event, WriteFailed):
            return f"a write within {device} failed: {event.cause}"
        if isinstance(event, Notice):
            break
    return (
        None if np.array_equal(np.asarray(target), words) else f"a write within {device} has not moved what was there"
    )
