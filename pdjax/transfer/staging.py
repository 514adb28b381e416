"""Staging: the contiguous memory that a chunk is gathered into at its source and lands in at its destination.

Every rank has as many slots as every other of its instance, made and registered once at start: slot n of all of them is
one slot to the protocol. A slot holds blocks, each [head, page, layer, K|V, slot in page, head_dim], head outermost,
with exactly as many pages as the chunk has. `SlotMemory` says where the network finds it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from pdjax.kernels import gather_pages, scatter_pages
from pdjax.transfer.backend import TransferBackend
from pdjax.transfer.bounce import Bounce
from pdjax.transfer.checksum import Algorithm, as_number, compile_mixed_sum, in_words, xxh3
from pdjax.transfer.layout import Block, Span
from pdjax.transfer.rings import check_place, make_ring
from pdjax.transfer.slot_memory import Device, SlotMemory, memory_of

Part = tuple[Block, list[int]]  # a block, and its pages as the pool numbers them


def local_shards(pool: jax.Array) -> dict[Device, jax.Array]:
    """This process's parts of a pool, by device. Let go of them before the pool's next step."""
    return {shard.device: shard.data for shard in pool.addressable_shards}


def with_new_shards(pool: jax.Array, update: Callable[[Device, jax.Array], jax.Array]) -> jax.Array:
    """A pool after `update`, which donates, of each of this process's parts; waits for all of them."""
    if len(pool.sharding.device_set) == 1:  # to take it apart and put it together again costs 0.1 ms
        return jax.block_until_ready(update(_device(pool), pool))
    parts = [update(device, shard) for device, shard in local_shards(pool).items()]
    return jax.make_array_from_single_device_arrays(pool.shape, pool.sharding, jax.block_until_ready(parts))


def pages_of(blocks: Sequence[Block], page_ids: Sequence[int], *, first: int, cp: int) -> list[Part]:
    """Blocks of a chunk with their pages.

    Args:
        page_ids: the pages of the pool that have some of the chunk, whose first page is `first`: see `pool_pages`.
        cp: over how many parts the request's pages are dealt out: a rank knows page i as its (i // cp)-th.
    """
    return [(block, local_pages(block.pages, page_ids, first=first, cp=cp)) for block in blocks]


