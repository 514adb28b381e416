"""Whether a backend moves a device's memory: tried at start, before anything relies on it."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from pdjax.transfer import cuda
from pdjax.transfer.backend import EventSink, Notice, TransferBackend, TransferError, Write, WriteFailed
from pdjax.transfer.slot_memory import Device

_NBYTES = 1 << 20
_BOUND = 5.0  # seconds
_SOURCE, _TARGET = 1, 2


def problem_with_device_memory(device: Device, create: Callable[[EventSink], TransferBackend]) -> str | None:
    """Let a backend of its own write to itself, from one array on the device to another. Returns why they cannot be
    left to it, as a sentence, or None.

    Args:
        create: the backend, with the device in its options.
    """
    events: queue.SimpleQueue[object] = queue.SimpleQueue()
    try:
        if device.platform == "gpu":
            cuda.flush_of(device.local_hardware_id)
        backend = create(events.put)
    except TransferError as error:
        return str(error)
    try:
        return _try(device, backend, events) if backend.device_memory else f"{backend.name} moves the host's only here"
    except TransferError as error:
        return str(error)
    finally:
        backend.close()


def _try(device: Device, backend: TransferBackend, events: queue.SimpleQueue[object]) -> str | None:
    words = np.random.default_rng(0).integers(0, 1 << 32, _NBYTES // 4, np.uint32)
    with jax.default_device(device):
        source, target = jax.block_until_ready((jnp.array(words), jnp.zeros(words.shape, np.uint32)))
    backend.register_device_memory(_SOURCE, source.unsafe_buffer_pointer(), _NBYTES)
    backend.register_device_memory(_TARGET, target.unsafe_buffer_pointer(), _NBYTES, writable=True)
    backend.connect("itself", backend.describe())
    until = time.monotonic() + _BOUND
    backend.write(Write(1, "itself", _SOURCE, 0, _TARGET, 0, _NBYTES, b"proof", deadline=until))
    while True:
        try:
            event = events.get(timeout=max(until + 1 - time.monotonic(), 0))
        except queue.Empty:
            return f"a write within it was not done within {_BOUND:g} s"
        if isinstance(event, WriteFailed):
            return f"a write within it failed: {event.cause}"
        if isinstance(event, Notice):
            break
    return None if np.array_equal(np.asarray(target), words) else "a write within it has not moved what was there"
