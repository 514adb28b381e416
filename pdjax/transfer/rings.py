"""The memory of a landing ring, in the host or on a device: what peers write into, and JAX reads."""

from __future__ import annotations

import ctypes
import sys
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from pdjax.transfer import cuda
from pdjax.transfer.backend import TransferBackend, TransferError
from pdjax.transfer.bounce import Bounce
from pdjax.transfer.checksum import Algorithm, as_number, in_words, mixed_sum, xxh3
from pdjax.transfer.slot_memory import Device, SlotMemory


class Ring(Protocol):
    """Slots one behind the other, all of one size. Offsets and lengths are in bytes, within a slot and whole words."""

    def landed(self, slot: int, words: int) -> jax.Array:
        """A slot as an array [word], of which the first `words` are what has landed. It is to be consumed before the
        slot is written again."""
        ...

    def zeros(self, slot: int) -> jax.Array:
        """A slot's worth of zeros, for which a slot of the ring may be overwritten."""
        ...

    def checksum(self, algorithm: Algorithm, slot: int, offset: int, nbytes: int) -> int:
        """Of a range."""
        ...

    def check_integrity(self) -> None:
        """Raise RuntimeError if what JAX reads is not where peers write."""
        ...


def make_ring(
    memory: SlotMemory, device: Device, shape: tuple[int, int], dtype: np.dtype, backend: TransferBackend, region: int
) -> Ring:
    """A ring of shape (slots, words of a slot), as a region of the backend's. Raises `TransferError`."""
    if memory is SlotMemory.DIRECT:
        return DeviceRing(device, shape, dtype, backend, region)
    return HostRing(device, shape, dtype, backend, region, copied=memory is SlotMemory.COPIED)


class HostRing:
    """Memory that the backend allocates. JAX reads it through aliases made once, or has it copied to its device."""

    def __init__(
        self,
        device: Device,
        shape: tuple[int, int],
        dtype: np.dtype,
        backend: TransferBackend,
        region: int,
        *,
        copied: bool,
    ) -> None:
        nbytes = shape[0] * shape[1] * dtype.itemsize
        self._slot_bytes = shape[1] * dtype.itemsize
        self._address = backend.allocate(region, nbytes)
        ctypes.memset(self._address, 0, nbytes)  # before any peer can know of it
        memory = (ctypes.c_char * nbytes).from_address(self._address)
        self._words = np.ctypeslib.as_array(memory).view(dtype).reshape(shape)
        self._mixed_sum = jax.jit(mixed_sum)
        self._bounce = Bounce(shape[1], dtype, SingleDeviceSharding(device)) if copied else None
        if copied and device.platform == "gpu":
            _page_lock(device, self._address, nbytes)
        self._arrays = [] if copied else [_alias(words, device) for words in self._words]

    def landed(self, slot: int, words: int) -> jax.Array:
        """See `Ring`."""
        if self._bounce is None:
            return self._arrays[slot]
        return self._bounce.to_device(self._words[slot], words)

    def zeros(self, slot: int) -> jax.Array:
        """See `Ring`."""
        ctypes.memset(self._place(slot), 0, self._slot_bytes)
        return self.landed(slot, self._words.shape[1])

    def checksum(self, algorithm: Algorithm, slot: int, offset: int, nbytes: int) -> int:
        """See `Ring`."""
        if algorithm == "xxh3":
            return xxh3(self._place(slot) + offset, nbytes)
        first, count = in_words(offset, nbytes, self._words.itemsize)
        return as_number(self._mixed_sum(self.landed(slot, int(first + count)), first, count))

    def check_integrity(self) -> None:
        """See `Ring`."""
        for slot, array in enumerate(self._arrays):
            check_place(f"slot {slot} of a ring", array, self._place(slot))

    def _place(self, slot: int) -> int:
        return self._address + slot * self._slot_bytes


class DeviceRing:
    """An array on a device, which the backend's peers write into behind JAX's back. Its programs are compiled here."""

    def __init__(
        self, device: Device, shape: tuple[int, int], dtype: np.dtype, backend: TransferBackend, region: int
    ) -> None:
        self._itemsize = dtype.itemsize
        place = SingleDeviceSharding(device)
        self._ring = jax.block_until_ready(jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=place)())
        self._address = self._ring.unsafe_buffer_pointer()
        backend.register_device_memory(region, self._address, self._ring.nbytes, writable=True)
        self._flush = cuda.flush_of(device.local_hardware_id) if device.platform == "gpu" else None
        ring = jax.ShapeDtypeStruct(shape, dtype, sharding=place)
        number, unsigned = jax.ShapeDtypeStruct((), np.int32), jax.ShapeDtypeStruct((), np.uint32)
        self._cut = jax.jit(_cut, out_shardings=place).lower(ring, number).compile()
        self._zeros = jax.jit(lambda: jnp.zeros(shape[1], dtype), out_shardings=place).lower().compile()
        self._mixed_sum = jax.jit(_sum_within).lower(ring, number, unsigned, unsigned).compile()

    def landed(self, slot: int, words: int) -> jax.Array:
        """See `Ring`: a copy within the device."""
        return self._cut(self._seen(), np.int32(slot))

    def zeros(self, slot: int) -> jax.Array:
        """See `Ring`."""
        return self._zeros()

    def checksum(self, algorithm: Algorithm, slot: int, offset: int, nbytes: int) -> int:
        """See `Ring`. For XXH3 the slot is copied to the host."""
        if algorithm == "xxh3":
            copy = np.asarray(self.landed(slot, self._ring.shape[1]))
            return xxh3(copy.ctypes.data + offset, nbytes)
        return as_number(self._mixed_sum(self._seen(), np.int32(slot), *in_words(offset, nbytes, self._itemsize)))

    def check_integrity(self) -> None:
        """See `Ring`."""
        check_place("a ring", self._ring, self._address)

    def _seen(self) -> jax.Array:
        """The ring, of which the device sees all that has landed."""
        if self._flush is not None:
            self._flush()
        return self._ring


def check_place(what: str, array: jax.Array, address: int) -> None:
    """Raise RuntimeError if an array is no longer where the backend knows it."""
    if array.unsafe_buffer_pointer() != address:
        raise RuntimeError(f"staging: {what} has moved: something holds a view of it")


def _cut(ring: jax.Array, slot: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(ring, slot, keepdims=False)


def _sum_within(ring: jax.Array, slot: jax.Array, first: jax.Array, count: jax.Array) -> jax.Array:
    return mixed_sum(_cut(ring, slot), first, count)


def _page_lock(device: Device, address: int, nbytes: int) -> None:
    """Let XLA copy to the device from this memory as it lies, and not by way of page-locked memory of its own."""
    try:
        device.client.dma_map(address, nbytes)
    except jax.errors.JaxRuntimeError as error:
        print(f"pdjax: the staging ring could not be page-locked for {device}: {error}", file=sys.stderr, flush=True)


def _alias(words: np.ndarray, device: Device) -> jax.Array:
    """A JAX array over host memory, without a copy: what a peer writes there later is what JAX reads."""
    array = jax.device_put(words, device)
    if array.unsafe_buffer_pointer() != words.ctypes.data:
        raise TransferError("the staging ring cannot be read in place on this platform")
    return array
