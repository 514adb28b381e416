"""A chunk goes through staging unchanged, and staging stays where the backend knows it."""

from __future__ import annotations

import ctypes

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from pdjax.cache.pool import create_pool, pool_addresses, pool_shape
from pdjax.cache.spec import StateSpec
from pdjax.transfer.staging import REGION, LandingRing, SourceStaging


class Memory:
    """The set-up half of a backend: memory that is written to by address, as a peer's put would."""

    def __init__(self) -> None:
        self.regions: dict[int, tuple[int, int]] = {}
        self._kept: list[object] = []

    def register(self, region: int, address: int, nbytes: int) -> None:
        self.regions[region] = (address, nbytes)

    def allocate(self, region: int, nbytes: int) -> int:
        block = ctypes.create_string_buffer(nbytes + 4096)
        self._kept.append(block)
        address = -(-ctypes.addressof(block) // 4096) * 4096
        self.regions[region] = (address, nbytes)
        return address


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pages_arrive_bit_for_bit_and_others_are_untouched(dtype: str) -> None:
    spec = StateSpec("kv", layers=3, heads=2, head_dim=8, page_size=4, dtype=dtype)
    mesh = jax.make_mesh((1,), ("tp",), axis_types=(AxisType.Auto,))
    random = np.random.default_rng(0)

    def pool_of(values: np.ndarray) -> jax.Array:
        pool = create_pool(spec, 9, mesh)
        return pool.at[:].set(jnp.asarray(values))

    high = 1 << 8 * spec.word_bytes
    words = [
        random.integers(0, high, pool_shape(spec, 9), f"uint{8 * spec.word_bytes}").view(spec.word_dtype) for _ in "ab"
    ]
    words = [np.nan_to_num(each) if dtype == "float32" else each for each in words]
    source, destination = map(pool_of, words)
    sent, received = Memory(), Memory()
    staging = SourceStaging(spec, mesh, slots=2, slot_pages=4, backend=sent)  # type: ignore[arg-type]
    ring = LandingRing(spec, slots=2, slot_pages=4, backend=received)  # type: ignore[arg-type]
    addresses = pool_addresses(destination)
    expected = words[1].copy()
    for slot, (here, there) in enumerate([([5, 1, 7], [2, 8, 3]), ([3], [1]), ([4, 2, 6, 8], [4, 5, 6, 7])]):
        slot %= 2
        nbytes = staging.gather(slot, source, here)
        assert nbytes == len(here) * spec.page_bytes
        address, _ = received.regions[REGION]
        assert ring.checksum(slot, nbytes) != staging.checksum(slot, nbytes)
        ctypes.memmove(address + ring.offset(slot), sent.regions[staging.region(slot)][0], nbytes)
        assert ring.checksum(slot, nbytes) == staging.checksum(slot, nbytes)
        destination = ring.scatter(slot, destination, there)
        expected[:, there] = words[0][:, here]
    assert pool_addresses(destination) == addresses
    np.testing.assert_array_equal(np.array(destination), expected)


def test_slots_are_handed_out_once() -> None:
    spec = StateSpec("kv", layers=1, heads=1, head_dim=8, page_size=4, dtype="float32")
    ring = LandingRing(spec, slots=2, slot_pages=1, backend=Memory())  # type: ignore[arg-type]
    assert {ring.take(), ring.take()} == {0, 1} and ring.take() is None
    ring.free(1)
    assert ring.take() == 1
    assert ring.checksum(2, 8) is None and ring.checksum(0, ring.slot_bytes + 1) is None, "a peer's numbers are checked"
    with pytest.raises(AssertionError, match="not in use"):
        ring.free(2)
