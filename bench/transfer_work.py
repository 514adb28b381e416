"""What `bench/transfer.py` moves: the KV pages of one request of 2,048 tokens, at random places on both sides.

32 layers, 8 KV heads of 128 elements, bfloat16: 256 MiB; or 2 of the 8 heads: 64 MiB.
"""

from __future__ import annotations

import ctypes
import random
from dataclasses import dataclass

import numpy as np
import xxhash

LAYERS, HEADS, HEAD_DIM, TOKENS, WORD = 32, 8, 128, 2048, 2
TOKEN_BYTES = HEADS * HEAD_DIM * WORD  # of K or V of one layer


@dataclass(frozen=True)
class Work:
    """`heads` of all 8 are sent, in pages of `page` tokens."""

    name: str
    page: int
    heads: int

    @property
    def nbytes(self) -> int:
        """Bytes of the request that are sent."""
        return LAYERS * 2 * TOKENS * self.heads * HEAD_DIM * WORD

    @property
    def pages(self) -> int:
        """Pages of the request."""
        return TOKENS // self.page

    @property
    def pool_pages(self) -> int:
        """Pages of a pool: half as many again, and the trash page."""
        return self.pages * 3 // 2 + 1

    def page_ids(self, side: str) -> list[int]:
        """Where the request's pages are on a side, in its order."""
        return random.Random(side).sample(range(1, self.pool_pages), self.pages)


WORKS = {work.name: work for work in (Work("page64", 64, 8), Work("page16", 16, 8), Work("heads", 64, 2))}


class TokenMajor:
    """A pool as users of NIXL and Mooncake have it: [layer, K|V, page, token, head, head_dim], a page contiguous."""

    def __init__(self, work: Work, address: int) -> None:
        self.work = work
        self.address = address
        self.page_bytes = work.page * TOKEN_BYTES
        self.nbytes = self.nbytes_of(work)
        self.memory = np.ctypeslib.as_array((ctypes.c_uint8 * self.nbytes).from_address(address))

    @staticmethod
    def nbytes_of(work: Work) -> int:
        """Of a whole pool."""
        return LAYERS * 2 * work.pool_pages * work.page * TOKEN_BYTES

    def fill(self, seed: int) -> None:
        """Something else on each side."""
        pattern = np.frombuffer(np.random.default_rng(seed).bytes((1 << 20) + 7), np.uint8)
        self.memory[:] = np.resize(pattern, self.nbytes)

    def pieces(self, side: str) -> np.ndarray:
        """Addresses of what is sent, in the request's order: whole pages, or for some heads a slice a token."""
        pages = np.arange(LAYERS * 2)[:, None] * self.work.pool_pages + np.array(self.work.page_ids(side))[None]
        pages = (self.address + pages * self.page_bytes).ravel()
        if self.work.heads == HEADS:
            return pages
        return (pages[:, None] + np.arange(self.work.page)[None] * TOKEN_BYTES).ravel()

    @property
    def piece_bytes(self) -> int:
        """Bytes of each piece."""
        return self.page_bytes if self.work.heads == HEADS else self.work.heads * HEAD_DIM * WORD

    def digest(self, side: str) -> str:
        """Of what is sent."""
        shape = (LAYERS * 2, self.work.pool_pages, self.work.page, HEADS, HEAD_DIM * WORD)
        sent = self.memory.reshape(shape)[:, self.work.page_ids(side), :, : self.work.heads]
        return xxhash.xxh3_64_hexdigest(sent.tobytes())
