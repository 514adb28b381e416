from __future__ import annotations

from typing import Any

import pytest

from pdjax.models.config import ModelConfig
from pdjax.models.errors import ModelError
from pdjax.models.random import tiny_config
from pdjax.models.registry import model_class

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


def test_what_a_config_leaves_out_takes_its_usual_value():
    config = ModelConfig.from_huggingface(LLAMA)
    assert (config.num_kv_heads, config.head_dim, config.rope_theta) == (4, 16, 10_000.0)
    assert not config.tie_word_embeddings and not config.attention_bias and config.eos_token_ids == ()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"eos_token_id": [1, 2], "bos_token_id": 0, "tie_word_embeddings": True},
        {"rope_theta": 500000.0, "rope_scaling": LLAMA3_SCALING},
        {"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False},
    ],
)
def test_a_config_comes_back_equal_from_its_written_form(changes: dict[str, Any]):
    config = ModelConfig.from_huggingface(LLAMA | changes)
    assert ModelConfig.from_huggingface(config.to_huggingface()) == config


def test_rope_settings_are_read_from_old_and_new_places_alike():
    old = ModelConfig.from_huggingface(LLAMA | {"rope_theta": 5e5, "rope_scaling": LLAMA3_SCALING})
    new = ModelConfig.from_huggingface(LLAMA | {"rope_parameters": LLAMA3_SCALING | {"rope_theta": 5e5}})
    assert old == new and old.rope_theta == 5e5 and old.rope_scaling is not None


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "num_kv_heads"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"attention_bias": True}, "attention_bias"),
        ({"sliding_window": 512}, "sliding_window"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "factor"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"eos_token_id": 128}, "128"),
        ({"eos_token_id": "</s>"}, "</s>"),
    ],
)
def test_what_is_missing_or_not_supported_is_refused_by_name(changes: dict[str, Any], named: str):
    with pytest.raises(ModelError, match=named):
        ModelConfig.from_huggingface(LLAMA | changes)


def test_an_unknown_kind_of_model_is_refused_with_the_known_ones():
    with pytest.raises(ModelError, match=r"mamba2.*llama, qwen2"):
        model_class("mamba2")


def test_sizes_that_no_model_can_have_are_refused():
    with pytest.raises(ModelError, match="num_layers"):
        tiny_config(num_layers=0)
    with pytest.raises(ModelError, match="head_dim"):
        tiny_config(head_dim=15)
