"""A decode instance's pool holds more requests than could fill it, and costs none of them a token."""

from __future__ import annotations

import numpy as np
import pytest
from close_pair import ClosePair
from small_engine import PAGE, SmallEngine

from pdjax.disagg.protocol import messages
from pdjax.wire import Failed, Tokens

TIGHT = 25


def prompts(seed: int, count: int, longest: int = 40) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(0, 256, random.integers(1, longest)).tolist() for _ in range(count)]


def teach(pair: ClosePair, tokens: int) -> None:
    """Have a pair see requests that end after so many tokens, though they might have gone on."""
    for _ in range(10):
        pair.decode.engine.lengths.add(tokens)


def most_running(pair: ClosePair, longest: int) -> int:
    """How many requests of up to 60 tokens decode together at most."""
    for number, ids in enumerate(prompts(5, 8, longest)):
        pair.send(str(number), ids, 60)
    most = 0
    while pair.decode.engine.requests or not pair.decode.inbox.empty():
        pair.turn()
        most = max(most, len(pair.decode.engine.scheduler.running))
    pair.run()
    return most


def unified(models, requests: dict[str, tuple[list[int], dict]]) -> dict[str, list[int]]:
    small = SmallEngine(models.prefill)
    for rid, (ids, options) in requests.items():
        small.send(rid, ids, **options)
    small.run()
    return {rid: small.ids(rid) for rid in requests}


@pytest.mark.parametrize("allocation", [messages.EARLY, messages.PREFILL_COMPLETE])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_who_had_to_leave_the_pool_gets_the_tokens_that_a_unified_instance_gives(models, allocation, temperature):
    pair = models.pair(pages=TIGHT, allocation=allocation)
    teach(pair, 4)
    requests = {
        str(number): (ids, {"tokens": 20 + 3 * number, "temperature": temperature, "seed": number})
        for number, ids in enumerate(prompts(3, 12))
    }
    for rid, (ids, options) in requests.items():
        pair.send(rid, ids, **options)
    pair.run()
    assert {rid: pair.ids(rid) for rid in requests} == unified(models, requests)
    assert pair.stats()["retractions_total"] == pair.stats()["resumed_requests_total"] > 0
    assert all(len(frame.token_ids) == 1 for rid in requests for frame in pair.frames(rid))


def test_more_are_let_in_than_if_each_reserved_all_that_it_may_generate(models):
    cautious, taught = models.pair(pages=TIGHT), models.pair(pages=TIGHT)
    teach(taught, 4)
    assert most_running(taught, longest=8) > most_running(cautious, longest=8) == 1
    assert taught.stats()["retractions_total"] > cautious.stats()["retractions_total"] == 0


def test_a_fixed_reserve_takes_the_place_of_the_estimate(models):
    assert most_running(models.pair(pages=TIGHT), longest=8) == 1
    assert most_running(models.pair(pages=TIGHT, reserved_decode_tokens=PAGE), longest=8) > 2


def test_prompts_go_on_landing_while_a_request_is_out(models):
    """One that has its pages and waits for its prompt is not held up by those that wait for pages."""
    pair = models.pair(pages=TIGHT)
    teach(pair, 4)
    for number in range(4):
        pair.send(str(number), [number] * 10, 60)
    pair.send("late", [9] * 12, 4, sides="d")
    late = pair.decode.engine.requests
    while not pair.decode.engine.role._admission.retraction.out:
        pair.turn()
    assert late["late"].pages and not pair.frames("late")
    pair._rooms -= 1
    pair.send("late", [9] * 12, 4, sides="p")
    while len(pair.frames("late")) < 4:
        pair.turn()
        if not pair.frames("late"):
            assert pair.decode.engine.role._admission.retraction.out
    pair.run()


def test_one_that_is_out_can_be_aborted(models):
    pair = models.pair(pages=TIGHT)
    teach(pair, 4)
    for number, ids in enumerate(prompts(7, 6)):
        pair.send(str(number), ids, 50)
    retraction = pair.decode.engine.role._admission.retraction
    while not retraction.out:
        pair.turn()
    gone = retraction.out[0].rid
    pair.abort(gone)
    pair.run()
    ends = [m.rid for m in pair.decode.emitted if isinstance(m, Tokens) and m.finish_reason is not None]
    assert sorted(ends) == sorted({str(number) for number in range(6)} - {gone})


def test_without_room_in_host_memory_a_request_fails_and_says_so(models):
    pair = models.pair(pages=TIGHT, host_pages=1)
    teach(pair, 4)
    for number, ids in enumerate(prompts(9, 6)):
        pair.send(str(number), ids, 50)
    pair.run()
    failed = [message for message in pair.decode.emitted if isinstance(message, Failed)]
    assert failed and all(f.status == 503 and "1 pages of host memory" in f.message for f in failed)
    assert len(failed) < 6, "the strongest has gone on"


def test_a_prompt_that_can_never_fit_is_refused_on_the_side_whose_pool_it_is(models):
    pair = models.pair(pages=TIGHT)
    pair.send("long", [1] * (TIGHT * PAGE), 2, sides="d")
    pair.turn()
    failure = pair.failure("long")
    assert failure is not None and failure.status == 400 and "24 in all" in failure.message


def test_one_request_may_fill_the_whole_pool(models):
    pair = models.pair(pages=TIGHT)
    pair.send("large", [1] * 40, (TIGHT - 1) * PAGE - 40 + 1)
    pair.send("other", [2] * 30, 30)
    pair.run()
    assert len(pair.ids("large")) == (TIGHT - 1) * PAGE - 39 and len(pair.ids("other")) == 30
