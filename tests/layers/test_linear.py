from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pdjax.layers.linear import contract_last
from pdjax.layers.stacked import Stacked


@pytest.mark.parametrize("rows", [(1,), (2,), (1, 1), (2, 3)])
@pytest.mark.parametrize("out", [(5,), (2, 3)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_product_has_float32_precision_and_the_shape_of_rows_and_weight(
    rows: tuple[int, ...], out: tuple[int, ...], dtype: str
):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((*rows, 64)), dtype)
    weight = jnp.asarray(rng.standard_normal((*out, 64)), dtype)
    product = jax.jit(contract_last)(x, weight)
    assert product.dtype == jnp.float32 and product.shape == (*rows, *out)
    exact = np.tensordot(np.asarray(x, np.float64), np.asarray(weight, np.float64), axes=(-1, -1))
    np.testing.assert_allclose(product, exact, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_weight_that_is_a_row_of_a_stack_gives_the_product_that_it_gives_by_itself(dtype: str):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((3, 64)), dtype)
    stack = jnp.asarray(rng.standard_normal((4, 2, 3, 64)), dtype)
    product = jax.jit(contract_last)
    np.testing.assert_array_equal(product(x, Stacked(stack, jnp.int32(2))), product(x, stack[2]))
