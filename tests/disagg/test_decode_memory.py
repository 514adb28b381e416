"""A decode instance's pool holds more requests than could fill it, and costs none of them a token."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from close_pair import ClosePair
from small_engine import PAGE, SmallEngine

from pdjax.disagg.protocol import messages
from pdjax.net.events import LinkDown, LinkFailed
from pdjax.wire import NO_PARTNER, Abort, Failed, Generate, Rendezvous, SamplingParams, Tokens

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
@pytest.mark.parametrize(("temperature", "host_pages"), [(0.0, 0), (1.0, 0), (1.0, -1), (0.0, 6)])
def test_who_had_to_leave_the_pool_gets_the_tokens_that_a_unified_instance_gives(
    models, allocation, temperature, host_pages
):
    pair = models.pair(pages=TIGHT, allocation=allocation, host_pages=host_pages)
    teach(pair, 4)
    requests = {
        str(number): (ids, {"tokens": 20 + 3 * number, "temperature": temperature, "seed": number})
        for number, ids in enumerate(prompts(3, 12))
    }
    for rid, (ids, options) in requests.items():
        pair.send(rid, ids, **options)
    pair.run()
    assert {rid: pair.ids(rid) for rid in requests} == unified(models, requests)
    stats, again = pair.stats(), pair.prefill.engine.stats()["rebootstraps_total"]
    assert stats["retractions_total"] == stats["resumed_requests_total"] + again > 0
    assert stats["rebootstraps_total"] == again and (again > 0) == (host_pages != 0)
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


def without_host_memory(models, **options: Any) -> ClosePair:
    """A pair that has just begun to compute a request again."""
    pair = models.pair(pages=TIGHT, host_pages=-1)
    teach(pair, 4)
    for number, ids in enumerate(prompts(9, 6)):
        pair.send(str(number), ids, 50, **options)
    while not again(pair):
        pair.turn()
    return pair


def again(pair: ClosePair) -> list[str]:
    """Requests that have lost their pages and have none yet that they could decode from."""
    engine = pair.decode.engine
    return [
        rid for rid, request in engine.requests.items() if request.output_ids and rid not in engine.scheduler.running
    ]


def test_what_is_computed_again_is_told_and_sampled_as_if_it_had_stayed(models):
    options: dict[str, Any] = {"temperature": 1, "repetition_penalty": 1.3, "presence_penalty": 0.4, "top_logprobs": 2,
                               "frequency_penalty": 0.2, "min_new_tokens": 45, "ignore_eos": False}  # fmt: skip
    roomy = models.pair()
    for number, ids in enumerate(prompts(9, 6)):
        roomy.send(str(number), ids, 50, prompt_logprobs=True, **options)
    roomy.run()
    tight = without_host_memory(models, prompt_logprobs=True, **options)
    tight.run()
    for rid in map(str, range(6)):
        for before, after in zip(roomy.frames(rid), tight.frames(rid), strict=True):
            assert (before.token_ids, before.finish_reason) == (after.token_ids, after.finish_reason)
            assert before.logprobs == pytest.approx(after.logprobs, abs=1e-4)
            assert [[id for id, _ in top] for top in before.top_logprobs] == [
                [id for id, _ in top] for top in after.top_logprobs
            ]
            assert len(before.prompt_logprobs) == len(after.prompt_logprobs)
        timeline = tight.frames(rid)[-1].timeline
        assert timeline is not None and timeline["queue_s"] + timeline["prefill_s"] <= timeline["first_token_s"]


@pytest.mark.parametrize("who", ["the prefill instance has no place for it", "nobody listens there any more"])
def test_a_request_that_cannot_be_computed_again_fails_and_says_why(models, who):
    pair = without_host_memory(models)
    if who == "nobody listens there any more":
        decode = pair.decode
        decode.connect = lambda link, *_: decode.inbox.put(  # type: ignore[method-assign]
            LinkFailed(link, "connection refused", gone=True)
        )
        for side in (decode, pair.prefill):
            side.inbox.put(LinkDown(decode.links[-1], "the peer has died", gone=True))
        words = "connection refused"
    else:
        limits = pair.prefill.engine.limits
        pair.prefill.engine.limits = dataclasses.replace(limits, max_running_requests=0, max_queued_requests=0)
        words = "requests are waiting already"
    while pair.decode.engine.requests:
        pair.turn()
    for rid in pair.prefill.engine.requests:  # as a router does
        pair.abort(rid)
    pair.run()
    failed = [message for message in pair.decode.emitted if isinstance(message, Failed) and pair.ids(message.rid)]
    assert failed and all(f.status == 503 and "could not be computed again: " in f.message for f in failed)
    assert any(words in f.message for f in failed)
    assert len(failed) < 6, "the strongest has gone on"


@pytest.mark.parametrize("turns", range(0, 12, 2))
@pytest.mark.parametrize("how", ["abort", "deadline"])
def test_one_that_is_computed_again_can_end_meanwhile(models, turns, how):
    pair = without_host_memory(models, deadline_s=1e4)
    [gone] = again(pair)
    for _ in range(turns):
        pair.turn()
    if gone in again(pair):
        if how == "abort":
            pair.decode.inbox.put(Abort(gone, "the client left"))
        else:
            request = pair.decode.engine.requests[gone]
            request.deadline_s = -1
            pair.decode.engine._deadlines.add(request)
        pair.run()
        failure = pair.failure(gone)
        assert failure is None if how == "abort" else failure is not None and failure.status == 504
    pair.run()
    ended = [m.rid for m in pair.decode.emitted if isinstance(m, Tokens) and m.finish_reason is not None]
    assert {str(number) for number in range(6)} - {gone} <= set(ended) and len(set(ended)) == len(ended)


def test_a_health_check_that_loses_its_pages_begins_again_by_itself(models):
    pair = models.pair(pages=TIGHT, host_pages=-1, reserved_decode_tokens=PAGE)
    pair.send("large", [1] * 40, 40)
    while not pair.ids("large"):
        pair.turn()
    alone = Rendezvous(NO_PARTNER, 0, 0)
    pair.decode.inbox.put(Generate("health", [0], SamplingParams(max_new_tokens=90, ignore_eos=True), alone))
    pair.run()
    assert len(pair.ids("health")) == 90 and len(pair.ids("large")) == 40
    assert pair.stats()["rebootstraps_total"] > pair.prefill.engine.stats()["rebootstraps_total"] == 0


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
