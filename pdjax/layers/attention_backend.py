"""Which attention a model's steps use: the one place where a backend's name becomes functions.

| name     | writes and attends with                                                                         |
| -------- | ----------------------------------------------------------------------------------------------- |
| `auto`   | the C++ kernels where they are in use and know the head size, else plain JAX; the default       |
| `native` | the C++ kernels, or an error where they are not in use                                          |
| `plain`  | plain JAX                                                                                       |
| `pallas` | the Pallas kernels, for one device: compiled on CUDA, elsewhere interpreted (right, very slow)  |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from pdjax.kernels import Implementation, append_pages, decode_attention, native, prefill_attention
from pdjax.layers.attention import (
    PagedBatch,
    attend_decode,
    attend_decode_plain,
    attend_prefill,
    attend_prefill_plain,
    to_words,
    write_pages,
)

ATTENTION_BACKENDS = ("auto", "native", "plain", "pallas")


@dataclass(frozen=True)
class AttentionBackend:
    """Functions of the signatures that `pdjax.layers.attention` has."""

    name: str
    write: Callable[[jax.Array, jax.Array, jax.Array, jax.Array, PagedBatch], jax.Array]
    prefill: Callable[[jax.Array, jax.Array, jax.Array, PagedBatch, jnp.dtype], jax.Array]
    decode: Callable[[jax.Array, jax.Array, jax.Array, PagedBatch, jnp.dtype], jax.Array]


AUTO = AttentionBackend("auto", write_pages, attend_prefill, attend_decode)


def attention_backend(name: str, *, head_dim: int, devices: int) -> AttentionBackend:
    """The functions behind a name, for heads of this size on a mesh of this many devices.

    Raises:
        ValueError: no such backend, or one that cannot serve here.
    """
    if name == "auto":
        return AUTO
    if name == "plain":
        return AttentionBackend(name, write_pages, attend_prefill_plain, attend_decode_plain)
    if name == "native":
        if not native.can_attend(head_dim):
            raise ValueError(
                f"attention_backend native: the C++ kernels need one CPU device, a compiler and a head_dim that is a "
                f"multiple of 16, and cannot be used here (head_dim {head_dim}): use auto"
            )
        return AttentionBackend(name, write_pages, attend_prefill, attend_decode)
    if name == "pallas":
        if devices > 1:
            raise ValueError(f"attention_backend pallas: its kernels are for one device, not {devices}: use auto")
        implementation: Implementation = "auto" if jax.default_backend() == "gpu" else "pallas_interpret"
        return AttentionBackend(name, *(partial(f, implementation) for f in (_write, _prefill, _decode)))
    raise ValueError(f"attention_backend is {name!r}; expected one of {', '.join(ATTENTION_BACKENDS)}")


def _write(
    implementation: Implementation, pool: jax.Array, layer: jax.Array, k: jax.Array, v: jax.Array, batch: PagedBatch
) -> jax.Array:
    k, v = to_words(k, pool.dtype), to_words(v, pool.dtype)
    return append_pages(
        pool, layer, k, v, batch.page_table, batch.positions, batch.valid, implementation=implementation
    )


def _prefill(
    implementation: Implementation, q: jax.Array, pool: jax.Array, layer: jax.Array, batch: PagedBatch, dtype: jnp.dtype
) -> jax.Array:
    positions = jnp.where(batch.valid, batch.positions, -1)
    return prefill_attention(q, pool, layer, batch.page_table, positions, dtype=dtype, implementation=implementation)


def _decode(
    implementation: Implementation, q: jax.Array, pool: jax.Array, layer: jax.Array, batch: PagedBatch, dtype: jnp.dtype
) -> jax.Array:
    positions = jnp.where(batch.valid, batch.positions, -1)[:, 0]
    out = decode_attention(
        q[:, 0], pool, layer, batch.page_table, positions, dtype=dtype, implementation=implementation
    )
    return out[:, None]
