"""ModelConfig: the numbers that define a model, read from and written to Hugging Face's ``config.json`` form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pdjax.layers.rope_frequencies import Llama3RopeScaling
from pdjax.models.errors import ModelError

# Keys that change what a model computes, and the values under which they change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": (None, "silu"),
    "mlp_bias": (None, False),
    "partial_rotary_factor": (None, 1.0),
    "pretraining_tp": (None, 1),
    "quantization_config": (None,),
    "use_sliding_window": (None, False),
}
_ATTENTION_BIAS = {"llama": False, "qwen2": True}  # query, key and value biases; qwen2's config does not say so
_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "intermediate_size",
    "max_position_embeddings",
)


@dataclass(frozen=True)
class ModelConfig:
    """A decoder of the Llama family. `attention_bias` is Qwen2's: biases on query, key and value only."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int
    rope_theta: float = 10_000.0
    rope_scaling: Llama3RopeScaling | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in _SIZES:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ModelError(f"model config: {name} must be a whole number of at least 1, not {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"model config: num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise ModelError(f"model config: head_dim must be even for rotary embeddings, not {self.head_dim}")
        if self.rope_theta <= 0 or self.rms_norm_eps <= 0:
            raise ModelError("model config: rope_theta and rms_norm_eps must be above 0")
        ids = (*self.eos_token_ids, *(() if self.bos_token_id is None else (self.bos_token_id,)))
        outside = [id for id in ids if not 0 <= id < self.vocab_size]
        if outside:
            raise ModelError(f"model config: token ids {outside} lie outside the vocabulary of {self.vocab_size}")

    @property
    def group_size(self) -> int:
        """Query heads a key-value head."""
        return self.num_heads // self.num_kv_heads

    @classmethod
    def from_huggingface(cls, values: Mapping[str, Any]) -> ModelConfig:
        """Read the contents of a ``config.json``.

        Raises:
            ModelError: a key is missing, has the wrong type, or asks for what is not implemented; it is named.
        """
        model_type = _take(values, "model_type", str)
        _refuse_unsupported(values, model_type)
        theta, scaling = _rope(values)
        hidden_size = _take(values, "hidden_size", int)
        num_heads = _take(values, "num_attention_heads", int)
        return cls(
            model_type=model_type,
            vocab_size=_take(values, "vocab_size", int),
            hidden_size=hidden_size,
            num_layers=_take(values, "num_hidden_layers", int),
            num_heads=num_heads,
            num_kv_heads=_take(values, "num_key_value_heads", int, default=num_heads),
            head_dim=_take(values, "head_dim", int, default=hidden_size // max(num_heads, 1)),
            intermediate_size=_take(values, "intermediate_size", int),
            max_position_embeddings=_take(values, "max_position_embeddings", int),
            rope_theta=theta,
            rope_scaling=scaling,
            rms_norm_eps=_take(values, "rms_norm_eps", float),
            tie_word_embeddings=_take(values, "tie_word_embeddings", bool, default=False),
            attention_bias=_ATTENTION_BIAS.get(model_type, False),
            bos_token_id=_first(values.get("bos_token_id")),
            eos_token_ids=_token_ids(values.get("eos_token_id")),
        )

    def to_huggingface(self) -> dict[str, Any]:
        """The contents of a ``config.json`` that `from_huggingface` reads back to an equal config."""
        rope: dict[str, Any] | None = None
        if self.rope_scaling is not None:
            rope = {"rope_type": "llama3"} | vars(self.rope_scaling)
        return {
            "model_type": self.model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": self.max_position_embeddings,
            "hidden_act": "silu",
            "rope_theta": self.rope_theta,
            "rope_scaling": rope,
            "rms_norm_eps": self.rms_norm_eps,
            "tie_word_embeddings": self.tie_word_embeddings,
            "attention_bias": self.attention_bias,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": list(self.eos_token_ids),
        }


def _take(values: Mapping[str, Any], key: str, wanted: type, *, default: Any = None) -> Any:
    value = values.get(key)
    if value is None:
        if default is None:
            raise ModelError(f"config.json has no {key!r}, which must be a {wanted.__name__}")
        return default
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not wanted:
        raise ModelError(f"config.json: {key} must be a {wanted.__name__}, not {value!r}")
    return value


def _refuse_unsupported(values: Mapping[str, Any], model_type: str) -> None:
    for key, neutral in _NEUTRAL.items():
        if values.get(key) not in neutral:
            raise ModelError(f"config.json: {key} = {values[key]!r} is not supported (only {neutral[-1]!r} is)")
    if values.get("sliding_window") is not None and values.get("use_sliding_window") is not False:
        raise ModelError(f"config.json: sliding_window = {values['sliding_window']!r} is not supported (only null is)")
    bias = _ATTENTION_BIAS.get(model_type, False)
    if values.get("attention_bias") not in (None, bias):
        raise ModelError(
            f"config.json: attention_bias = {values['attention_bias']!r} is not supported for model_type "
            f"{model_type!r} (only {bias} is)"
        )


def _rope(values: Mapping[str, Any]) -> tuple[float, Llama3RopeScaling | None]:
    """Theta and scaling; transformers 5 keeps both under ``rope_parameters``, earlier ones apart."""
    parameters = values.get("rope_parameters") or values.get("rope_scaling") or {}
    theta = _take({**values, **parameters}, "rope_theta", float, default=10_000.0)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ModelError(f"config.json: rope scaling of type {kind!r} is not supported (only 'llama3' is)")
    scaling = Llama3RopeScaling(
        factor=_take(parameters, "factor", float),
        low_freq_factor=_take(parameters, "low_freq_factor", float),
        high_freq_factor=_take(parameters, "high_freq_factor", float),
        original_max_position_embeddings=_take(parameters, "original_max_position_embeddings", int),
    )
    return theta, scaling


def _token_ids(value: Any) -> tuple[int, ...]:
    ids = () if value is None else tuple(value) if isinstance(value, list) else (value,)
    if not all(isinstance(id, int) and not isinstance(id, bool) for id in ids):
        raise ModelError(f"config.json: a token id must be a whole number, not {value!r}")
    return ids


def _first(value: Any) -> int | None:
    ids = _token_ids(value)
    return ids[0] if ids else None
