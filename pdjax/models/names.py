"""The one mapping from Hugging Face tensor names to our parameters, fusing included. NumPy only.

Every reader of weights yields tensors under Hugging Face's names and shapes; `assemble` makes parameters of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pdjax.models.config import ModelConfig
from pdjax.models.errors import ModelError


class TensorSource(Protocol):
    """Weights under Hugging Face's names."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor's shape by name."""
        ...

    def read(self, name: str) -> np.ndarray:
        """One tensor's values, float32, float16 or bfloat16."""
        ...


@dataclass(frozen=True)
class ParameterSource:
    """Which tensors make one parameter. `fuse` gets them in the order of `tensors`."""

    tensors: dict[str, tuple[int, ...]]
    fuse: Callable[[list[np.ndarray]], np.ndarray]


def parameter_sources(config: ModelConfig) -> dict[str, ParameterSource]:
    """Every parameter's dotted path, as in `pdjax.layers.sharding.named_parameters`, and what it is made of."""
    vocab, hidden, mlp = config.vocab_size, config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def fuse_qkv(parts: list[np.ndarray]) -> np.ndarray:
        """q [heads * head_dim, ...], k and v [kv_heads * head_dim, ...] -> [kv_heads, group + 2, head_dim, ...]."""
        split = [part.reshape(config.num_kv_heads, -1, config.head_dim, *part.shape[1:]) for part in parts]
        return np.concatenate(split, axis=1)

    sources = {
        "embed.weight": _alone("model.embed_tokens.weight", vocab, hidden),
        "norm.weight": _alone("model.norm.weight", hidden),
    }
    if not config.tie_word_embeddings:
        sources["head.weight"] = _alone("lm_head.weight", vocab, hidden)
    for index in range(config.num_layers):
        ours, theirs = f"layers.{index}", f"model.layers.{index}"
        attention = f"{theirs}.self_attn"
        rows = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        sources |= {
            f"{ours}.attention_norm.weight": _alone(f"{theirs}.input_layernorm.weight", hidden),
            f"{ours}.mlp_norm.weight": _alone(f"{theirs}.post_attention_layernorm.weight", hidden),
            f"{ours}.attention.qkv.weight": ParameterSource(
                {f"{attention}.{part}.weight": (size, hidden) for part, size in rows.items()}, fuse_qkv
            ),
            f"{ours}.attention.out.weight": _alone(f"{attention}.o_proj.weight", hidden, queries),
            f"{ours}.mlp.gate_up.weight": ParameterSource(
                {f"{theirs}.mlp.{part}_proj.weight": (mlp, hidden) for part in ("gate", "up")}, _interleave
            ),
            f"{ours}.mlp.down.weight": _alone(f"{theirs}.mlp.down_proj.weight", hidden, mlp),
        }
        if config.attention_bias:
            sources[f"{ours}.attention.qkv.bias"] = ParameterSource(
                {f"{attention}.{part}.bias": (size,) for part, size in rows.items()}, fuse_qkv
            )
    return sources


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every Hugging Face tensor that the model is made of, and its shape."""
    return {name: shape for source in parameter_sources(config).values() for name, shape in source.tensors.items()}


def check_tensors(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse weights that are not exactly the model's.

    Raises:
        ModelError: tensors are missing, unexpected, or of the wrong shape; they are named.
    """
    expected = expected_tensors(config)
    missing = [name for name in expected if name not in shapes]
    if missing:
        raise ModelError(f"{len(missing)} tensors of a {config.model_type} model are missing: {_some(missing)}")
    unexpected = [name for name in shapes if name not in expected and not _redundant(name, config)]
    if unexpected:
        raise ModelError(
            f"{len(unexpected)} tensors have no place in a {config.model_type} model of {config.num_layers} layers: "
            f"{_some(unexpected)}"
        )
    for name, shape in expected.items():
        if tuple(shapes[name]) != shape:
            raise ModelError(f"tensor {name} has shape {tuple(shapes[name])}, config.json asks for {shape}")


def assemble(config: ModelConfig, source: TensorSource) -> Iterator[tuple[str, np.ndarray]]:
    """Every parameter by dotted path, read and fused one at a time. Raises as `check_tensors`."""
    check_tensors(config, source.shapes)
    for name, parameter in parameter_sources(config).items():
        yield name, parameter.fuse([source.read(tensor) for tensor in parameter.tensors])


def _alone(name: str, *shape: int) -> ParameterSource:
    return ParameterSource({name: shape}, lambda parts: parts[0])


def _interleave(parts: list[np.ndarray]) -> np.ndarray:
    """gate and up [mlp, hidden] -> [mlp, 2, hidden]."""
    return np.stack(parts, axis=1)


def _redundant(name: str, config: ModelConfig) -> bool:
    """Tensors that some files carry and that say nothing new."""
    return name.endswith(".rotary_emb.inv_freq") or (config.tie_word_embeddings and name == "lm_head.weight")


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
