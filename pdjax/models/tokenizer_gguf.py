"""Builds a tokenizer from GGUF metadata: byte-level BPE of the kinds whose way to cut text is known for sure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from pdjax.models.errors import ModelError
from pdjax.models.tokenizer_text import TokenizerFiles

_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type


def _split_at(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _pre_tokenizer(kind: str) -> pre_tokenizers.PreTokenizer:
    match kind:
        case "smollm":
            digits = pre_tokenizers.Digits(individual_digits=True)
            return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
        case "qwen2":
            return _split_at(_QWEN2)
        case "llama-bpe":
            return _split_at(_LLAMA3)
    raise ModelError(
        f"the tokenizer's pre-tokenizer is {kind!r}; known from GGUF are smollm, qwen2 and llama-bpe. "
        "Convert from the Hugging Face folder instead, which brings its own tokenizer.json"
    )


def build_tokenizer(metadata: Mapping[str, Any]) -> TokenizerFiles:
    """A tokenizer from the ``tokenizer.*`` keys of a GGUF file.

    Raises:
        ModelError: a kind of tokenizer that is not known for sure, or keys that are missing or disagree.
    """
    model = metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise ModelError(f"the tokenizer is of kind {model!r}; from GGUF only 'gpt2' (byte-level BPE) is supported")
    tokens, merges = _strings(metadata, "tokens"), _strings(metadata, "merges")
    kinds = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(kinds) != len(tokens):
        raise ModelError(f"tokenizer.ggml.token_type has {len(kinds)} entries for {len(tokens)} tokens")

    pre = str(metadata.get("tokenizer.ggml.pre"))
    pairs = [_pair(merge) for merge in merges]
    # Llama 3 takes a piece that is a token as it is, before it tries merges.
    bpe = models.BPE(
        vocab={token: id for id, token in enumerate(tokens)},
        merges=pairs,
        ignore_merges=pre == "llama-bpe",
    )
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    settings = _settings(metadata, tokens, add_bos=pre == "llama-bpe")
    if settings["add_bos_token"]:
        tokenizer.post_processor = _bos_first(settings.get("bos_token"), bpe)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    for wanted, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [AddedToken(t, special=special, normalized=False) for t, kind in zip(tokens, kinds) if kind == wanted]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
    return TokenizerFiles(tokenizer.to_str(), settings)


def _bos_first(bos: str | None, bpe: models.BPE) -> processors.PostProcessor:
    if bos is None:
        raise ModelError("the tokenizer begins every text with a bos token, but names none (bos_token_id)")
    id = bpe.token_to_id(bos)
    return processors.TemplateProcessing(single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, id)])


def _settings(metadata: Mapping[str, Any], tokens: list[str], *, add_bos: bool) -> dict[str, Any]:
    """`add_bos` is what the kind of tokenizer does where the metadata does not say."""
    settings: dict[str, Any] = {"add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token", add_bos))}
    for name in ("bos", "eos"):
        id = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if id is not None:
            if not 0 <= id < len(tokens):
                raise ModelError(f"tokenizer.ggml.{name}_token_id is {id}, outside the vocabulary of {len(tokens)}")
            settings[f"{name}_token"] = tokens[id]
    template = metadata.get("tokenizer.chat_template")
    if template is not None:
        settings["chat_template"] = str(template)
    return settings


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    values = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ModelError(f"tokenizer.ggml.{key} must be a list of strings")
    return values


def _pair(merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not space:
        raise ModelError(f"tokenizer.ggml.merges: {merge!r} is not a pair")
    return left, right
