"""A model folder's tokenizer: text to ids, ids to text."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers

from pdjax.server.detokenize import REPLACEMENT

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
THREAD_CHARACTERS = 8192  # longer texts are tokenised off the event loop: about 5 ms and more


class VocabularyError(Exception):
    """A model folder without a tokenizer that can be used; the sentence says what is wrong."""


class Vocabulary:
    """The tokenizer of a model folder."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, folder: Path) -> Vocabulary:
        """Read ``tokenizer.json``.

        Raises:
            VocabularyError: it is not there or not readable.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise VocabularyError(f"{path} does not exist; a model folder is made by `python -m pdjax.launch convert`")
        try:
            return cls(Tokenizer.from_file(str(path)))
        except Exception as error:
            raise VocabularyError(f"{path} can't be read: {error}") from error

    @property
    def size(self) -> int:
        """Number of ids, special tokens included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    async def encode(self, text: str, *, special: bool) -> list[int]:
        """Ids of a text. `special` adds what the model wants around a text, as a begin-of-text token."""
        if len(text) < THREAD_CHARACTERS:
            return self.encode_now(text, special=special)
        return await asyncio.to_thread(self.encode_now, text, special=special)

    def encode_now(self, text: str, *, special: bool = True) -> list[int]:
        """The same, for callers without an event loop."""
        return self._tokenizer.encode(text, add_special_tokens=special).ids

    def decode(self, token_ids: Sequence[int], *, skip_special: bool) -> str:
        """Text of ids. Bytes that are no character become U+FFFD."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special)

    def token_text(self, token_id: int) -> str:
        """Text of one id by itself."""
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> list[int] | None:
        """UTF-8 bytes of one id by itself, also of one that holds a part of a character only; None if unknown."""
        text = self.token_text(token_id)
        if REPLACEMENT not in text:
            return list(text.encode())
        written = self._tokenizer.id_to_token(token_id) or ""
        single = _BYTE_TOKEN.fullmatch(written)
        if single is not None:
            return [int(single[1], 16)]
        found = [_BYTES.get(letter) for letter in written]
        return None if None in found else [byte for byte in found if byte is not None]


def _byte_letters() -> dict[str, int]:
    """The byte that each letter of a byte-level tokenizer stands for: GPT-2's table."""
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    plain = {byte: chr(byte) for byte in range(256) if chr(byte) in alphabet and byte not in range(0x7F, 0xA1)}
    others = (byte for byte in range(256) if byte not in plain)
    return {letter: byte for byte, letter in plain.items()} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_letters()


def read_settings(folder: Path) -> dict[str, Any]:
    """``tokenizer_config.json`` of a model folder; empty if there is none.

    Raises:
        VocabularyError: it is not a JSON object.
    """
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise VocabularyError(f"{path} can't be read: {error}") from error
    if not isinstance(settings, dict):
        raise VocabularyError(f"{path} must hold a JSON object")
    return settings
