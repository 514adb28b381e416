"""Kernels in C++ for one CPU device: products with weights and paged attention, where XLA's own are slow.

| call        | computes                              |
| ----------- | ------------------------------------- |
| `product`   | x [M, K] · w[layer] [N, K], over K     |
| `attention` | queries over pages [L, P, H, 2, S, D] |
| `gather`    | pages into a staging slot, in place   |
| `scatter`   | a staging slot into pages, in place   |
| `gather_to` | pages to an address, outside of JAX   |

docs/performance.md has the figures. `load` compiles the sources that lie here with the machine's C++ compiler, once,
into a folder, and registers them with JAX as FFI targets. They run inside the compiled step, on XLA's threads. Without
a compiler, before `load`, on another platform and on more than one device `in_use` is False and the layers keep to
plain JAX.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

_SOURCES = ("product.cc", "attention.cc", "repack.cc")
_HEADERS = ("common.h",)
_TARGETS = ("pdjax_product", "pdjax_attention", "pdjax_gather", "pdjax_scatter")
_OPTIONS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-shared", "-pthread", "-w")
_COMPILE_SECONDS = 300.0
_VECTOR_WORDS = 16  # a head_dim is a multiple of the widest vector

_loaded: list[ctypes.CDLL] = []


def load(folder: Path) -> bool:
    """Compile the kernels into `folder`, or find them there, and register them. False, with a line that says why, if
    this machine cannot; the environment variable PDJAX_NATIVE=0 turns them off.
    """
    if _loaded:
        return True
    if os.environ.get("PDJAX_NATIVE") == "0" or jax.default_backend() != "cpu":
        return False
    try:
        library = ctypes.CDLL(str(_compiled(folder)))
    except (OSError, subprocess.SubprocessError) as error:
        text = getattr(error, "stderr", None) or str(error)
        print(f"pdjax: without native CPU kernels, slower: {text.strip()[-500:]}", file=sys.stderr, flush=True)
        return False
    for target in _TARGETS:
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(library, target)), platform="cpu")
    _loaded.append(library)
    return True


def in_use() -> bool:
    """Whether traces may call the kernels: they are loaded, and there is one CPU device (they know no sharding)."""
    return bool(_loaded) and jax.device_count() == 1


def multiplies(dtype: jnp.dtype) -> bool:
    """Whether `product` is the way to go for weights of this dtype.

    docs/performance.md says what it costs. bfloat16 is left to XLA on processors that multiply it in hardware.
    """
    return in_use() and not (dtype == jnp.bfloat16 and _multiplies_bfloat16())


def can_attend(head_dim: int) -> bool:
    """Whether `attention` may be called for heads of this size."""
    return in_use() and head_dim % _VECTOR_WORDS == 0


def product(x: jax.Array, weights: jax.Array, layer: jax.Array) -> jax.Array:
    """x [M, K], taken as float32, times one of weights [L, N, K], float32 or bfloat16: float32 [M, N].

    `layer`, an int32 scalar, says which: the kernel reads it where it lies, and XLA would copy a slice. Out of range is
    an error. A row's result is the same whatever other rows there are.
    """
    shape = jax.ShapeDtypeStruct((x.shape[0], weights.shape[1]), jnp.float32)
    return jax.ffi.ffi_call("pdjax_product", shape)(x.astype(jnp.float32), weights, layer)


def attention(
    q: jax.Array, pool: jax.Array, layer: jax.Array, page_table: jax.Array, positions: jax.Array
) -> jax.Array:
    """Causal attention of q [B, T, heads, D] over pages: float32 like q.

    Args:
        q: any float dtype, taken as float32.
        pool: [L, P, H, 2, S, D] float32, or uint16 that holds bfloat16.
        layer: int32 scalar.
        page_table: int32 [B, W].
        positions: int32 [B, T]; each query sees the positions up to its own. Out of the table's range is an error.
    """
    shape = jax.ShapeDtypeStruct(q.shape, jnp.float32)
    call = jax.ffi.ffi_call("pdjax_attention", shape)
    return call(q.astype(jnp.float32), pool, layer, page_table, positions)


def gather(
    pool: jax.Array, page_ids: jax.Array, origin: jax.Array, staging: jax.Array, *, heads: int, layers: int
) -> jax.Array:
    """What `pdjax.kernels.gather` does, in place where the caller donates `staging`, and else on a copy.

    XLA makes that copy too when either array was so much as reshaped before.

    Args:
        pool: words [L, P, H, 1 or 2, S, D] of any type.
        page_ids: int32 [most pages].
        origin: int32 [4], see `pdjax.kernels.geometry.Origin`. Out of range is an error.
        staging: flat words of the pool's type.
    """
    shape = jax.ShapeDtypeStruct(staging.shape, staging.dtype)
    call = jax.ffi.ffi_call("pdjax_gather", shape, input_output_aliases={3: 0})
    return call(pool, page_ids, origin, staging, heads=heads, layers=layers)


def scatter(
    pool: jax.Array, page_ids: jax.Array, origin: jax.Array, staging: jax.Array, *, heads: int, layers: int
) -> jax.Array:
    """The inverse of `gather`: returns the pool, in place where the caller donates it."""
    shape = jax.ShapeDtypeStruct(pool.shape, pool.dtype)
    call = jax.ffi.ffi_call("pdjax_scatter", shape, input_output_aliases={0: 0})
    return call(pool, page_ids, origin, staging, heads=heads, layers=layers)


def gather_to(address: int, shard: jax.Array, page_ids: np.ndarray, *, heads: range, layers: range) -> int:
    """Copy pages of some heads and layers of a pool to memory that JAX does not know, and return when they are there.

    The calling thread copies, without the interpreter lock, and for large copies a few more beside it. Needs `load` to
    have returned True, but works on any number of devices: it is not part of a compiled program.

    Args:
        address: of writable memory that holds them as [head, page, layer, K|V, slot in page, head_dim].
        shard: one device's words [layer, page, head, 1 or 2, slot in page, head_dim]. Waits until they are computed;
            no program may write into these pages meanwhile.
        page_ids: int32 [pages].

    Returns:
        The number of bytes.

    Raises:
        ValueError: pages, heads or layers that the pool does not have; nothing was copied.
    """
    shape = jax.block_until_ready(shard).shape
    page_ids = np.ascontiguousarray(page_ids, np.int32)
    if page_ids.size and not (page_ids.min() >= 0 and page_ids.max() < shape[1]):
        raise ValueError(f"page_ids are {page_ids.tolist()}; the pool has pages 0 to {shape[1] - 1}")
    for name, asked, has in (("heads", heads, shape[2]), ("layers", layers, shape[0])):
        if asked.step != 1 or asked.start < 0 or asked.stop > has:
            raise ValueError(f"{name} {asked} asked for; the pool has 0 to {has - 1}")
    run_bytes = math.prod(shape[3:]) * shard.dtype.itemsize
    origin = (len(page_ids), heads.start, len(heads), layers.start, len(layers))
    _loaded[0].pdjax_gather_to(
        ctypes.c_void_p(shard.unsafe_buffer_pointer()),
        (ctypes.c_int64 * 3)(shape[1], shape[2], run_bytes),
        page_ids.ctypes.data_as(ctypes.c_void_p),
        (ctypes.c_int64 * 5)(*origin),
        ctypes.c_void_p(address),
    )
    return len(page_ids) * len(heads) * len(layers) * run_bytes


def is_loaded() -> bool:
    """Whether `gather_to` may be called."""
    return bool(_loaded)


def _compiled(folder: Path) -> Path:
    """The shared library for these sources, this JAX and this processor."""
    here = Path(__file__).parent
    include = jax.ffi.include_dir()
    digest = hashlib.sha256(repr((jax.__version__, _OPTIONS, platform.machine(), _processor())).encode())
    for name in (*_SOURCES, *_HEADERS):
        digest.update((here / name).read_bytes())
    library = folder / f"kernels-{digest.hexdigest()[:16]}.so"
    if library.exists():
        return library
    compiler = next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)
    if compiler is None:
        raise OSError("there is no C++ compiler (c++, g++ or clang++) on the path")
    folder.mkdir(parents=True, exist_ok=True)
    partial = library.with_suffix(f".{os.getpid()}")
    sources = [str(here / name) for name in _SOURCES]
    try:
        subprocess.run(
            [compiler, *_OPTIONS, "-isystem", include, *sources, "-o", str(partial)],
            check=True,
            capture_output=True,
            text=True,
            timeout=_COMPILE_SECONDS,
        )
        partial.replace(library)  # processes that start together each compile, and the last one's is kept
    finally:
        partial.unlink(missing_ok=True)
    return library


@functools.cache
def _multiplies_bfloat16() -> bool:
    return any(flag in _processor() for flag in ("amx_bf16", "avx512_bf16"))


def _processor() -> str:
    """What -march=native depends on: a home folder may be shared by machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
