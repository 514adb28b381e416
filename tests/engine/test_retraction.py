"""Memory pressure costs time, never an answer: whoever has to leave the pool goes on later, with the same tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_engine import PAGE, SmallEngine, TinyModel

from pdjax.engine.host_pages import BLOCK_PAGES, HostPages
from pdjax.wire import Failed, Tokens

ROOMY, TIGHT = 257, 25


def prompts(seed: int, count: int, longest: int = 40) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(0, 256, random.integers(1, longest)).tolist() for _ in range(count)]


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize(("temperature", "host_pages"), [(0.0, 0), (1.0, 0), (0.0, -1), (1.0, 6)])
def test_in_a_tight_pool_every_request_gets_the_tokens_of_a_roomy_one(
    tiny: TinyModel, prefix_cache: bool, temperature: float, host_pages: int
) -> None:
    outputs = []
    for pages in (ROOMY, TIGHT):
        small = SmallEngine(tiny, pages=pages, host_pages=host_pages, prefix_cache=prefix_cache)
        for number, ids in enumerate(prompts(3, 12)):
            small.send(str(number), ids, 20 + 3 * number, temperature=temperature, seed=number)
        small.run()
        outputs.append([small.ids(str(number)) for number in range(12)])
        stats = small.engine.stats()
        assert (stats["retractions_total"] > 0) == (pages == TIGHT)
        assert (stats["rebootstraps_total"] > 0) == (pages == TIGHT and host_pages != 0)
        assert (stats["resumed_requests_total"] > 0) == (pages == TIGHT and host_pages >= 0)
    assert outputs[0] == outputs[1]
    assert [len(ids) for ids in outputs[1]] == [20 + 3 * number for number in range(12)]


@pytest.mark.parametrize(("host_pages", "back"), [(0, "resumed_requests_total"), (-1, "rebootstraps_total")])
def test_tokens_are_told_once_each_across_a_retraction(tiny: TinyModel, host_pages: int, back: str) -> None:
    small = SmallEngine(tiny, pages=TIGHT, host_pages=host_pages)
    for number, ids in enumerate(prompts(5, 8)):
        small.send(str(number), ids, 50)
    small.run()
    assert small.engine.stats()["retractions_total"] == small.engine.stats()[back] > 0
    for number in range(8):
        assert [len(frame.token_ids) for frame in small.frames(str(number))] == [1] * 50


def test_what_is_computed_again_is_told_and_sampled_as_if_it_had_stayed(tiny: TinyModel) -> None:
    """Penalties count prompt and output apart, logprobs of the prompt come once, its length and cached part stay."""
    frames = []
    for pages in (ROOMY, TIGHT):
        small = SmallEngine(tiny, pages=pages, host_pages=-1)
        for number, ids in enumerate(prompts(3, 6, longest=20)):
            small.send(
                str(number), ids, 50, temperature=1.0, seed=number, repetition_penalty=1.3, presence_penalty=0.4,
                frequency_penalty=0.2, logit_bias=((7, 2.0),), min_new_tokens=45, ignore_eos=False, top_logprobs=2,
                prompt_logprobs=number % 2 == 0,
            )  # fmt: skip
        small.run()
        frames.append([frame for number in range(6) for frame in small.frames(str(number))])
    assert small.engine.stats()["rebootstraps_total"] > 0
    for roomy, tight in zip(*frames, strict=True):
        assert (roomy.rid, roomy.token_ids, roomy.finish_reason) == (tight.rid, tight.token_ids, tight.finish_reason)
        assert roomy.logprobs == pytest.approx(tight.logprobs, abs=1e-4)
        assert [[id for id, _ in top] for top in roomy.top_logprobs] == [
            [id for id, _ in top] for top in tight.top_logprobs
        ]
        assert len(roomy.prompt_logprobs) == len(tight.prompt_logprobs)
        assert tight.cached_tokens == 0


def test_one_request_may_fill_the_whole_pool(tiny: TinyModel) -> None:
    small = SmallEngine(tiny, pages=TIGHT)
    small.send("large", [1] * 40, (TIGHT - 1) * PAGE - 40 + 1)
    small.send("other", [2] * 30, 30)
    small.run()
    assert all(isinstance(end, Tokens) for end in small.ends().values()) and len(small.ends()) == 2


def test_the_request_with_the_most_tokens_is_never_put_out(tiny: TinyModel) -> None:
    small = SmallEngine(tiny, pages=TIGHT)
    for number, ids in enumerate(prompts(7, 10)):
        small.send(str(number), ids, 40)
    before: set[str] = set()
    left: list[str] = []
    while small.turn() or small.engine.requests:
        out, running = small.role.retraction.out, small.engine.scheduler.running
        for request in out:
            if request.rid not in before:
                left.append(request.rid)
                assert max(len(other.output_ids) for other in running.values()) >= len(request.output_ids)
        before = {request.rid for request in out}
    assert left


def test_a_higher_priority_stays_when_others_must_leave(tiny: TinyModel) -> None:
    small = SmallEngine(tiny, pages=TIGHT)
    for number, ids in enumerate(prompts(11, 8, longest=12)):
        small.send(str(number), ids, 60, priority=int(number == 5))
    left = set()
    while small.turn() or small.engine.requests:
        left |= {request.rid for request in small.role.retraction.out}
    assert left and "5" not in left


def test_a_request_that_is_out_can_be_aborted_and_can_expire(tiny: TinyModel) -> None:
    now = [100.0]
    small = SmallEngine(tiny, pages=TIGHT, clock=lambda: now[0])
    for number, ids in enumerate(prompts(13, 8)):
        small.send(str(number), ids, 60, deadline_s=1e4)
    while len(small.role.retraction.out) < 2:
        small.turn()
    first, second = [request.rid for request in small.role.retraction.out[:2]]
    small.abort(first)
    small.turn()
    assert first not in small.engine.requests
    now[0] += 2e4
    small.run()
    ends = small.ends()
    assert first not in ends and isinstance(ends[second], Failed) and ends[second].status == 504  # type: ignore


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    requests=st.lists(st.tuples(st.integers(1, 57), st.integers(1, 39), st.integers(0, 2)), min_size=1, max_size=14),
    seed=st.integers(0, 3),
    host_pages=st.sampled_from([0, 6, -1]),
)
def test_every_request_ends_whatever_the_mix(
    tiny: TinyModel, requests: list[tuple[int, int, int]], seed: int, host_pages: int
) -> None:
    """Prompts from a few texts, so that they share; together far more than the pool holds."""
    small = SmallEngine(tiny, pages=TIGHT, host_pages=host_pages)
    text = np.random.default_rng(seed).integers(0, 256, 60).tolist()
    for number, (length, tokens, priority) in enumerate(requests):
        small.send(str(number), text[:length], tokens, priority=priority)
    small.run(turns=sum(tokens + 20 for _, tokens, _ in requests) * 4 + 100)
    ends = small.ends()
    assert len(ends) == len(requests) and all(isinstance(end, Tokens) for end in ends.values())
    assert [len(small.ids(str(number))) for number in range(len(requests))] == [tokens for _, tokens, _ in requests]


@pytest.mark.parametrize("prompt", range(1, PAGE + 1))
def test_who_begins_to_decode_while_another_is_put_out_has_a_page_for_its_token(tiny: TinyModel, prompt: int) -> None:
    """The first token of an urgent prompt of whole pages is read only because a lesser request is short of a page."""
    small = SmallEngine(tiny, check=False)
    small.send("lesser", [3] * prompt, 40)
    for _ in range(3):
        small.turn()
    small.send("urgent", [4] * tiny.prefill_tokens, 12, priority=1)
    small.turn()
    assert "urgent" in small.engine.requests and "urgent" not in small.engine.scheduler.running
    allocator = small.engine.prefix.allocators[0]
    allocator.allocate("hog", allocator.free_pages)
    for _ in range(2 * PAGE):
        small.turn()
    assert "lesser" in [request.rid for request in small.role.retraction.out]
    allocator.release("hog")
    small.run()
    crowded = [small.ids("lesser"), small.ids("urgent")]
    roomy = SmallEngine(tiny)
    roomy.send("lesser", [3] * prompt, 40)
    roomy.send("urgent", [4] * tiny.prefill_tokens, 12)
    roomy.run()
    assert crowded == [roomy.ids("lesser"), roomy.ids("urgent")]


def test_pages_come_back_bit_for_bit_and_only_where_they_are_wanted(tiny: TinyModel) -> None:
    runner = tiny.runner
    host = HostPages(runner)
    pages = [int(page) for page in np.random.default_rng(0).permutation(np.arange(1, ROOMY))[: 2 * BLOCK_PAGES + 3]]
    words = np.random.default_rng(1).standard_normal(runner.pool.shape).astype(np.float32)
    runner.pool = host._scatter(runner.pool, np.zeros(BLOCK_PAGES, np.int32), words[:, :BLOCK_PAGES])
    for start in range(0, ROOMY - 1, BLOCK_PAGES):
        ids = np.arange(1 + start, 1 + start + BLOCK_PAGES, dtype=np.int32)
        runner.pool = host._scatter(runner.pool, ids, words[:, ids])
    saved = host.save(pages, 0)
    host.restore(saved, [0] * 5 + list(range(100, 100 + len(pages) - 5)), first=5)
    runner.check_integrity()
    pool = np.array(runner.pool)
    np.testing.assert_array_equal(pool[:, 100 : 100 + len(pages) - 5], words[:, pages[5:]])
    untouched = [page for page in range(1, ROOMY) if not 100 <= page < 100 + len(pages) - 5]
    np.testing.assert_array_equal(pool[:, untouched], words[:, untouched])
