"""Staging: the contiguous memory that a chunk is gathered into at its source and lands in at its destination.

Both sides cut one region into slots of equal size, made and registered once at start. A slot holds a chunk as
[head, page, layer, K|V, slot in page, head_dim], head outermost, exactly as many pages as the chunk has.
"""

from __future__ import annotations

import ctypes
from collections import deque

import jax
import jax.numpy as jnp
import numpy as np
import xxhash
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pdjax.cache.spec import StateSpec
from pdjax.kernels import gather_pages, scatter_pages
from pdjax.transfer.backend import TransferBackend, TransferError

REGION = 1  # the destination's ring is this region of its backend; source slots come after it


def checksum_of(address: int, nbytes: int) -> int:
    """XXH3-64 of memory: 10 GB/s and more, so that every chunk can be verified."""
    return xxhash.xxh3_64_intdigest((ctypes.c_char * nbytes).from_address(address))


class _Slots:
    """Which slots are free."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._free = deque(range(slots))

    @property
    def free_slots(self) -> int:
        """Slots that nothing uses."""
        return len(self._free)

    def take(self) -> int | None:
        """A free slot, or None when all are in use."""
        return self._free.popleft() if self._free else None

    def free(self, slot: int) -> None:
        """Give a slot back."""
        assert slot not in self._free and 0 <= slot < self._slots, f"slot {slot} is not in use"
        self._free.append(slot)


class SourceStaging(_Slots):
    """Slots that JAX owns: a gather donates a slot and leaves it where it is, at an address the backend knows."""

    def __init__(self, spec: StateSpec, mesh: Mesh, *, slots: int, slot_pages: int, backend: TransferBackend) -> None:
        super().__init__(slots)
        self._spec = spec
        self._slot_pages = slot_pages
        words = slot_pages * spec.page_words
        # Placed as a gather leaves them, so that the first gather into a slot is no program of its own.
        place = NamedSharding(mesh, PartitionSpec())
        empty = jax.jit(lambda: jnp.zeros(words, spec.word_dtype), out_shardings=place)
        self._arrays = [empty() for _ in range(slots)]
        self._addresses = [array.unsafe_buffer_pointer() for array in self._arrays]
        for slot, address in enumerate(self._addresses):
            backend.register(self.region(slot), address, words * spec.word_bytes)

    def region(self, slot: int) -> int:
        """The backend's name for a slot."""
        return REGION + 1 + slot

    def warm_up(self, pool: jax.Array) -> jax.Array:
        """Compile the gather; returns the pool as it was."""
        self.gather(0, pool, [0])
        return pool

    def checksum(self, slot: int, nbytes: int) -> int:
        """Of the first bytes of a slot."""
        return checksum_of(self._addresses[slot], nbytes)

    def gather(self, slot: int, pool: jax.Array, pages: list[int]) -> int:
        """Fill a slot with pages of the pool and wait until it is filled. Returns the bytes to send.

        Raises:
            RuntimeError: the slot has moved, so the backend would send something else.
        """
        page_ids = np.zeros(self._slot_pages, np.int32)
        page_ids[: len(pages)] = pages
        array = gather_pages(pool, page_ids, len(pages), self._arrays[slot])
        self._arrays[slot] = jax.block_until_ready(array)
        if array.unsafe_buffer_pointer() != self._addresses[slot]:
            raise RuntimeError(f"staging slot {slot} has moved: something holds a view of it")
        return len(pages) * self._spec.page_bytes


class LandingRing(_Slots):
    """Slots that the backend owns and peers write into; JAX reads them through aliases made once."""

    def __init__(self, spec: StateSpec, *, slots: int, slot_pages: int, backend: TransferBackend) -> None:
        super().__init__(slots)
        self.slot_pages = slot_pages
        self.slot_bytes = slot_pages * spec.page_bytes
        self._address = backend.allocate(REGION, slots * self.slot_bytes)
        memory = (ctypes.c_char * (slots * self.slot_bytes)).from_address(self._address)
        words = np.ctypeslib.as_array(memory).view(spec.word_dtype).reshape(slots, -1)
        self._arrays = [_alias(words[slot]) for slot in range(slots)]

    def offset(self, slot: int) -> int:
        """Where a slot begins in the region, in bytes."""
        return slot * self.slot_bytes

    def clear(self, slot: int) -> None:
        """Fill a slot with zeros."""
        ctypes.memset(self._address + self.offset(slot), 0, self.slot_bytes)

    def warm_up(self, pool: jax.Array) -> jax.Array:
        """Compile the scatter by writing zeros to page 0; returns the pool, which was donated."""
        return self.scatter(0, pool, [0])

    def checksum(self, slot: int, nbytes: int) -> int | None:
        """Of the first bytes of a slot; None if there is no such slot or it is not that large."""
        if not 0 <= slot < len(self._arrays) or not 0 < nbytes <= self.slot_bytes:
            return None
        return checksum_of(self._address + self.offset(slot), nbytes)

    def scatter(self, slot: int, pool: jax.Array, pages: list[int]) -> jax.Array:
        """Move a landed chunk into pages of the pool, which is donated, and wait: the slot may then be reused."""
        page_ids = np.zeros(self.slot_pages, np.int32)
        page_ids[: len(pages)] = pages
        return jax.block_until_ready(scatter_pages(pool, self._arrays[slot], page_ids, len(pages)))


def _alias(words: np.ndarray) -> jax.Array:
    """A JAX array over host memory, without a copy: what a peer writes there later is what JAX reads."""
    array = jax.device_put(words)
    if array.unsafe_buffer_pointer() != words.ctypes.data:
        raise TransferError("the staging ring cannot be read in place on this platform")
    return array
