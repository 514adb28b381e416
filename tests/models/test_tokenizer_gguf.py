from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, pre_tokenizers

from pdjax.models.errors import ModelError
from pdjax.models.tokenizer_gguf import build_tokenizer


def metadata(pre: str, **changes: Any) -> dict[str, Any]:
    """Bytes, one merge, a control token and a user's token."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "<|end|>", "<tool>"]
    keys = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "merges": ["a b"],
        "token_type": [1] * (len(tokens) - 2) + [3, 4],
        "eos_token_id": len(tokens) - 2,
    } | changes
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()} | {"tokenizer.chat_template": "{{ x }}"}


@pytest.mark.parametrize("pre", ["smollm", "qwen2"])
@pytest.mark.parametrize(
    "text", ["ab ba", "naïve 12345 — 東京\r\n\t x", "  spaces   and\n\n\nlines  ", "🙂🙃 it's WE'LL"]
)
def test_text_comes_back_as_it_went_in(pre: str, text: str):
    tokenizer = Tokenizer.from_str(build_tokenizer(metadata(pre)).tokenizer)
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_added_tokens_are_never_cut_and_only_control_tokens_are_special():
    tokenizer = Tokenizer.from_str(build_tokenizer(metadata("smollm")).tokenizer)
    ids = tokenizer.encode("ab<|end|><tool>").ids
    assert ids == [256, 257, 258]
    assert tokenizer.decode(ids) == "ab<tool>"


@pytest.mark.parametrize(("pre", "pieces"), [("qwen2", 5), ("llama-bpe", 2), ("smollm", 5)])
def test_digits_are_cut_as_each_kind_cuts_them(pre: str, pieces: int):
    tokenizer = Tokenizer.from_str(build_tokenizer(metadata(pre, add_bos_token=False)).tokenizer)
    assert len(tokenizer.pre_tokenizer.pre_tokenize_str("12345")) == pieces


def test_llama_3_begins_texts_with_bos_unless_told_otherwise():
    files = build_tokenizer(metadata("llama-bpe", bos_token_id=257))
    assert files.settings["add_bos_token"] and files.settings["bos_token"] == "<|end|>"
    assert Tokenizer.from_str(files.tokenizer).encode("ab").ids == [257, 256]


def test_settings_name_the_tokens_and_the_template():
    settings = build_tokenizer(metadata("qwen2")).settings
    assert settings == {"add_bos_token": False, "eos_token": "<|end|>", "chat_template": "{{ x }}"}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"pre": "deepseek-llm"}, "deepseek-llm"),
        ({"model": "llama"}, "'llama'"),
        ({"merges": None}, "merges"),
        ({"merges": ["ab"]}, "'ab' is not a pair"),
        ({"token_type": [1]}, "token_type"),
        ({"eos_token_id": 9999}, "9999"),
    ],
)
def test_a_tokenizer_that_is_not_known_for_sure_is_refused(changes: dict[str, Any], named: str):
    with pytest.raises(ModelError, match=named):
        build_tokenizer(metadata("qwen2") | {f"tokenizer.ggml.{key}": value for key, value in changes.items()})
