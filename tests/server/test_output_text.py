"""Tokens become the right text however they are cut, and no piece of a stop string slips out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_leader import byte_tokenizer
from tokenizers import Tokenizer, decoders, models

from pdjax.server.detokenize import Detokenizer
from pdjax.server.stop import StopFinder

TOKENIZER = byte_tokenizer()
SPECIAL = [TOKENIZER.token_to_id("<|im_start|>"), TOKENIZER.token_to_id("<|im_end|>")]


def pieces(tokenizer: Tokenizer, ids: list[int], sizes: list[int], *, skip: bool = True) -> list[str]:
    """The text of ids that come a few at a time; sizes are used in turn."""
    detokenizer = Detokenizer(lambda some: tokenizer.decode(list(some), skip_special_tokens=skip))
    texts, start, turn = [], 0, 0
    while start < len(ids):
        end = start + sizes[turn % len(sizes)]
        texts.append(detokenizer.add(ids[start:end]))
        start, turn = end, turn + 1
    return [*texts, detokenizer.finish()]


SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=5)


@given(st.text(), SIZES)
def test_any_text_comes_out_as_it_went_in(text, sizes):
    assert "".join(pieces(TOKENIZER, TOKENIZER.encode(text).ids, sizes)) == text


@given(st.lists(st.integers(0, TOKENIZER.get_vocab_size() - 1), max_size=60), SIZES, st.booleans())
def test_any_tokens_give_the_text_of_the_whole(ids, sizes, skip):
    assert "".join(pieces(TOKENIZER, ids, sizes, skip=skip)) == TOKENIZER.decode(ids, skip_special_tokens=skip)


@given(st.text(), SIZES)
def test_no_piece_holds_a_part_of_a_character(text, sizes):
    if "\ufffd" not in text:
        assert all("\ufffd" not in piece for piece in pieces(TOKENIZER, TOKENIZER.encode(text).ids, sizes))


def test_text_is_shown_as_soon_as_it_is_complete():
    ids = TOKENIZER.encode("a€b").ids
    assert pieces(TOKENIZER, ids, [1]) == ["a", "", "", "€", "b", ""]


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens_are_shown_only_if_asked_for(skip):
    ids = [*TOKENIZER.encode("a").ids, SPECIAL[0], *TOKENIZER.encode("b").ids, SPECIAL[1]]
    assert "".join(pieces(TOKENIZER, ids, [1], skip=skip)) == ("ab" if skip else "a<|im_start|>b<|im_end|>")


@given(st.text(alphabet="ab €é\n", max_size=30), SIZES)
def test_sentencepiece_tokenizers_keep_their_spaces(text, sizes):
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁": 256, "a": 257, "b": 258, "▁a": 259}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("▁", "a")], byte_fallback=True, fuse_unk=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    ids = tokenizer.encode("▁" + text.replace(" ", "▁")).ids
    assert "".join(pieces(tokenizer, ids, sizes)) == tokenizer.decode(ids)


LETTERS = st.text(alphabet="abc", max_size=20)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=4)


def by_hand(text: str, stops: list[str], *, keep: bool) -> tuple[str, str | None]:
    """The shortest start of the text that ends in a stop string, letter by letter."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if keep else end - len(stop)], stop
    return text, None


@given(LETTERS, STOPS, SIZES, st.booleans())
def test_the_first_stop_string_ends_the_text_however_it_is_cut(text, stops, sizes, keep):
    finder, shown, start, turn = StopFinder(stops, keep=keep), "", 0, 0
    while start < len(text):
        end = start + sizes[turn % len(sizes)]
        shown += finder.add(text[start:end])
        start, turn = end, turn + 1
        assert by_hand(text, stops, keep=keep)[0].startswith(shown)
    shown += finder.finish()
    assert (shown, finder.matched) == by_hand(text, stops, keep=keep)


def test_text_that_can_start_no_stop_string_is_not_held_back():
    finder = StopFinder(["END"], keep=False)
    assert [finder.add(text) for text in ("a", "bE", "N", "x")] == ["a", "b", "", "ENx"]
