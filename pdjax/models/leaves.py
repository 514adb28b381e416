"""The arrays that a compiled step takes for a model: as few as can be, since each costs the host 4 us a step.

Parameters that are alike are rows of one array, where that costs the device nothing:

* vectors, those of norms mostly, always: XLA slices them in the operation that reads them;
* the layers' matrices where `pdjax.kernels.native` multiplies, which takes a row where it lies. XLA's own products
  would want a copy of each row, each step: 81 ms instead of 38 for 8 rows of SmolLM2.
"""

from __future__ import annotations

import mmap
from collections.abc import Hashable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pdjax.kernels import native
from pdjax.layers.stacked import Stacked


class Place(NamedTuple):
    """Which leaf a parameter is, or which row of it."""

    leaf: int
    row: int | None = None

    def of(self, leaves: list[jax.Array]) -> jax.Array | Stacked:
        """The parameter, of leaves that are arrays or tracers."""
        leaf = leaves[self.leaf]
        return leaf if self.row is None else Stacked(leaf, jnp.int32(self.row))


def stack_alike(parameters: dict[str, jax.Array]) -> tuple[list[jax.Array], list[Place]]:
    """Parameters by dotted path as leaves, and the place of each, in order.

    Takes them out of `parameters` one by one, since there may be no room for two copies of a model.
    """
    groups: dict[Hashable, list[str]] = {}
    for name, parameter in parameters.items():
        groups.setdefault(_kind(name, parameter) or name, []).append(name)
    leaves: list[jax.Array] = []
    places = dict.fromkeys(parameters, Place(0))
    for kind, names in groups.items():
        if isinstance(kind, str):
            places[kind] = Place(len(leaves))
            leaves.append(parameters.pop(kind))
            continue
        places |= {name: Place(len(leaves), row) for row, name in enumerate(names)}
        leaves.append(_stack(parameters, names))
    return leaves, list(places.values())


def _kind(name: str, parameter: jax.Array) -> Hashable:
    """What a parameter shares with those that it may be stacked with, or None."""
    alike = parameter.shape, parameter.dtype, parameter.sharding
    if parameter.ndim == 1:
        return alike if parameter.is_fully_replicated else None
    return alike if name.startswith("layers.") and native.multiplies(parameter.dtype) else None


def _stack(parameters: dict[str, jax.Array], names: list[str]) -> jax.Array:
    """[row, *shape]."""
    first = parameters[names[0]]
    if first.ndim == 1:
        return jax.jit(jnp.stack, out_shardings=first.sharding)([parameters.pop(name) for name in names])
    # Memory of whole pages, which JAX takes as it is and the system gives as it is written to.
    memory = mmap.mmap(-1, len(names) * first.nbytes)
    stack = np.frombuffer(memory, first.dtype).reshape(len(names), *first.shape)
    for row, name in enumerate(names):
        stack[row] = parameters.pop(name)
    return jax.device_put(stack, first.sharding)
