from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from pdjax.models.config import ModelConfig
from pdjax.models.errors import ModelError
from pdjax.models.gguf import GGUFModel
from pdjax.models.names import check_tensors
from pdjax.models.random import RandomTensors, tiny_config

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """How the GGUF converter orders llama's query and key rows."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    file: Path,
    config: ModelConfig,
    *,
    extra: dict[str, np.ndarray] | None = None,
    metadata: dict[str, Any] | None = None,
) -> RandomTensors:
    """A GGUF file as llama.cpp's converter makes it; the embedding is quantised."""
    architecture = config.model_type
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    for key, value in (metadata or {}).items():
        writer.add_string(key, value)
    tensors = RandomTensors(config, 1)
    for name in tensors.shapes:
        values = tensors.read(name)
        if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            values = interleave(values, config.num_heads if "q_proj" in name else config.num_kv_heads)
        stem, _, kind = name.rpartition(".")
        layer, _, part = stem.removeprefix("model.layers.").partition(".")
        theirs = f"blk.{layer}.{NAMES[part]}" if name.startswith("model.layers.") else NAMES[stem]
        if name == "model.embed_tokens.weight":
            quantised = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(f"{theirs}.{kind}", quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(f"{theirs}.{kind}", values)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_a_gguf_file_gives_the_tensors_and_config_that_it_was_made_from(tmp_path: Path, kind: str, tied: bool):
    config = tiny_config(model_type=kind, attention_bias=kind == "qwen2", tie_word_embeddings=tied)
    original = write_gguf(tmp_path / "model.gguf", config)
    model = GGUFModel(tmp_path / "model.gguf")
    assert model.config == config
    check_tensors(config, model.shapes)
    for name in original.shapes:
        tolerance = 0.02 if "embed" in name else 0  # one step of Q8_0
        np.testing.assert_allclose(model.read(name), original.read(name), atol=tolerance, err_msg=name)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path):
    (tmp_path / "model.gguf").write_bytes(b"not a model at all, but long enough to look at")
    with pytest.raises(ModelError, match=r"model\.gguf cannot be read as a GGUF file"):
        GGUFModel(tmp_path / "model.gguf")


def test_a_gguf_file_cut_short_is_refused(tmp_path: Path):
    write_gguf(tmp_path / "model.gguf", tiny_config())
    whole = (tmp_path / "model.gguf").read_bytes()
    (tmp_path / "short.gguf").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match="cannot be read"):
        GGUFModel(tmp_path / "short.gguf")


def test_an_architecture_that_is_not_supported_is_named(tmp_path: Path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match="'mamba' is not supported; supported are llama, qwen2"):
        GGUFModel(tmp_path / "model.gguf")


@pytest.mark.parametrize("name", ["rope_freqs.weight", "blk.0.ffn_gate_inp.weight"])
def test_a_tensor_that_would_be_left_out_is_named(tmp_path: Path, name: str):
    write_gguf(tmp_path / "model.gguf", tiny_config(), extra={name: np.ones(8, np.float32)})
    with pytest.raises(ModelError, match=name):
        GGUFModel(tmp_path / "model.gguf")


def test_scaled_rope_is_refused(tmp_path: Path):
    write_gguf(tmp_path / "model.gguf", tiny_config(), metadata={"llama.rope.scaling.type": "yarn"})
    with pytest.raises(ModelError, match="yarn"):
        _ = GGUFModel(tmp_path / "model.gguf").config
