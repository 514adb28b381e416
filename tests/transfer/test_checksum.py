"""The checksum that a device makes: the same as by hand, and another for whatever may go wrong on the way."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdjax.transfer.checksum import as_number, mixed_sum

WORDS = 50
MASK = (1 << 32) - 1
compiled = jax.jit(mixed_sum)


def sum_of(words: np.ndarray, first: int, count: int) -> int:
    return as_number(compiled(jnp.asarray(words), np.uint32(first), np.uint32(count)))


def mix(word: int) -> int:
    word = (word ^ word >> 16) * 0x85EBCA6B & MASK
    word = (word ^ word >> 13) * 0xC2B2AE35 & MASK
    return word ^ word >> 16


def by_hand(words: list[int]) -> int:
    high, low = (
        sum(mix(word ^ mix(place + seed & MASK)) for place, word in enumerate(words)) & MASK
        for seed in (0x9E3779B9, 0x7F4A7C15)
    )
    return high << 32 | low


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.float32])
def test_it_is_what_it_is_said_to_be_for_words_of_any_kind(dtype: type) -> None:
    words = np.random.default_rng(1).integers(0, 250, WORDS).astype(dtype)
    bits = words.view(f"uint{8 * words.itemsize}").tolist()
    for first, count in ((0, WORDS), (0, 1), (7, 20), (WORDS - 1, 1)):
        assert sum_of(words, first, count) == by_hand(bits[first : first + count])


@given(st.data())
def test_another_word_place_or_length_makes_another_sum(data: st.DataObject) -> None:
    words = np.array(data.draw(st.lists(st.integers(0, 65535), min_size=WORDS, max_size=WORDS)), np.uint16)
    first = data.draw(st.integers(0, WORDS - 2))
    count = data.draw(st.integers(2, WORDS - first))
    sent = sum_of(words, first, count)
    one, other = data.draw(st.tuples(*2 * [st.integers(first, first + count - 1)]))
    damaged, swapped = words.copy(), words.copy()
    damaged[one] ^= data.draw(st.integers(1, 65535))
    swapped[[one, other]] = words[[other, one]]
    assert sum_of(damaged, first, count) != sent
    assert (sum_of(swapped, first, count) == sent) == (words[one] == words[other])
    assert sum_of(words, first, count - 1) != sent
    outside = words.copy()
    outside[:first] += 1
    outside[first + count :] += 1
    assert sum_of(outside, first, count) == sent
