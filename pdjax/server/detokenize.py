"""Token ids to text, a few at a time, such that the pieces add up to the text of the whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"


class Detokenizer:
    """Holds back what the next token may still change: bytes of a character that is not complete.

    Only a window of tokens is decoded each time. It starts at the last place but one where the text was complete, since
    some decoders treat the first token of a text in their own way.

    Args:
        decode: token ids to text; incomplete characters at the end become U+FFFD.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._context = 0  # tokens of the window whose text is out
        self._sent = 0  # characters of the window's text that are out

    def add(self, token_ids: Sequence[int]) -> str:
        """Take tokens; returns the text that is certain now."""
        if not token_ids:
            return ""
        self._window += token_ids
        text = self._decode(self._window)
        certain = text.rstrip(REPLACEMENT)
        piece = certain[self._sent :]
        self._sent = max(self._sent, len(certain))
        if piece and len(certain) == len(text):
            self._window = self._window[self._context :]
            self._context = len(self._window)
            self._sent = len(self._decode(self._window))
        return piece

    def finish(self) -> str:
        """The text that was held back."""
        text = self._decode(self._window)[self._sent :]
        self._window, self._context, self._sent = [], 0, 0
        return text
