"""What a decode instance has of a prompt is not sent to it again."""

from __future__ import annotations

import numpy as np
import pytest
from close_pair import ClosePair
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_engine import PAGE, SmallEngine

from pdjax.disagg.protocol import messages

TIGHT = 25


def text(seed: int, tokens: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, tokens).tolist()


def alone(models, ids: list[int], tokens: int) -> list[int]:
    """What a unified instance with nothing in its cache says."""
    small = SmallEngine(models.prefill, prefix_cache=False)
    small.send("r", ids, tokens)
    small.run()
    return small.ids("r")


def moved(pair: ClosePair, rid: str, ids: list[int], tokens: int = 8, **more) -> int:
    """Serve a request; returns how many pages came for it."""
    before = pair.stats()["received_pages_total"]
    pair.send(rid, ids, tokens, **more)
    pair.run()
    return int(pair.stats()["received_pages_total"] - before)


@pytest.mark.parametrize("length", [3, 4, 15, 16, 17, 90])
def test_a_second_turn_moves_only_what_is_new(models, length: int) -> None:
    pair = models.pair()
    first = text(length, length)
    assert moved(pair, "first", first, 10) == -(-length // PAGE)
    longer = first + pair.ids("first") + text(1, 7)
    known = (length + 9) // PAGE  # the last output token was never computed on
    assert moved(pair, "second", longer) == -(-len(longer) // PAGE) - known
    assert pair.ids("second") == alone(models, longer, 8)
    timeline = pair.frames("second")[-1].timeline
    assert timeline is not None and timeline["reused_tokens"] == known * PAGE
    # The prefill side has not seen the answer: of the prompt, it had what it computed.
    assert pair.frames("second")[-1].cached_tokens == length // PAGE * PAGE


@pytest.mark.parametrize("length", [31, 32, 33])
def test_a_prompt_that_is_there_whole_needs_no_more_than_its_last_page(models, length: int) -> None:
    pair = models.pair()
    ids = text(2, length)
    assert moved(pair, "first", ids) == -(-length // PAGE)
    assert moved(pair, "again", ids) == (0 if length % PAGE == 0 else 1)
    assert pair.ids("first") == pair.ids("again") == alone(models, ids, 8)


def test_requests_that_decode_share_the_pages_of_their_prompt(models) -> None:
    pair = models.pair()
    ids = text(3, 40)
    pair.send("first", ids, 60)
    while len(pair.ids("first")) < 3:
        pair.turn()
    free = pair.stats()["free_pages"]
    pair.send("second", [*ids, 5], 20)
    while not pair.ids("second"):
        pair.turn()
    assert free - pair.stats()["free_pages"] <= 3
    pair.run()
    assert pair.ids("first") == alone(models, ids, 60) and pair.ids("second") == alone(models, [*ids, 5], 20)


def test_pages_that_nobody_uses_make_way_oldest_first(models) -> None:
    pair = models.pair(pages=TIGHT)
    for number in range(3):
        moved(pair, f"old{number}", text(number, 32), 1)
    assert moved(pair, "old0 again", text(0, 32), 1) == 0
    assert moved(pair, "new", text(9, 32), 1) == 8
    assert moved(pair, "used of late", text(0, 32), 1) == 0
    assert pair.stats()["cache_evicted_pages_total"] > 0
    assert moved(pair, "longest unused", text(1, 32), 1) > 0


def test_flushing_empties_both_sides(models) -> None:
    pair = models.pair()
    moved(pair, "first", text(4, 32))
    assert all(flushed.freed_pages >= 8 and flushed.locked_pages == 0 for flushed in pair.flush())
    assert moved(pair, "again", text(4, 32)) == 8


def test_with_the_cache_off_and_under_prefill_complete_all_is_sent(models) -> None:
    for options in ({"prefix_cache": False}, {"allocation": messages.PREFILL_COMPLETE}):
        pair = models.pair(**options)
        assert [moved(pair, str(number), text(5, 32)) for number in range(2)] == [8, 8]


def test_a_prompts_log_probabilities_come_though_its_pages_are_there(models) -> None:
    pair = models.pair()
    ids = text(6, 30)
    moved(pair, "first", ids)
    assert moved(pair, "again", ids, prompt_logprobs=True) == 1
    told = pair.frames("again")[0].prompt_logprobs
    assert len(told) == len(ids) and told[0] is None and all(each is not None for each in told[1:])


def test_an_abort_in_the_middle_of_a_transfer_leaves_others_pages_alone(models) -> None:
    pair = models.pair()
    ids = text(7, 60)
    moved(pair, "first", ids)
    pair.send("gone", ids + text(8, 80), 8)
    while not pair.decode.engine.requests or not pair.decode.engine.requests["gone"].pages:
        pair.turn()
    pair.turn()
    pair.abort("gone")
    pair.run()
    assert moved(pair, "again", ids) == 0 and pair.ids("again") == alone(models, ids, 8)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    asks=st.lists(
        st.tuples(st.integers(0, 1), st.integers(1, 50), st.integers(1, 24), st.booleans()), min_size=1, max_size=12
    ),
    lengths=st.sampled_from([(), (2,) * 10]),
)
def test_whatever_is_shared_evicted_or_aborted_the_tokens_are_right(models, asks, lengths) -> None:
    """Prompts of two texts through a pool that holds a few of them, some given up on the way."""
    pair = models.pair(pages=TIGHT)
    for length in lengths:
        pair.decode.engine.lengths.add(length)
    wanted = {}
    for number, (seed, length, tokens, leaves) in enumerate(asks):
        ids = text(seed, 50)[:length]
        pair.send(str(number), ids, tokens)
        for _ in range(number % 3):
            pair.turn()
        if leaves:
            pair.abort(str(number))
        else:
            wanted[str(number)] = (ids, tokens)
    pair.run()
    for rid, (ids, tokens) in wanted.items():
        assert pair.ids(rid) == alone(models, ids, tokens)
