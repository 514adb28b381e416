"""Under `Disagg.allocation = prefill_complete` a decode instance takes pages only for prompts that are computed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tiny_pair import LONG, TinyPair, prompt, until, wait_ended

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def pair(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, tiny_answer: Callable[[list[int], int], list[int]]
) -> Iterator[TinyPair]:
    folder = tmp_path_factory.mktemp("late")
    pair = TinyPair(folder, tiny_model, tiny_answer, Disagg__allocation="prefill_complete")
    try:
        yield pair
        pair.at_rest()
    finally:
        pair.kill()


def test_prompts_of_all_lengths_give_the_tokens_of_a_unified_instance(pair: TinyPair) -> None:
    rooms = [pair.room(prompt(tokens), 5) for tokens in (1, 15, 16, 17, 127, 128, 129, 300, 1000)]
    wait_ended(rooms)
    for room in rooms:
        assert pair.is_right(room), room


def test_a_prompt_is_computed_while_decode_has_no_pages_for_it(pair: TinyPair) -> None:
    decode, prefill = pair.decode, pair.prefill
    pair.slow()
    running = [pair.room(*LONG) for _ in range(2)]
    until(lambda: decode.metrics()["pdjax_running_requests"] == 2, decode)
    received = decode.metrics()["pdjax_received_pages_total"]
    large = pair.room(prompt(2200), 100)  # more pages than the others may leave
    until(lambda: decode.metrics()["pdjax_waiting_requests"] == 1, decode)
    assert prefill.metrics()["pdjax_inflight_requests"] == 1, "its prompt is computed"
    assert decode.metrics()["pdjax_received_pages_total"] == received, "and nothing of it is sent"
    pair.hold(0)
    wait_ended([*running, large])
    assert all(pair.is_right(room) for room in (*running, large))


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_room_that_waits_for_pages_can_be_given_up(pair: TinyPair, side: str) -> None:
    decode = pair.decode
    pair.slow()
    running = [pair.room(*LONG) for _ in range(2)]
    until(lambda: decode.metrics()["pdjax_running_requests"] == 2, decode)
    large = pair.room(prompt(2200), 100)
    until(lambda: decode.metrics()["pdjax_waiting_requests"] == 1, decode)
    half = large.prefill if side == "prefill" else large.decode
    assert half is not None
    half.disconnect()
    asked = time.monotonic()
    wait_ended([large])
    assert all(half.ended_at - asked < 10 for half in large.halves)
    pair.hold(0)
    wait_ended(running)
    assert all(pair.is_right(room) for room in running)