def pool_pages(page_ids: list[int], first: int, pages: int, *, cp: int) -> list[int]:
    """Of a request's pages in the pool, those that have some of its pages [first, first + pages) as transfers count
    them: each has `cp` of these, one a part."""
    return page_ids[first // cp : -(-(first + pages) // cp)]


def local_pages(pages: Iterable[int], page_ids: Sequence[int], *, first: int, cp: int) -> list[int]:
    """Pages of the request as a rank's pool numbers them: see `pages_of`."""
    return [page_ids[page // cp - first // cp] for page in pages]


class Slots:
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


class SourceStaging:
    """One rank's slots, which JAX owns: a gather donates a slot and leaves it where it is, at an address the backend
    knows, or that of its copy on the host. Slot n is the backend's region `first_region` + n.

    Args:
        shard: the rank's part of the pool [layer, page, head, K|V, slot in page, head_dim].

    Attributes:
        memory: where the backend reads them.
    """

    def __init__(
        self, shard: jax.Array, *, slots: int, slot_pages: int, backend: TransferBackend, first_region: int
    ) -> None:
        self._slot_pages = slot_pages
        self._first_region = first_region
        self._run_bytes = _run_bytes(shard)
        words, dtype = slot_pages * _page_words(shard), shard.dtype
        self._itemsize = dtype.itemsize
        # Placed as a gather leaves them, so that the first gather into a slot is no program of its own.
        place = shard.sharding
        if isinstance(place, NamedSharding):  # the pool of a single device
            place = NamedSharding(place.mesh, PartitionSpec())
        empty = jax.jit(lambda: jnp.zeros(words, dtype), out_shardings=place)
        self._arrays = [empty() for _ in range(slots)]
        self.memory = memory_of(_device(shard), backend)
        self._used = [0] * slots  # words
        if self.memory is SlotMemory.COPIED:
            self._bounce = Bounce(words, dtype, place)
            self._copies = [np.zeros(words, dtype) for _ in range(slots)]
            self._addresses = [copy.ctypes.data for copy in self._copies]
        else:
            self._addresses = [jax.block_until_ready(array).unsafe_buffer_pointer() for array in self._arrays]
        if self.memory is SlotMemory.DIRECT:
            self._mixed_sum = compile_mixed_sum(words, dtype, place)
        for slot, address in enumerate(self._addresses):
            region, nbytes = self.region(slot), words * dtype.itemsize
            if self.memory is SlotMemory.DIRECT:
                backend.register_device_memory(region, address, nbytes)
            else:
                backend.register(region, address, nbytes)

    def region(self, slot: int) -> int:
        """The backend's name for a slot."""
        return self._first_region + slot

    def checksum(self, slot: int, offset: int, nbytes: int) -> tuple[Algorithm, int]:
        """Of a range, in bytes, of a slot that `wait` has returned for."""
        if self.memory is not SlotMemory.DIRECT:
            return "xxh3", xxh3(self._addresses[slot] + offset, nbytes)
        return "mixed_sum", as_number(self._mixed_sum(self._arrays[slot], *in_words(offset, nbytes, self._itemsize)))

    def gather(self, slot: int, shard: jax.Array, parts: Sequence[Part]) -> None:
        """Begin to fill a slot with pages of the rank's part of the pool."""
        self._used[slot] = _end(shard, parts)
        for block, pages in parts:
            self._arrays[slot] = gather_pages(
                shard,
                _page_ids(pages, self._slot_pages),
                len(pages),
                self._arrays[slot],
                first_layer=block.layers.start,
                layers=block.layers.count,
                first_run=block.offset // self._run_bytes,
            )

    def wait(self, slot: int) -> None:
        """Until a slot is filled.

        Raises:
            RuntimeError: it has moved, so the backend would send something else.
        """
        if self.memory is SlotMemory.COPIED:
            if self._used[slot]:
                self._bounce.to_host(self._arrays[slot], self._used[slot], self._copies[slot])
        else:
            check_place(f"slot {slot}", jax.block_until_ready(self._arrays[slot]), self._addresses[slot])

    def check_integrity(self) -> None:
        """Raise RuntimeError if a slot has moved."""
        for slot, array in enumerate(self._arrays) if self.memory is not SlotMemory.COPIED else ():
            check_place(f"slot {slot}", array, self._addresses[slot])


class LandingRing:
    """One rank's slots, which peers write into.

    Args:
        shard: the rank's part of the pool [layer, page, head, K|V, slot in page, head_dim].
        region: the backend's name for all slots together, one behind the other.
    """

    def __init__(self, shard: jax.Array, *, slots: int, slot_pages: int, backend: TransferBackend, region: int) -> None:
        self._slots = slots
        self._slot_pages = slot_pages
        self._run_bytes = _run_bytes(shard)
        words, device = slot_pages * _page_words(shard), _device(shard)
        self._itemsize = shard.dtype.itemsize
        self.slot_bytes = words * self._itemsize
        self._ring = make_ring(memory_of(device, backend), device, (slots, words), shard.dtype, backend, region)

    def check_integrity(self) -> None:
        """Raise RuntimeError if what JAX reads is not where peers write."""
        self._ring.check_integrity()

    def checksum(self, algorithm: Algorithm, slot: int, offset: int, nbytes: int) -> int | None:
        """Of a range, in bytes, of a slot; None if there is no such slot or range."""
        if not 0 <= slot < self._slots or offset < 0 or nbytes < 1 or offset + nbytes > self.slot_bytes:
            return None
        if offset % self._itemsize or nbytes % self._itemsize:
            return None
        return self._ring.checksum(algorithm, slot, offset, nbytes)

    def scatter(self, slot: int, shard: jax.Array, parts: Sequence[Part]) -> jax.Array:
        """Move what has landed in a slot into pages of the rank's part of the pool, which is donated. Wait for the
        result before the slot is used again."""
        if not parts:
            return shard
        return self._scatter(self._ring.landed(slot, _end(shard, parts)), shard, parts)

    def zero(self, slot: int, shard: jax.Array, page_ids: Sequence[int]) -> jax.Array:
        """Fill pages of the rank's part of the pool, which is donated, with zeros. The slot is used for it: wait for
        the result before anybody else uses it."""
        zeros, layers = self._ring.zeros(slot), Span(0, shard.shape[0])
        for first in range(0, len(page_ids), self._slot_pages):
            pages = list(page_ids[first : first + self._slot_pages])
            shard = self._scatter(zeros, shard, [(Block(0, 0, layers, range(len(pages))), pages)])
        return shard

    def _scatter(self, landed: jax.Array, shard: jax.Array, parts: Sequence[Part]) -> jax.Array:
        for block, pages in parts:
            shard = scatter_pages(
                shard,
                landed,
                _page_ids(pages, self._slot_pages),
                len(pages),
                first_layer=block.layers.start,
                layers=block.layers.count,
                first_run=block.offset // self._run_bytes,
            )
        return shard


def _end(shard: jax.Array, parts: Sequence[Part]) -> int:
    """Where the last of some blocks ends in a slot, in words."""
    run = math.prod(shard.shape[2:])  # of one page of one layer
    ends = (block.offset // shard.dtype.itemsize + len(pages) * block.layers.count * run for block, pages in parts)
    return max(ends, default=0)


def _device(shard: jax.Array) -> Device:
    return next(iter(shard.sharding.device_set))


def _page_words(shard: jax.Array) -> int:
    """Words of one page of a rank's part of the pool, over all its layers and heads."""
    return shard.size // shard.shape[1]


def _run_bytes(shard: jax.Array) -> int:
    """Bytes of one page of one layer and head."""
    return math.prod(shard.shape[3:]) * shard.dtype.itemsize


def _page_ids(pages: list[int], most: int) -> np.ndarray:
    """int32 [most], 0 past the end."""
    ids = np.zeros(most, np.int32)
    ids[: len(pages)] = pages
    return ids
