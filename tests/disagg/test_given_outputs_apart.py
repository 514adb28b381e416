"""A decode instance goes on with a request that another has begun: prefill is asked for all tokens by the claim."""

from __future__ import annotations

from typing import Any

import pytest
from small_engine import SmallEngine

from pdjax.disagg.protocol import messages
from pdjax.wire import Failed

PROMPT = [7, 3, 99, 12, 7, 7, 40]
TOKENS = 30
WAYS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 5, "repetition_penalty": 1.3, "frequency_penalty": 0.2, "top_logprobs": 2},
]


@pytest.mark.parametrize("allocation", [messages.EARLY, messages.PREFILL_COMPLETE])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("known", [1, 9])
def test_it_tells_the_tokens_that_follow_and_needs_no_other_half(models, allocation, way, known):
    whole = SmallEngine(models.prefill)
    whole.send("x", PROMPT, TOKENS, **way)
    whole.run()
    ids = whole.ids("x")
    pair = models.pair(allocation=allocation)
    pair.send("x", PROMPT, TOKENS, sides="d", output_ids=ids[:known], **way)
    pair.run()
    assert pair.ids("x") == ids[known:]
    assert all(len(frame.token_ids) == 1 and not frame.prompt_logprobs for frame in pair.frames("x"))
    assert pair.prefill.engine.stats()["rebootstraps_total"] == 1
    assert pair.stats()["rebootstraps_total"] == 0, "nothing was lost here"
    assert "transfer_s" in (pair.frames("x")[-1].timeline or {})


def test_samples_go_on_from_one_prompt_and_one_that_had_not_begun_begins(models):
    whole = SmallEngine(models.prefill)
    long = PROMPT * 6
    for sample in range(3):
        whole.send(f"x-{sample}", long, TOKENS, temperature=1.0, seed=sample)
    whole.run()
    pair = models.pair()
    for sample, known in enumerate((5, 3, 0)):
        rid, way = f"x-{sample}", {"temperature": 1.0, "seed": sample, "sample_of": "x-0" if sample else ""}
        pair.send(rid, long, TOKENS, sides="d" if known else "pd", output_ids=whole.ids(rid)[:known], **way)
    pair.run()
    for sample, known in enumerate((5, 3, 0)):
        assert pair.ids(f"x-{sample}") == whole.ids(f"x-{sample}")[known:]
    assert pair.stats()["cached_tokens_total"] > 2 * (len(long) - 8), "the prompt was moved once"


def test_memory_may_run_out_again(models):
    whole = SmallEngine(models.prefill)
    for number in range(6):
        whole.send(str(number), [number, *PROMPT], 50)
    whole.run()
    pair = models.pair(pages=25, host_pages=-1)
    for _ in range(10):
        pair.decode.engine.lengths.add(12)
    for number in range(6):
        known = whole.ids(str(number))[: 3 + number]
        pair.send(str(number), [number, *PROMPT], 50, sides="d", output_ids=known)
    pair.run()
    assert pair.stats()["rebootstraps_total"] > 0
    for number in range(6):
        assert pair.ids(str(number)) == whole.ids(str(number))[3 + number :]


@pytest.mark.parametrize("allocation", [messages.EARLY, messages.PREFILL_COMPLETE])
def test_it_goes_before_those_that_have_not_begun_though_both_queues_are_full(models, allocation):
    pair = models.pair(pages=13, allocation=allocation)
    for side in (pair.prefill, pair.decode):
        limits = side.engine.role._engine.limits
        side.engine.role._engine.limits = type(limits)(limits.max_context, 1, 7)
    for number in range(8):
        pair.send(str(number), [number, *PROMPT], TOKENS)
    pair.turn()
    pair.send("begun", PROMPT, TOKENS, sides="d", output_ids=[1, 2, 3])
    pair.send("one more", PROMPT, TOKENS)
    pair.run()
    assert pair.failure("one more").status == 429
    ended = [frame.rid for frame in pair.decode.emitted if getattr(frame, "finish_reason", None)]
    assert len(ended) == 9 and ended.index("begun") <= 2, "only those that had pages already were before it"


def test_what_prefill_refuses_fails_with_its_reason(models):
    pair = models.pair()
    pair.prefill.engine.role._engine.limits = type(pair.prefill.engine.limits)(8, 8, 0)
    pair.send("x", PROMPT, 20, sides="d", output_ids=[1, 2, 3])
    pair.run()
    failure = pair.failure("x")
    assert isinstance(failure, Failed) and failure.status == 503
    assert "could not be computed again: " in failure.message and "over the 8" in failure.message
