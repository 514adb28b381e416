"""Several samples of one prompt: it is computed and moved once, and each has the tokens that its seed gives."""

from __future__ import annotations

import numpy as np
import pytest
from close_pair import ClosePair
from small_engine import PAGE, SmallEngine

from pdjax.wire import Tokens

SAMPLES = 4


def send(pair: ClosePair | SmallEngine, ids: list[int], tokens: int = 12) -> None:
    for sample in range(SAMPLES):
        of = "r-0" if sample else ""
        pair.send(f"r-{sample}", ids, tokens, temperature=1.0, seed=7 + sample, sample_of=of)


def text(tokens: int) -> list[int]:
    return np.random.default_rng(tokens).integers(0, 256, tokens).tolist()


def unified(models, ids: list[int], tokens: int = 12) -> list[list[int]]:
    small = SmallEngine(models.prefill)
    send(small, ids, tokens)
    small.run()
    return [small.ids(f"r-{sample}") for sample in range(SAMPLES)]


@pytest.mark.parametrize("length", [2, 4, 63, 64, 65])
def test_the_prompt_is_moved_once_and_computed_once(models, length: int) -> None:
    pair = models.pair()
    ids = text(length)
    computed = pair.prefill.engine.stats()["prompt_tokens_computed_total"]
    send(pair, ids)
    pair.run()
    outputs = [pair.ids(f"r-{sample}") for sample in range(SAMPLES)]
    assert outputs == unified(models, ids) and len({tuple(each) for each in outputs}) == SAMPLES
    pages, rest = -(-length // PAGE), length % PAGE
    # Only whole pages are shared: the last one, if it is not, is computed and sent for each.
    assert pair.stats()["received_pages_total"] == pages + (SAMPLES - 1) * (rest > 0)
    computed = pair.prefill.engine.stats()["prompt_tokens_computed_total"] - computed
    assert computed == length + (SAMPLES - 1) * (rest or PAGE)


def test_samples_decode_from_the_same_pages(models) -> None:
    pair = models.pair(pages=60)
    send(pair, text(100), 30)  # 25 pages of prompt and 8 of its own for each
    most = 0
    while pair.decode.engine.requests or not pair.decode.inbox.empty():
        pair.turn()
        most = max(most, len(pair.decode.engine.scheduler.running))
    pair.run()
    assert most == SAMPLES
    assert [pair.ids(f"r-{sample}") for sample in range(SAMPLES)] == unified(models, text(100), 30)


@pytest.mark.parametrize("gone", range(SAMPLES))
@pytest.mark.parametrize("turns", [1, 3, 5, 9, 14])
def test_a_sample_that_is_aborted_takes_no_other_with_it(models, gone: int, turns: int) -> None:
    pair = models.pair()
    ids = text(90)
    send(pair, ids)
    for _ in range(turns):
        pair.turn()
    pair.abort(f"r-{gone}")
    pair.run()
    for sample, expected in enumerate(unified(models, ids)):
        if sample != gone:
            assert pair.ids(f"r-{sample}") == expected


def test_samples_outlive_a_first_one_that_fails(models) -> None:
    """Its prefill half goes, so its room fails; the next sample's room moves the prompt."""
    pair = models.pair()
    send(pair, text(90))
    while not pair.prefill.engine.requests or not pair.prefill.engine.requests["r-0"].pages:
        pair.turn()
    pair.prefill.engine.role.abort(pair.prefill.engine.requests["r-0"], "it was to fail")
    pair.prefill.engine._forget(pair.prefill.engine.requests["r-0"])
    pair.run()
    failure = pair.failure("r-0")
    assert failure is not None and "it was to fail" in failure.message
    ended = {m.rid for m in pair.decode.emitted if isinstance(m, Tokens) and m.finish_reason is not None}
    assert ended == {"r-1", "r-2", "r-3"}


@pytest.mark.parametrize("host_pages", [0, -1])
def test_samples_that_must_leave_a_tight_pool_keep_their_tokens(models, host_pages: int) -> None:
    pair = models.pair(pages=25, host_pages=host_pages)
    for _ in range(10):
        pair.decode.engine.lengths.add(2)
    send(pair, text(30), 50)
    pair.run()
    assert pair.stats()["retractions_total"] > 0
    assert (pair.stats()["rebootstraps_total"] > 0) == (host_pages < 0)
    assert [pair.ids(f"r-{sample}") for sample in range(SAMPLES)] == unified(models, text(30), 50)
