"""A shared beginning is computed once, and whoever hits the cache gets the tokens of one who does not."""

from __future__ import annotations

import numpy as np
import pytest
from small_engine import PAGE, SmallEngine, TinyModel

TEXT = np.random.default_rng(2).integers(0, 256, 400).tolist()


def computed(small: SmallEngine) -> float:
    return small.engine.stats()["prompt_tokens_computed_total"]


def alone(tiny: TinyModel, ids: list[int], tokens: int) -> list[int]:
    """The output without a cache. It uses the same pool: the engine that it is compared with must be done by then."""
    small = SmallEngine(tiny, prefix_cache=False)
    small.send("alone", ids, tokens)
    small.run()
    return small.ids("alone")


def test_eight_requests_that_come_together_compute_their_shared_prefix_once(tiny: TinyModel) -> None:
    small = SmallEngine(tiny)
    prompts = [TEXT[:100] + [number] * 6 for number in range(8)]
    for number, ids in enumerate(prompts):
        small.send(str(number), ids, 5)
    small.run()
    assert computed(small) == 106 + 7 * 6
    stats = small.engine.stats()
    assert stats["cached_tokens_total"] == 7 * 100 and stats["cache_hit_requests_total"] == 7
    assert [small.frames(str(number))[0].cached_tokens for number in range(8)] == [0] + [100] * 7
    assert [small.frames(str(number))[-1].cached_tokens for number in range(8)] == [0] + [100] * 7
    assert [small.ids(str(number)) for number in range(8)] == [alone(tiny, ids, 5) for ids in prompts]


def test_a_conversation_finds_its_prompts_and_its_answers(tiny: TinyModel) -> None:
    small = SmallEngine(tiny)
    history, last = TEXT[:30], 0
    histories = []
    for turn in range(4):
        histories.append(history)
        before = computed(small)
        small.send(str(turn), history, 10)
        small.run()
        assert computed(small) - before == len(history) - last
        # The last token was never computed on.
        last = (len(history) + 10 - 1) // PAGE * PAGE
        history = history + small.ids(str(turn)) + TEXT[100 * turn : 100 * turn + 7]
    for turn, history in enumerate(histories):
        assert small.ids(str(turn)) == alone(tiny, history, 10)


@pytest.mark.parametrize("length", [1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE, 50])
def test_the_same_prompt_again_computes_its_last_page_only(tiny: TinyModel, length: int) -> None:
    small = SmallEngine(tiny)
    small.send("first", TEXT[:length], 6)
    small.run()
    before = computed(small)
    small.send("second", TEXT[:length], 6)
    small.run()
    assert computed(small) - before == length - (length - 1) // PAGE * PAGE >= 1
    assert small.ids("second") == small.ids("first")


def test_a_prompt_that_wants_its_log_probabilities_is_computed_whole(tiny: TinyModel) -> None:
    small = SmallEngine(tiny)
    small.send("first", TEXT[:40], 2)
    small.run()
    small.send("second", TEXT[:40], 2, prompt_logprobs=True)
    small.run()
    assert computed(small) == 80 and small.engine.stats()["cached_tokens_total"] == 0


def test_flush_empties_the_cache_but_for_what_is_in_use(tiny: TinyModel) -> None:
    small = SmallEngine(tiny)
    small.send("ended", TEXT[:40], 2)
    small.run()
    small.send("running", TEXT[:20] + [7] * 4, 40)
    for _ in range(3):
        small.turn()
    flushed = small.flush()
    assert (flushed.id, flushed.freed_pages, flushed.locked_pages) == (7, 5, 5)
    small.run()
    assert small.flush().locked_pages == 0 and small.engine.prefix.allocators[0].free_pages == 256
    before = computed(small)
    small.send("again", TEXT[:40], 2)
    small.run()
    assert computed(small) - before == 40
    assert small.ids("running") == alone(tiny, TEXT[:20] + [7] * 4, 40)


def test_more_texts_than_the_pool_holds_push_out_the_oldest(tiny: TinyModel) -> None:
    small = SmallEngine(tiny, pages=25)
    for number in range(12):
        small.send(str(number), [number] * 40, 4)
        small.run()
    stats = small.engine.stats()
    assert stats["cache_evicted_pages_total"] > 0 and stats["free_pages"] == stats["pages"] == 24
    before = computed(small)
    small.send("newest", [11] * 40, 4)
    small.run()
    small.send("oldest", [0] * 40, 4)
    small.run()
    assert computed(small) - before == 4 + 40


def test_an_aborted_request_leaves_what_it_has_computed(tiny: TinyModel) -> None:
    small = SmallEngine(tiny)
    small.send("a", TEXT[:100], 5)
    for _ in range(3):
        small.turn()
    small.abort("a")
    small.run()
    begun = computed(small)
    assert begun % tiny.prefill_tokens == 0 and 0 < begun < 100
    small.send("b", TEXT[:100], 5)
    small.run()
    assert computed(small) == 100
    assert small.ids("b") == alone(tiny, TEXT[:100], 5)


def test_without_the_cache_everything_is_computed(tiny: TinyModel) -> None:
    small = SmallEngine(tiny, prefix_cache=False)
    for number in range(3):
        small.send(str(number), TEXT[:50], 2)
    small.run()
    assert computed(small) == 150 and small.engine.stats()["cache_pages"] == 0
