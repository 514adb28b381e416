"""StateSpec: the shape of what a request needs to go on decoding, and how many bytes that is.

No jax here: the room protocol and the layout arithmetic describe states with this.
"""

from __future__ import annotations

import msgspec

_WORD_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class StateSpec(msgspec.Struct, frozen=True, cache_hash=True):
    """A paged key-value state: pool axes [layer, page, head, K|V, slot in page, head_dim].

    `dtype` is the type of the values; 2-byte types are stored as uint16 words (see `word_dtype`).

    Raises:
        ValueError: an unknown dtype, a negative window, or a latent state of several heads.
    """

    name: str
    layers: int
    heads: int  # key-value heads
    head_dim: int
    page_size: int  # tokens a page
    dtype: str
    window: int = 0  # a token sees itself and the window - 1 tokens before it; 0: all of them
    latent: bool = False  # one vector a token for all query heads (MLA): no head axis to cut, no K and V apart

    def __post_init__(self) -> None:
        if self.dtype not in _WORD_BYTES:
            raise ValueError(f"state {self.name!r}: dtype {self.dtype!r} is none of {sorted(_WORD_BYTES)}")
        if self.window < 0:
            raise ValueError(f"state {self.name!r}: a window of {self.window} tokens; expected 0 (none) or more")
        if self.latent and self.heads != 1:
            raise ValueError(f"state {self.name!r}: a latent state has 1 head, not {self.heads}")

    @property
    def word_bytes(self) -> int:
        """Bytes of one stored value."""
        return _WORD_BYTES[self.dtype]

    @property
    def word_dtype(self) -> str:
        """The dtype that the pool is stored in.

        XLA on CPU turns an update of a bfloat16 array into a float32 copy of all of it (24 ms against 0.02 ms for a
        33 MB pool), so 2-byte values are held as uint16 and bitcast after gathering.
        """
        return "uint16" if self.word_bytes == 2 else self.dtype

    @property
    def planes(self) -> int:
        """Vectors a token has in each layer and head: K and V, or one latent."""
        return 1 if self.latent else 2

    @property
    def run_words(self) -> int:
        """Words of one (layer, page, head): K and V of a page, contiguous in pool and staging alike."""
        return self.planes * self.page_size * self.head_dim

    @property
    def page_words(self) -> int:
        """Words of one page over all layers and heads."""
        return self.layers * self.heads * self.run_words

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers and heads."""
        return self.page_words * self.word_bytes

    def pages(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens."""
        return -(-tokens // self.page_size)

    def first_page(self, tokens: int) -> int:
        """The first page that the token after `tokens` others can still see; those before it need not move."""
        return max(0, tokens - self.window + 1) // self.page_size if self.window else 0
