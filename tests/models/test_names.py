from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pdjax.layers.sharding import named_parameters
from pdjax.models.config import ModelConfig
from pdjax.models.errors import ModelError
from pdjax.models.llama import Llama
from pdjax.models.names import assemble, check_tensors, expected_tensors
from pdjax.models.random import RandomTensors, tiny_config


@pytest.mark.parametrize(
    "config",
    [tiny_config(), tiny_config(tie_word_embeddings=True), tiny_config(model_type="qwen2", attention_bias=True)],
)
def test_every_parameter_of_the_module_is_made_in_its_shape_and_no_other(config: ModelConfig):
    named = named_parameters(nnx.state(nnx.eval_shape(lambda: Llama(config, jnp.float32))))
    made = {name: values.shape for name, values in assemble(config, RandomTensors(config, 0))}
    assert made == {name: variable.shape for name, variable in named.items()}


def test_a_key_value_head_lies_with_the_query_heads_that_read_it():
    config = tiny_config()
    tensors = RandomTensors(config, 0)
    qkv = dict(assemble(config, tensors))["layers.1.attention.qkv.weight"]
    q = tensors.read("model.layers.1.self_attn.q_proj.weight").reshape(8, 16, 64)
    k = tensors.read("model.layers.1.self_attn.k_proj.weight").reshape(4, 16, 64)
    v = tensors.read("model.layers.1.self_attn.v_proj.weight").reshape(4, 16, 64)
    assert qkv.shape == (4, 2 + 2, 16, 64)
    np.testing.assert_array_equal(qkv[3], np.stack([q[6], q[7], k[3], v[3]]))


def test_missing_tensors_are_named():
    shapes = expected_tensors(tiny_config())
    del shapes["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(ModelError, match=r"missing: model\.layers\.1\.mlp\.up_proj\.weight"):
        check_tensors(tiny_config(), shapes)


def test_unexpected_tensors_are_named():
    shapes = expected_tensors(tiny_config()) | {"model.layers.2.mlp.up_proj.weight": (128, 64)}
    with pytest.raises(ModelError, match=r"no place.*model\.layers\.2\.mlp\.up_proj\.weight"):
        check_tensors(tiny_config(), shapes)


def test_a_tensor_of_another_shape_is_named_with_both_shapes():
    shapes = expected_tensors(tiny_config()) | {"model.norm.weight": (63,)}
    with pytest.raises(ModelError, match=r"model\.norm\.weight has shape \(63,\).*\(64,\)"):
        check_tensors(tiny_config(), shapes)


def test_a_tied_head_that_a_file_repeats_is_no_error():
    config = tiny_config(tie_word_embeddings=True)
    check_tensors(config, expected_tensors(config) | {"lm_head.weight": (260, 64)})
