"""A model folder's tokenizer: text to ids, ids to text."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

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
            return self._tokenizer.encode(text, add_special_tokens=special).ids
        encoding = await asyncio.to_thread(self._tokenizer.encode, text, add_special_tokens=special)
        return encoding.ids

    def decode(self, token_ids: Sequence[int], *, skip_special: bool) -> str:
        """Text of ids. Bytes that are no character become U+FFFD."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special)

    def token_text(self, token_id: int) -> str:
        """Text of one id by itself."""
        return self._tokenizer.decode([token_id], skip_special_tokens=False)


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
