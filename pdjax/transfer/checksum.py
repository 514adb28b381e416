"""Checksums of what is in a staging slot, made where it lies: XXH3 of the host's memory, a mixed sum of a device's.

A piece says which of the two it carries, and its receiver makes the same, wherever the piece has landed.
"""

from __future__ import annotations

import ctypes
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import xxhash
from jax.sharding import Sharding
from jax.stages import Compiled

Algorithm = Literal["xxh3", "mixed_sum"]


def xxh3(address: int, nbytes: int) -> int:
    """XXH3-64 of memory: 10 GB/s and more, so that every chunk can be verified."""
    return xxhash.xxh3_64_intdigest((ctypes.c_char * nbytes).from_address(address))


def mixed_sum(slot: jax.Array, first: jax.Array, count: jax.Array) -> jax.Array:
    """Two sums over words [first, first + count) of a slot, each word mixed with its place among them.

    It reads the slot once and adds in any order, as a device likes it: XXH3 goes through its bytes in their order.
    Mixed by MurmurHash3's finaliser (A. Appleby, fmix32), so that words that change places change the sums.

    Args:
        slot: [word] of 1, 2 or 4 bytes each.
        first: uint32, and so is `count`.

    Returns:
        uint32 [2].
    """
    bits = 8 * slot.dtype.itemsize
    words = jax.lax.bitcast_convert_type(slot, jnp.dtype(f"uint{bits}")).astype(jnp.uint32)
    places = jnp.arange(slot.size, dtype=jnp.uint32) - first  # those before the first become larger than any count
    inside = places < count
    sums = [
        jnp.sum(jnp.where(inside, _mix(words ^ _mix(places + np.uint32(seed))), 0), dtype=jnp.uint32)
        for seed in (0x9E3779B9, 0x7F4A7C15)
    ]
    return jnp.stack(sums)


def compile_mixed_sum(words: int, dtype: np.dtype, place: Sharding) -> Compiled:
    """`mixed_sum` for slots of `words` at a place."""
    number = jax.ShapeDtypeStruct((), np.uint32)
    return jax.jit(mixed_sum).lower(jax.ShapeDtypeStruct((words,), dtype, sharding=place), number, number).compile()


def in_words(offset: int, nbytes: int, itemsize: int) -> tuple[np.uint32, np.uint32]:
    """A range in bytes as `mixed_sum` takes it."""
    return np.uint32(offset // itemsize), np.uint32(nbytes // itemsize)


def as_number(sums: jax.Array) -> int:
    """What a notice carries, 64 bits. Waits for them."""
    high, low = np.asarray(sums).tolist()
    return high << 32 | low


def _mix(word: jax.Array) -> jax.Array:
    word = (word ^ word >> 16) * np.uint32(0x85EBCA6B)
    word = (word ^ word >> 13) * np.uint32(0xC2B2AE35)
    return word ^ word >> 16
