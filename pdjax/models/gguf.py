"""Reads GGUF files: weights dequantised to float32 under Hugging Face's names, config, tokenizer, chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize

from pdjax.models.config import ModelConfig
from pdjax.models.digest import sha256_of
from pdjax.models.errors import ModelError
from pdjax.models.tokenizer_gguf import build_tokenizer
from pdjax.models.tokenizer_text import TokenizerFiles

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ARCHITECTURES = ("llama", "qwen2")


class GGUFModel:
    """One GGUF file, a `TensorSource`. Tensors are dequantised when read.

    Raises:
        ModelError: the file does not parse, or holds an architecture, tensor or setting that is not supported.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        try:
            self._reader = GGUFReader(file)
        except (OSError, ValueError, KeyError, IndexError) as error:
            raise ModelError(f"{file} cannot be read as a GGUF file: {error}") from error
        self._architecture = self._take("general.architecture", str)
        if self._architecture not in _ARCHITECTURES:
            known = ", ".join(_ARCHITECTURES)
            raise ModelError(f"{file}: architecture {self._architecture!r} is not supported; supported are {known}")
        self._tensors = {self._huggingface_name(tensor.name): tensor for tensor in self._reader.tensors}
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: tuple(int(size) for size in reversed(tensor.shape)) for name, tensor in self._tensors.items()
        }

    @cached_property
    def config(self) -> ModelConfig:
        """The model's numbers, from the metadata."""
        self._refuse_unsupported()
        architecture = self._architecture
        hidden = self._take(f"{architecture}.embedding_length", int)
        heads = self._take(f"{architecture}.attention.head_count", int)
        if heads < 1:
            raise ModelError(f"{self.file}: {architecture}.attention.head_count must be at least 1, not {heads}")
        return ModelConfig(
            model_type=architecture,
            vocab_size=self.shapes.get("model.embed_tokens.weight", (0,))[0],
            hidden_size=hidden,
            num_layers=self._take(f"{architecture}.block_count", int),
            num_heads=heads,
            num_kv_heads=self._take(f"{architecture}.attention.head_count_kv", int, default=heads),
            head_dim=self._take(f"{architecture}.attention.key_length", int, default=hidden // heads),
            intermediate_size=self._take(f"{architecture}.feed_forward_length", int),
            max_position_embeddings=self._take(f"{architecture}.context_length", int),
            rope_theta=self._take(f"{architecture}.rope.freq_base", float, default=10_000.0),
            # Stored as float32: 1e-5 comes back as 9.99999975e-06.
            rms_norm_eps=float(f"{self._take(f'{architecture}.attention.layer_norm_rms_epsilon', float):.6g}"),
            tie_word_embeddings="lm_head.weight" not in self._tensors,
            attention_bias=architecture == "qwen2",
            bos_token_id=self._optional("tokenizer.ggml.bos_token_id"),
            eos_token_ids=self._eos_token_ids(),
        )

    def read(self, name: str) -> np.ndarray:
        """float32, see `TensorSource`."""
        tensor = self._tensors[name]
        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise ModelError(f"{self.file}: {name} is quantised as {tensor.tensor_type.name}: {error}") from error
        values = values.astype(np.float32, copy=False).reshape(self.shapes[name])
        if self._architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = self.config.num_heads if name.endswith("q_proj.weight") else self.config.num_kv_heads
            return _uninterleave(values, heads)
        return values

    def sha256(self) -> str:
        """Hex digest of the file."""
        return sha256_of(self.file)

    def tokenizer_files(self) -> TokenizerFiles:
        """The tokenizer and its settings. Raises ModelError for a kind that is not known for sure."""
        metadata = {name: field.contents() for name, field in self._reader.fields.items() if "tokenizer." in name}
        return build_tokenizer(metadata)

    def _huggingface_name(self, name: str) -> str:
        stem, _, kind = name.rpartition(".")
        in_layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
        if stem in _TOP:
            return f"{_TOP[stem]}.{kind}"
        if in_layer and in_layer[2] in _IN_LAYER:
            return f"model.layers.{in_layer[1]}.{_IN_LAYER[in_layer[2]]}.{kind}"
        if stem == "rope_freqs":
            raise ModelError(f"{self.file}: scaled rotary frequencies ({name}) are read from Hugging Face folders only")
        raise ModelError(f"{self.file}: tensor {name} has no place in a {self._architecture} model")

    def _refuse_unsupported(self) -> None:
        architecture = self._architecture
        scaling = self._optional(f"{architecture}.rope.scaling.type")
        if scaling not in (None, "none"):
            raise ModelError(f"{self.file}: rope scaling of type {scaling!r} is not supported in a GGUF file")
        for key in ("rope.scaling.factor", "rope.scale_linear"):
            if self._optional(f"{architecture}.{key}") not in (None, 1.0):
                raise ModelError(f"{self.file}: {architecture}.{key} is not supported (only 1.0 is)")
        if self._optional(f"{architecture}.attention.sliding_window"):
            raise ModelError(f"{self.file}: {architecture}.attention.sliding_window is not supported")
        head_dim = self._optional(f"{architecture}.attention.key_length")
        turned = self._optional(f"{architecture}.rope.dimension_count")
        if head_dim is not None and turned is not None and head_dim != turned:
            raise ModelError(f"{self.file}: rope over {turned} of {head_dim} dimensions is not supported")

    def _eos_token_ids(self) -> tuple[int, ...]:
        ids = [self._optional(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
        return tuple(dict.fromkeys(id for id in ids if id is not None))

    def _optional(self, key: str) -> Any:
        field = self._reader.fields.get(key)
        return None if field is None else field.contents()

    def _take(self, key: str, wanted: type, *, default: Any = None) -> Any:
        value = self._optional(key)
        value = default if value is None else value
        if value is None:
            raise ModelError(f"{self.file}: the metadata has no {key}")
        if type(value) is not wanted:
            raise ModelError(f"{self.file}: {key} must be a {wanted.__name__}, not {value!r}")
        return value


def _uninterleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undo the order that GGUF gives llama's query and key rows: pairs that turn together lie side by side there."""
    head_dim = weight.shape[0] // heads
    pairs = weight.reshape(heads, head_dim // 2, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)
