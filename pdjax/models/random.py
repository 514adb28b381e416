"""Model folders with random weights and a byte-level tokenizer, for tests and dry runs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from pdjax.models.config import ModelConfig
from pdjax.models.errors import ModelError
from pdjax.models.names import expected_tensors
from pdjax.models.tokenizer_text import TokenizerFiles
from pdjax.models.writing import Origin, write_model

_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def tiny_config(**changes: Any) -> ModelConfig:
    """A model of 2 layers and 4 key-value heads that runs in milliseconds; bytes are its tokens."""
    values: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": 260,
        "hidden_size": 64,
        "num_layers": 2,
        "num_heads": 8,
        "num_kv_heads": 4,
        "head_dim": 16,
        "intermediate_size": 128,
        "max_position_embeddings": 4096,
        "bos_token_id": 256,
        "eos_token_ids": (257,),
    }
    return ModelConfig(**(values | changes))


def write_random_model(folder: Path, config: ModelConfig, seed: int) -> None:
    """Make a model folder; the same config and seed make the same weights.

    Raises:
        ModelError: the folder exists, or the vocabulary has no room for the 256 bytes and the special tokens.
    """
    write_model(
        folder,
        config=config,
        tensors=RandomTensors(config, seed),
        tokenizer=byte_tokenizer(config),
        origin=Origin(f"random weights, seed {seed}", hashlib.sha256(f"{config} {seed}".encode()).hexdigest()),
    )


class RandomTensors:
    """A `TensorSource` of normal values, scaled so that activations keep their size through the layers."""

    def __init__(self, config: ModelConfig, seed: int) -> None:
        self.shapes: Mapping[str, tuple[int, ...]] = expected_tensors(config)
        self._order = {name: index for index, name in enumerate(self.shapes)}
        self._seed = seed

    def read(self, name: str) -> np.ndarray:
        """float32, the same at each call."""
        shape = self.shapes[name]
        values = np.random.default_rng([self._seed, self._order[name]]).standard_normal(shape, np.float32)
        if name.endswith("norm.weight"):
            return 1 + 0.1 * values
        if name.endswith(("bias", "embed_tokens.weight")):
            return values
        return values / np.float32(shape[-1] ** 0.5)


def byte_tokenizer(config: ModelConfig) -> TokenizerFiles:
    """One token a byte; the config's bos and eos ids are special tokens, ids left over are unused ones."""
    special = {id: f"<|eos_{id}|>" if index else "<|eos|>" for index, id in enumerate(config.eos_token_ids)}
    if config.bos_token_id is not None:
        special.setdefault(config.bos_token_id, "<|bos|>")
    if config.vocab_size < 256 + len(special):
        raise ModelError(
            f"a byte-level tokenizer with {len(special)} special tokens needs a vocab_size of at least "
            f"{256 + len(special)}, not {config.vocab_size}"
        )
    characters = iter(sorted(pre_tokenizers.ByteLevel.alphabet()))
    vocabulary = {
        special[id] if id in special else next(characters, f"<|unused_{id}|>"): id for id in range(config.vocab_size)
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special.values()])
    settings: dict[str, Any] = {"add_bos_token": False, "chat_template": _CHAT_TEMPLATE}
    if config.bos_token_id is not None:
        settings["bos_token"] = special[config.bos_token_id]
    if config.eos_token_ids:
        settings["eos_token"] = special[config.eos_token_ids[0]]
    return TokenizerFiles(tokenizer.to_str(), settings)
