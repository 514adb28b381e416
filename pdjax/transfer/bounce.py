"""Slots of a device whose memory the network does not reach: they are copied through the host's memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jax.stages import Compiled

_PARTS = (8, 4, 2, 1)  # a slot is copied as far as an eighth, a quarter, a half or the whole of it


class Bounce:
    """Copies the beginning of slots between one device and the host. Its programs are compiled when it is made.

    Args:
        words: of a slot.
        place: of the arrays, on a single device.
    """

    def __init__(self, words: int, dtype: np.dtype, place: Sharding) -> None:
        self._place = place
        self._sizes = sorted({-(-words // part) for part in _PARTS})
        slot = jax.ShapeDtypeStruct((words,), dtype, sharding=place)
        self._cut: dict[int, Compiled] = {}
        self._widen: dict[int, Compiled] = {}
        for size in self._sizes:
            part = jax.ShapeDtypeStruct((size,), dtype, sharding=place)
            cut = jax.jit(lambda slot, size=size: slot[:size], out_shardings=place)
            widen = jax.jit(lambda part, size=size: jnp.pad(part, (0, words - size)), out_shardings=place)
            self._cut[size], self._widen[size] = cut.lower(slot).compile(), widen.lower(part).compile()

    def to_host(self, slot: jax.Array, used: int, host: np.ndarray) -> None:
        """Copy the first `used` words of a slot, and maybe some more."""
        size = self._size(used)
        host[:size] = np.asarray(self._cut[size](slot))

    def to_device(self, host: np.ndarray, used: int) -> jax.Array:
        """A slot on the device with the first `used` words of the host's, which must stay as they are until what is
        computed from it is there."""
        size = self._size(used)
        return self._widen[size](jax.device_put(host[:size], self._place))

    def _size(self, used: int) -> int:
        return next(size for size in self._sizes if size >= used)
