"""Every attention backend gives the same tokens' outputs; one that cannot serve says so."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pdjax.kernels import native
from pdjax.layers.attention import PagedBatch
from pdjax.layers.attention_backend import attention_backend


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["auto", "pallas"])
def test_a_prompt_and_its_next_token_come_out_alike(name: str, dtype: str) -> None:
    rng = np.random.default_rng(0)
    layers, page_size, kv_heads, heads, head_dim, prompt = 2, 16, 2, 4, 16, 21
    table = jnp.asarray(rng.permutation(np.arange(1, 20))[:16][None], jnp.int32)
    q, k, v = (
        jnp.asarray(rng.standard_normal((1, prompt + 1, count, head_dim)), dtype)
        for count in (heads, kv_heads, kv_heads)
    )
    outputs = {}
    for each in (name, "plain"):
        backend = attention_backend(each, head_dim=head_dim, devices=1)
        words = "uint16" if dtype == "bfloat16" else dtype
        pool = jnp.zeros((layers, 20, kv_heads, 2, page_size, head_dim), words)
        layer, where = jnp.int32(1), jnp.arange(prompt + 3)[None]  # two tokens of padding
        batch = PagedBatch(table, where, where < prompt)
        padded = [jnp.pad(x[:, :prompt], ((0, 0), (0, 3), (0, 0), (0, 0))) for x in (q, k, v)]
        pool = backend.write(pool, layer, padded[1], padded[2], batch)
        first = backend.prefill(padded[0], pool, layer, batch, jnp.dtype(dtype))[:, :prompt]
        batch = PagedBatch(table, jnp.full((1, 1), prompt), jnp.ones((1, 1), bool))
        pool = backend.write(pool, layer, k[:, prompt:], v[:, prompt:], batch)
        outputs[each] = jnp.concatenate([first, backend.decode(q[:, prompt:], pool, layer, batch, jnp.dtype(dtype))], 1)
    ours, plain = (np.asarray(out, np.float64) for out in outputs.values())
    np.testing.assert_allclose(ours, plain, atol=2e-5 if dtype == "float32" else 2e-2)


@pytest.mark.parametrize(
    ("name", "devices", "says"),
    [("fast", 1, "expected one of auto, native, plain, pallas"), ("pallas", 2, "for one device, not 2")],
)
def test_a_backend_that_cannot_serve_is_refused_in_words(name: str, devices: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        attention_backend(name, head_dim=64, devices=devices)


def test_native_is_refused_where_its_kernels_are_not_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "in_use", lambda: False)
    with pytest.raises(ValueError, match="cannot be used here"):
        attention_backend("native", head_dim=64, devices=jax.device_count())
