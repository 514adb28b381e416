"""Whole path against transformers: it saves a random model, we convert and run it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from dense_attention import DenseModel

from pdjax.launch.convert import convert
from pdjax.layers.sharding import tensor_mesh
from pdjax.models.checkpoint import load_model
from pdjax.models.random import byte_tokenizer, tiny_config

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

COMMON = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "initializer_range": 0.3,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama, tied, wide heads": ("LlamaConfig", {"tie_word_embeddings": True, "head_dim": 32}),
    "llama 3 rope": ("LlamaConfig", {"rope_parameters": LLAMA3}),
    "qwen2": ("Qwen2Config", {}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers(tmp_path: Path, kind: str):
    name, changes = KINDS[kind]
    torch.manual_seed(0)
    original = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**COMMON, **changes)).eval()
    with torch.no_grad():
        for parameter in original.parameters():
            if parameter.ndim == 1:  # biases are born as zeros and norms as ones, which would hide mistakes
                parameter.add_(torch.randn_like(parameter) * 0.2)
    original.save_pretrained(tmp_path / "original")
    byte_tokenizer(tiny_config()).write(tmp_path / "original")
    convert(tmp_path / "original", tmp_path / "model", progress=False)
    model = load_model(tmp_path / "model", dtype="float32", mesh=tensor_mesh(jax.devices()[:1]))
    ids = np.random.default_rng(0).integers(0, 256, 200).tolist()
    with torch.no_grad():
        expected = original(torch.tensor([ids])).logits[0].numpy()
    np.testing.assert_allclose(DenseModel(model, len(ids)).logits(ids), expected, atol=2e-3, rtol=1e-3)
