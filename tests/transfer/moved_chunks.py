"""Chunks moved between pools by hand, from any number of devices to any: what a pair does, without its processes.

As a script, with the numbers of devices of each side and a dtype as arguments, it has four devices.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pdjax.cache.pool import create_pool, pool_addresses, pool_shape
from pdjax.cache.spec import StateSpec
from pdjax.layers.sharding import instance_mesh
from pdjax.transfer.layout import Chunk, Layout, plan
from pdjax.transfer.staging import LandingRing, SourceStaging, local_shards, pages_of, with_new_shards

SLOTS, SLOT_PAGES, PAGES = 2, 4, 9


class Memory:
    """The set-up half of a backend: memory that is written to by address, as a peer's put would."""

    def __init__(self) -> None:
        self.regions: dict[int, tuple[int, int]] = {}
        self.of_devices: set[int] = set()
        self._kept: list[object] = []

    def register(self, region: int, address: int, nbytes: int) -> None:
        assert region not in self.regions
        self.regions[region] = (address, nbytes)

    def register_device_memory(self, region: int, address: int, nbytes: int, *, writable: bool = False) -> None:
        self.register(region, address, nbytes)
        self.of_devices.add(region)

    def allocate(self, region: int, nbytes: int) -> int:
        block = ctypes.create_string_buffer(nbytes + 4096)
        self._kept.append(block)
        address = -(-ctypes.addressof(block) // 4096) * 4096
        self.register(region, address, nbytes)
        return address


class Side:
    """The pool of an instance of `tp` devices, with `words` in it, and the staging of each of them."""

    def __init__(self, spec: StateSpec, tp: int, words: np.ndarray) -> None:
        self.spec, self.layout = spec, Layout(tp=tp)
        self.memory: Any = Memory()
        mesh = instance_mesh(jax.devices()[:tp], spec.heads)
        self.devices = list(mesh.devices.flat)
        self.pool = create_pool(spec, PAGES, mesh).at[:].set(jnp.asarray(words))
        self.addresses = pool_addresses(self.pool)

    def check_in_place(self) -> None:
        assert pool_addresses(self.pool) == self.addresses


class Source(Side):
    def __init__(self, spec: StateSpec, tp: int, words: np.ndarray) -> None:
        super().__init__(spec, tp, words)
        shards = local_shards(self.pool)
        self.staging = [
            SourceStaging(
                shards[device],
                slots=SLOTS,
                slot_pages=SLOT_PAGES,
                backend=self.memory,
                first_region=1 + rank * SLOTS,
            )
            for rank, device in enumerate(self.devices)
        ]


class Destination(Side):
    def __init__(self, spec: StateSpec, tp: int, words: np.ndarray) -> None:
        super().__init__(spec, tp, words)
        shards = local_shards(self.pool)
        self.rings = [
            LandingRing(shards[device], slots=SLOTS, slot_pages=SLOT_PAGES, backend=self.memory, region=1 + rank)
            for rank, device in enumerate(self.devices)
        ]


def send(source: Source, destination: Destination, here: list[int], there: list[int], slot: int) -> None:
    """One chunk: gather at each rank, write each piece, scatter at each rank."""
    spec = source.spec
    chunk = Chunk(3, len(here), 100)
    pieces = plan(spec, source.layout, destination.layout)
    shards = local_shards(source.pool)
    for rank, staging in enumerate(source.staging):
        staging.gather(slot, shards[source.devices[rank]], pages_of(pieces.gathers(rank, chunk), here, first=3, cp=1))
        staging.wait(slot)
    for transfer in pieces.transfers(chunk):
        staging, ring = source.staging[transfer.piece.source], destination.rings[transfer.piece.destination]
        place = destination.layout.place(spec, transfer.piece.destination)
        assert ring.slot_bytes == place.slot_bytes(spec, SLOT_PAGES)
        there_range = (slot, transfer.destination_offset, transfer.nbytes)
        algorithm, sent = staging.checksum(slot, transfer.source_offset, transfer.nbytes)
        assert ring.checksum(algorithm, *there_range) != sent
        base, _ = destination.memory.regions[1 + transfer.piece.destination]
        ctypes.memmove(
            base + slot * ring.slot_bytes + transfer.destination_offset,
            source.memory.regions[staging.region(slot)][0] + transfer.source_offset,
            transfer.nbytes,
        )
        assert ring.checksum(algorithm, *there_range) == sent

    def scatter(device, shard: jax.Array) -> jax.Array:
        rank = destination.devices.index(device)
        parts = pages_of(pieces.scatters(rank, chunk), there, first=3, cp=1)
        return destination.rings[rank].scatter(slot, shard, parts)

    del shards
    destination.pool = with_new_shards(destination.pool, scatter)


def check(prefill: int, decode: int, dtype: str) -> tuple[Source, Destination]:
    """Two heads: four ranks hold each of them twice. Returns both sides after it."""
    spec = StateSpec("kv", layers=3, heads=2, head_dim=8, page_size=4, dtype=dtype)
    random = np.random.default_rng(0)
    high = 1 << 8 * spec.word_bytes
    shape = pool_shape(spec, PAGES)
    words = [random.integers(0, high, shape, f"uint{8 * spec.word_bytes}").view(spec.word_dtype) for _ in "ab"]
    words = [np.nan_to_num(each) if dtype == "float32" else each for each in words]
    source, destination = Source(spec, prefill, words[0]), Destination(spec, decode, words[1])
    expected = words[1].copy()
    for slot, (here, there) in enumerate([([5, 1, 7], [2, 8, 3]), ([3], [1]), ([4, 2, 6, 8], [4, 5, 6, 7])]):
        send(source, destination, here, there, slot % SLOTS)
        expected[:, there] = words[0][:, here]
    source.check_in_place()
    destination.check_in_place()
    np.testing.assert_array_equal(np.array(destination.pool), expected)
    for shard in destination.pool.addressable_shards:  # copies, too
        np.testing.assert_array_equal(np.array(shard.data), expected[shard.index])
    return source, destination


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 4)
    for sizes in sys.argv[2:]:
        check(int(sizes[0]), int(sizes[1]), sys.argv[1])
