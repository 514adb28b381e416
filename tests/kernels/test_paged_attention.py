"""Attention over pages, and what writes into them, whichever implementation runs: against float64."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pdjax.kernels import Implementation, append_pages, decode_attention, hopper, prefill_attention

RUNNABLE = ("plain", "pallas_interpret", "auto")
LAYERS, PAGES, PAGE = 2, 40, 4


def pool_of(kv_heads: int, head_dim: int, dtype: str) -> tuple[jax.Array, np.ndarray]:
    """Words, and the values they are, in float64."""
    values = np.random.default_rng(0).standard_normal((LAYERS, PAGES, kv_heads, 2, PAGE, head_dim), np.float32)
    pool = jnp.asarray(values, dtype)
    words = jax.lax.bitcast_convert_type(pool, jnp.uint16) if dtype == "bfloat16" else pool
    return words, np.asarray(pool, np.float64)


def attention(q: np.ndarray, values: np.ndarray, layer: int, table: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """q [B, T, heads, D] over pages, in float64, one row at a time."""
    out = np.zeros(q.shape)
    group = q.shape[2] // values.shape[2]
    for row, token, head in np.ndindex(q.shape[:3]):
        seen = positions[row, token] + 1
        if seen > 0:
            pages = values[layer, table[row], head // group]  # [W, 2, S, D]
            keys, held = (pages[:, plane].reshape(-1, q.shape[3])[:seen] for plane in (0, 1))
            scores = keys @ q[row, token, head] / np.sqrt(q.shape[3])
            weights = np.exp(scores - scores.max())
            out[row, token, head] = weights @ held / weights.sum()
    return out


@pytest.mark.parametrize("implementation", RUNNABLE)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "dtype"), [(6, 2, 16, "bfloat16"), (4, 4, 8, "float32"), (5, 1, 24, "float32")]
)
def test_a_decode_token_sees_all_before_it_however_its_pages_are_split(
    heads: int, kv_heads: int, head_dim: int, dtype: str, implementation: Implementation
) -> None:
    pool, values = pool_of(kv_heads, head_dim, dtype)
    rng = np.random.default_rng(1)
    table = rng.permutation(PAGES)[:32].reshape(4, 8).astype(np.int32)
    positions = np.array([0, 3, 30, -1], np.int32)  # one token, a whole page, nearly all, none
    q = np.asarray(jnp.asarray(rng.standard_normal((4, heads, head_dim)), dtype), np.float64)
    expected = attention(q[:, None], values, 1, table, positions[:, None])[:, 0]
    attend = jax.jit(decode_attention, static_argnames=("dtype", "splits", "implementation"))
    for splits in (1, 3):
        out = attend(
            jnp.asarray(q, dtype),
            pool,
            jnp.int32(1),
            jnp.asarray(table),
            jnp.asarray(positions),
            dtype=jnp.dtype(dtype),
            splits=splits,
            implementation=implementation,
        )
        np.testing.assert_allclose(np.asarray(out, np.float64), expected, atol=2e-5 if dtype == "float32" else 2e-2)


@pytest.mark.parametrize("implementation", RUNNABLE)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_chunks_of_different_lengths_see_their_own_prefix_and_no_further(
    dtype: str, implementation: Implementation
) -> None:
    heads, kv_heads, head_dim, tokens = 6, 2, 16, 19
    pool, values = pool_of(kv_heads, head_dim, dtype)
    rng = np.random.default_rng(2)
    table = rng.permutation(PAGES)[:24].reshape(3, 8).astype(np.int32)
    positions = np.full((3, tokens), -1, np.int32)
    for row, (start, length) in enumerate([(0, 19), (11, 7), (20, 1)]):
        positions[row, :length] = start + np.arange(length)
    q = np.asarray(jnp.asarray(rng.standard_normal((3, tokens, heads, head_dim)), dtype), np.float64)
    attend = jax.jit(prefill_attention, static_argnames=("dtype", "implementation"))
    out = attend(
        jnp.asarray(q, dtype),
        pool,
        jnp.int32(0),
        jnp.asarray(table),
        jnp.asarray(positions),
        dtype=jnp.dtype(dtype),
        implementation=implementation,
    )
    expected = attention(q, values, 0, table, positions)
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, atol=2e-5 if dtype == "float32" else 2e-2)


@pytest.mark.parametrize("implementation", RUNNABLE)
@pytest.mark.parametrize("dtype", ["uint16", "float32"])
def test_new_tokens_are_written_where_they_belong_and_padding_harms_no_page(
    dtype: str, implementation: Implementation
) -> None:
    heads, head_dim = 3, 8
    rng = np.random.default_rng(3)
    host = rng.integers(0, 1 << 16, (LAYERS, PAGES, heads, 2, PAGE, head_dim)).astype(dtype)
    k, v = rng.integers(0, 1 << 16, (2, 2, 5, heads, head_dim)).astype(dtype)
    table = rng.permutation(np.arange(1, PAGES))[:8].reshape(2, 4).astype(np.int32)
    positions = np.array([[0, 1, 2, 3, 4], [9, 10, 11, 99, -7]], np.int32)
    valid = np.array([[True] * 5, [True] * 3 + [False] * 2])
    append = jax.jit(append_pages, donate_argnums=0, static_argnames="implementation")
    pool = jnp.array(host)
    address = pool.unsafe_buffer_pointer()
    pool = append(pool, jnp.int32(1), k, v, table, positions, valid, implementation=implementation)
    assert pool.unsafe_buffer_pointer() == address
    for row, token in np.argwhere(valid):
        page, slot = divmod(positions[row, token], PAGE)
        host[1, table[row, page], :, 0, slot] = k[row, token]
        host[1, table[row, page], :, 1, slot] = v[row, token]
    np.testing.assert_array_equal(np.asarray(pool)[:, 1:], host[:, 1:])


@pytest.mark.filterwarnings("ignore:.*pallas_call.*:DeprecationWarning")
@pytest.mark.parametrize("dtype", ["uint16", "float32"])
@pytest.mark.parametrize(
    ("implementation", "head_dim", "custom_call"),
    [
        ("pallas", 128, "mosaic_gpu_v2"),
        ("auto", 128, "mosaic_gpu_v2"),
        ("pallas_triton", 128, "__gpu$xla.gpu.triton"),
        ("auto", 64, "__gpu$xla.gpu.triton"),
    ],
)
def test_append_lowers_for_cuda_without_a_gpu(
    implementation: Implementation, head_dim: int, custom_call: str, dtype: str
) -> None:
    pool = jax.ShapeDtypeStruct((2, 8, 3, 2, 16, head_dim), dtype)
    new = jax.ShapeDtypeStruct((2, 4, 3, head_dim), dtype)
    table, where = jax.ShapeDtypeStruct((2, 4), "int32"), jax.ShapeDtypeStruct((2, 4), "int32")

    def append(*arguments: jax.Array) -> jax.Array:
        return append_pages(*arguments, implementation=implementation)  # type: ignore[misc]

    allowed = [export.DisabledSafetyCheck.custom_call(custom_call)]
    lowered = export.export(jax.jit(append), platforms=["cuda"], disabled_checks=allowed)(
        pool, jax.ShapeDtypeStruct((), "int32"), new, new, table, where, jax.ShapeDtypeStruct((2, 4), "bool")
    )
    assert custom_call in lowered.mlir_module()


@pytest.mark.parametrize(
    ("implementation", "dtype", "tokens"),
    [
        ("pallas_triton", "bfloat16", 128),
        ("pallas_triton", "float32", 1),
        ("auto", "bfloat16", 1),
        ("auto", "float32", 128),
    ],
)
def test_attention_lowers_for_cuda_without_a_gpu(implementation: Implementation, dtype: str, tokens: int) -> None:
    words = "uint16" if dtype == "bfloat16" else dtype
    shapes = [(2, tokens, 9, 64), (2, 40, 3, 2, 16, 64), (), (2, 8), (2, tokens)]
    kinds = [dtype, words, "int32", "int32", "int32"]
    arguments = [jax.ShapeDtypeStruct(shape, kind) for shape, kind in zip(shapes, kinds)]

    def attend(*arguments: jax.Array) -> jax.Array:
        return prefill_attention(*arguments, dtype=jnp.dtype(dtype), splits=4, implementation=implementation)

    allowed = [export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")]
    lowered = export.export(jax.jit(attend), platforms=["cuda"], disabled_checks=allowed)(*arguments)
    assert "__gpu$xla.gpu.triton" in lowered.mlir_module()


@pytest.mark.parametrize(("head_dim", "page_size"), [(64, 16), (128, 64)])
def test_the_decode_kernel_for_hopper_lowers_without_a_gpu(head_dim: int, page_size: int) -> None:
    shapes = [(2, 9, head_dim), (2, 40, 3, 2, page_size, head_dim), (), (2, 7), (2,)]
    kinds = ["bfloat16", "uint16", "int32", "int32", "int32"]
    arguments = [jax.ShapeDtypeStruct(shape, kind) for shape, kind in zip(shapes, kinds)]

    def attend(*arguments: jax.Array) -> jax.Array:
        return decode_attention(*arguments, dtype=jnp.dtype("bfloat16"), implementation="pallas")

    allowed = [export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")]
    lowered = export.export(jax.jit(attend), platforms=["cuda"], disabled_checks=allowed)(*arguments)
    assert "mosaic_gpu_v2" in lowered.mlir_module()


def test_the_decode_kernel_for_hopper_reads_the_right_pages_without_races(monkeypatch: pytest.MonkeyPatch) -> None:
    interpreter = pytest.importorskip("jax._src.pallas.mosaic_gpu.interpret.params")  # not public yet
    interpreted = partial(plgpu.kernel, interpret=interpreter.InterpretGPUParams(detect_races=True))
    monkeypatch.setattr(hopper.plgpu, "kernel", interpreted)
    # What the interpreter does not know: register layouts, and products of transposed or register operands.
    monkeypatch.setattr(hopper.plgpu, "layout_cast", lambda values, layout: values)
    monkeypatch.setattr(
        hopper.plgpu, "broadcasted_iota", lambda dtype, shape, axis, layout: lax.broadcasted_iota(dtype, shape, axis)
    )

    def multiply(left: Any, right: Any, *, transposed: bool = False) -> jax.Array:
        return jnp.dot(left[...], right[...].T if transposed else right[...], preferred_element_type=jnp.float32)

    monkeypatch.setattr(hopper, "_multiply", multiply)
    rng = np.random.default_rng(4)
    values = jnp.asarray(rng.standard_normal((1, 12, 1, 2, 16, 64)), jnp.bfloat16)
    table, positions = rng.permutation(12)[None, :9].astype(np.int32), np.array([138], np.int32)
    q = jnp.asarray(rng.standard_normal((1, 3, 64)), jnp.bfloat16)
    arguments = (
        q,
        lax.bitcast_convert_type(values, jnp.uint16),
        jnp.int32(0),
        jnp.asarray(table),
        jnp.asarray(positions),
    )
    out = decode_attention(*arguments, dtype=jnp.dtype("bfloat16"), splits=2, implementation="pallas")
    expected = attention(
        np.asarray(q, np.float64)[:, None], np.asarray(values, np.float64), 0, table, positions[:, None]
    )
    np.testing.assert_allclose(np.asarray(out, np.float64), expected[:, 0], atol=2e-2)


def test_what_does_not_fit_is_refused_in_words() -> None:
    pool, table, where = jnp.zeros((1, 4, 2, 2, 4, 8)), jnp.zeros((1, 2), jnp.int32), jnp.zeros((1, 1), jnp.int32)
    layer = jnp.int32(0)
    with pytest.raises(ValueError, match="a multiple of 2 heads"):
        prefill_attention(jnp.zeros((1, 1, 3, 8)), pool, layer, table, where, dtype=jnp.dtype("float32"))
    with pytest.raises(ValueError, match="splits is 0"):
        decode_attention(jnp.zeros((1, 2, 8)), pool, layer, table, where[0], dtype=jnp.dtype("float32"), splits=0)
    with pytest.raises(ValueError, match="does not know float32, 1 query heads a key-value head, head_dim 8"):
        decode_attention(
            jnp.zeros((1, 2, 8)), pool, layer, table, where[0], dtype=jnp.dtype("float32"), implementation="pallas"
        )
    with pytest.raises(ValueError, match="use pallas_triton"):
        prefill_attention(
            jnp.zeros((1, 1, 2, 8)), pool, layer, table, where, dtype=jnp.dtype("float32"), implementation="pallas"
        )
    valid, wide, words = jnp.ones((1, 1), bool), jnp.zeros((1, 1, 3, 8)), jnp.zeros((1, 1, 2, 8), jnp.uint16)
    with pytest.raises(ValueError, match="2 heads, head_dim 8"):
        append_pages(pool, layer, wide, wide, table, where, valid)
    with pytest.raises(TypeError, match="the pool holds float32 words"):
        append_pages(pool, layer, words, words, table, where, valid)
