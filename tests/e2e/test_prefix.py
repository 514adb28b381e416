"""What an instance has computed before it does not compute again, and what a decode instance has it is not sent."""

from __future__ import annotations

import time

import pytest
from processes import Deployment, Part, post
from test_answers import RECORDS, greedy

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("length", [100, 300])
def test_of_the_same_prompt_again_only_the_last_page_is_computed_and_sent(pair: Deployment, length: int) -> None:
    ids = [(7 * length + 13 * index) % 4000 + 100 for index in range(length)]
    answers, counts = [], [metrics(pair.prefill)]
    for _ in range(2):
        status, answer = post(f"{pair.router.url}/generate", greedy(ids, 12))
        assert status == 200, answer
        answers.append(answer)
        counts.append(metrics(pair.prefill))
    first, second = answers
    assert second["output_ids"] == first["output_ids"]
    pages, cached = -(-length // 16), (length - 1) // 16 * 16
    page_bytes = counts[0]["pdjax_page_bytes"]
    timelines = [answer["meta_info"]["timeline"] for answer in answers]
    assert [timeline["transfer_bytes"] for timeline in timelines] == [pages * page_bytes, page_bytes]
    assert [timeline["reused_tokens"] for timeline in timelines] == [0, length // 16 * 16]
    assert [answer["meta_info"]["cached_tokens"] for answer in answers] == [0, cached]
    for name, expected in (("prompt_tokens_computed", [length, length - cached]), ("cached_tokens", [0, cached])):
        values = [count[f"pdjax_{name}_total"] for count in counts]
        assert [values[1] - values[0], values[2] - values[1]] == expected


def test_a_second_turn_through_a_pair_moves_only_its_new_pages(pair: Deployment, unified: Part) -> None:
    history = [(31 * index) % 4000 + 100 for index in range(120)]
    status, first = post(f"{pair.router.url}/generate", greedy(history, 30))
    assert status == 200, first
    longer = history + first["output_ids"] + [42] * 25
    before = metrics(pair.decode)["pdjax_received_pages_total"]
    status, second = post(f"{pair.router.url}/generate", greedy(longer, 8))
    assert status == 200, second
    known = (len(history) + 29) // 16  # the last output token was never computed on
    assert metrics(pair.decode)["pdjax_received_pages_total"] - before == -(-len(longer) // 16) - known
    assert second["meta_info"]["timeline"]["reused_tokens"] == known * 16
    assert second["output_ids"] == post(f"{unified.url}/generate", greedy(longer, 8))[1]["output_ids"]
    assert post(f"{pair.router.url}/flush_cache", {})[0] == 200
    assert metrics(pair.decode)["pdjax_cache_pages"] == metrics(pair.prefill)["pdjax_cache_pages"] == 0
    assert post(f"{pair.router.url}/generate", greedy(longer, 8))[1]["output_ids"] == second["output_ids"]


def test_samples_of_a_prompt_move_it_once(pair: Deployment, unified: Part) -> None:
    ids = [(37 * index) % 4000 + 100 for index in range(100)]
    body = {"input_ids": ids, "sampling_params": {"n": 4, "seed": 3, "temperature": 1, "max_new_tokens": 8}}
    before = metrics(pair.decode)["pdjax_received_pages_total"]
    status, answers = post(f"{pair.router.url}/generate", body)
    assert status == 200, answers
    assert metrics(pair.decode)["pdjax_received_pages_total"] - before == 7 + 3 * 1  # the last page is not whole
    alone = post(f"{unified.url}/generate", body)[1]
    assert [each["output_ids"] for each in answers] == [each["output_ids"] for each in alone]


def test_a_conversation_through_a_unified_instance_computes_what_is_new(unified: Part) -> None:
    history = RECORDS[0]["input_ids"] * 8
    status, first = post(f"{unified.url}/generate", greedy(history, 30))
    assert status == 200, first
    before = metrics(unified)["pdjax_prompt_tokens_computed_total"]
    longer = history + first["output_ids"] + [42] * 5
    status, second = post(f"{unified.url}/generate", greedy(longer, 4))
    assert status == 200, second
    known = (len(history) + 29) // 16 * 16
    assert second["meta_info"]["cached_tokens"] == known
    assert metrics(unified)["pdjax_prompt_tokens_computed_total"] - before == len(longer) - known


def metrics(part: Part) -> dict[str, float]:
    """Values of now: a frontend may show the scheduler's last ones again for half a second."""
    time.sleep(0.6)
    return part.metrics()
