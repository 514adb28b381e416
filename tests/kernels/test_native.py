from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pdjax.kernels import native
from pdjax.launch.cache_folder import cache_root
from pdjax.layers.attention import PagedBatch, attend_prefill


@pytest.fixture(scope="module", autouse=True)
def kernels():
    if not native.load(cache_root() / "native"):
        pytest.skip("this machine has no C++ compiler")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 70])
@pytest.mark.parametrize(("outs", "depth"), [(1, 5), (10, 64), (29, 1300), (200, 576)])
def test_a_product_is_exact_for_every_number_of_rows_and_any_shape(dtype: str, rows: int, outs: int, depth: int):
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((rows, depth), np.float32)
    weights = jnp.asarray(rng.standard_normal((3, outs, depth), np.float32), dtype)
    product = jax.jit(native.product)(x, weights, jnp.int32(1))
    np.testing.assert_allclose(product, x.astype(np.float64) @ np.asarray(weights[1], np.float64).T, atol=2e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_gives_the_same_bits_alone_and_among_others(dtype: str):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((70, 1300), np.float32)
    weights = jnp.asarray(rng.standard_normal((1, 50, 1300), np.float32), dtype)
    product = jax.jit(native.product)
    together = np.asarray(product(x, weights, jnp.int32(0)))
    for row in (0, 3, 69):
        np.testing.assert_array_equal(together[row], product(x[row : row + 1], weights, jnp.int32(0))[0])


@pytest.mark.parametrize("layer", [-1, 2])
def test_a_layer_that_the_weights_do_not_have_is_refused(layer: int):
    with pytest.raises(Exception, match="no such layer"):
        jax.block_until_ready(jax.jit(native.product)(jnp.zeros((1, 16)), jnp.zeros((2, 4, 16)), jnp.int32(layer)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(6, 2, 64), (4, 4, 16), (8, 1, 128), (3, 3, 96)])
def test_attention_is_that_of_plain_jax(
    dtype: str, heads: int, kv_heads: int, head_dim: int, monkeypatch: pytest.MonkeyPatch
):
    rng = np.random.default_rng(1)
    rows, tokens, layers, pages, page_size, width = 3, 18, 2, 60, 16, 16
    pool = jnp.asarray(rng.standard_normal((layers, pages, kv_heads, 2, page_size, head_dim), np.float32), dtype)
    if dtype == "bfloat16":
        pool = jax.lax.bitcast_convert_type(pool, jnp.uint16)
    table = rng.permutation(pages)[: rows * width].reshape(rows, width).astype(np.int32)
    positions = np.stack([start + np.arange(tokens, dtype=np.int32) for start in (0, 100, 237)])
    batch = PagedBatch(jnp.asarray(table), jnp.asarray(positions), jnp.ones((rows, tokens), bool))
    q = jnp.asarray(rng.standard_normal((rows, tokens, heads, head_dim), np.float32))
    layer = jnp.int32(1)
    ours = jax.jit(native.attention)(q, pool, layer, table, positions)
    monkeypatch.setattr(native, "can_attend", lambda head_dim: False)
    plain = attend_prefill(q, pool, layer, batch, jnp.dtype(dtype))
    np.testing.assert_allclose(ours, plain, atol=2e-5 if dtype == "float32" else 3e-2)


def test_attention_gives_a_prompt_the_same_bits_in_one_step_and_in_two():
    rng = np.random.default_rng(2)
    pool = jnp.asarray(rng.standard_normal((1, 9, 2, 2, 16, 64), np.float32))
    q = rng.standard_normal((1, 40, 6, 64), np.float32)
    table, positions = np.arange(1, 9, dtype=np.int32)[None], np.arange(40, dtype=np.int32)[None] + 50
    attention = jax.jit(native.attention)
    whole = attention(q, pool, jnp.int32(0), table, positions)
    parts = [attention(q[:, part], pool, jnp.int32(0), table, positions[:, part]) for part in (np.s_[:16], np.s_[16:])]
    np.testing.assert_array_equal(whole, np.concatenate(parts, axis=1))


def test_a_page_that_the_pool_does_not_have_is_refused():
    pool = jnp.zeros((1, 2, 1, 2, 16, 16))
    q, positions = jnp.zeros((1, 1, 1, 16)), jnp.zeros((1, 1), jnp.int32)
    with pytest.raises(Exception, match="no such page"):
        jax.block_until_ready(
            jax.jit(native.attention)(q, pool, jnp.int32(0), jnp.full((1, 1), 2, jnp.int32), positions)
        )
