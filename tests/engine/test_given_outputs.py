"""A request that brings tokens of its output goes on as if this engine had made them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_engine import EOS, SmallEngine, TinyModel

from pdjax.engine.grammar import Grammars
from pdjax.wire import Failed, Grammar, Tokens

PROMPT = [7, 3, 99, 12, 7, 7, 40]
TOKENS = 24
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2}
WAYS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 5, "top_k": 40},
    {"temperature": 1.0, "seed": 6, "logit_bias": ((7, 2.0),), "top_logprobs": 2, **PENALTIES},
    {"temperature": 1.0, "seed": 1, "ignore_eos": False, "min_new_tokens": 20, "logit_bias": ((EOS, 9.0),)},
]


def run(small: SmallEngine) -> None:
    """Turn until nothing is live; grammars are compiled in a thread of their own meanwhile."""
    end = time.monotonic() + 60
    while small.turn() or small.engine.requests or not small.inbox.empty():
        assert time.monotonic() < end
        if not small.engine.scheduler.has_work:
            time.sleep(0.002)
    small.engine.check_integrity()


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(way=st.sampled_from(WAYS), known=st.integers(1, TOKENS - 1), cached=st.booleans())
def test_the_rest_is_that_of_the_uninterrupted_run(tiny: TinyModel, way: dict, known: int, cached: bool) -> None:
    whole, rest = SmallEngine(tiny), SmallEngine(tiny)
    whole.send("x", PROMPT, TOKENS, **way)
    whole.run()
    frames = whole.frames("x")
    ids = whole.ids("x")
    known = min(known, len(ids) - 1)
    if cached:
        rest.send("before", [*PROMPT, *ids[: known // 2]], 1)
        rest.run()
    rest.send("x", PROMPT, TOKENS, output_ids=ids[:known], **way)
    rest.run()
    assert rest.ids("x") == ids[known:]
    for told, expected in zip(rest.frames("x"), frames[known:], strict=True):
        assert (told.finish_reason, told.matched) == (expected.finish_reason, expected.matched)
        assert told.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
        assert [[id for id, _ in top] for top in told.top_logprobs] == [
            [id for id, _ in top] for top in expected.top_logprobs
        ]


def test_a_grammar_goes_on_where_the_output_stands(tiny: TinyModel, tmp_path: Path) -> None:
    def engine() -> SmallEngine:
        grammars = Grammars(
            tiny.folder / "tiny" / "tokenizer.json",
            vocab=260,
            eos_token_ids=(EOS,),
            post=lambda each: made.inbox.put(each),
        )
        made = SmallEngine(tiny, grammars=grammars)
        return made

    way: dict[str, Any] = {"grammar": Grammar("regex", "(19|20)[0-9]{2}-(0[1-9]|1[0-2])-[0-3][0-9]"), "seed": 3}
    whole = engine()
    whole.send("x", PROMPT, TOKENS, temperature=1.0, **way)
    run(whole)
    ids = whole.ids("x")
    for known in range(1, len(ids)):
        rest = engine()
        rest.send("x", PROMPT, TOKENS, temperature=1.0, output_ids=ids[:known], **way)
        run(rest)
        assert rest.ids("x") == ids[known:], known
    done = engine()
    done.send("x", PROMPT, TOKENS, temperature=1.0, output_ids=ids, **way)
    run(done)
    end = done.ends()["x"]
    assert isinstance(end, Failed) and end.status == 400 and "complete answer" in end.message


@pytest.mark.parametrize(
    ("given", "way", "words"),
    [
        ([1] * TOKENS, {}, "is all that the request may have"),
        ([1] * (TOKENS + 1), {}, "is all that the request may have"),
        ([1, EOS], {"ignore_eos": False}, "is all that the request may have"),
        ([1, 9], {"stop_token_ids": (9,)}, "is all that the request may have"),
        ([1, 10_000], {}, "not in the vocabulary"),
        ([-1, 1], {}, "not in the vocabulary"),
    ],
)
def test_what_cannot_go_on_is_refused_in_words(tiny: TinyModel, given: list[int], way: dict, words: str) -> None:
    small = SmallEngine(tiny)
    small.send("x", PROMPT, TOKENS, output_ids=given, **way)
    small.run()
    end = small.ends()["x"]
    assert isinstance(end, Failed) and end.status == 400 and words in end.message


def test_one_that_has_to_leave_the_pool_comes_back(tiny: TinyModel) -> None:
    whole, tight = SmallEngine(tiny), SmallEngine(tiny, pages=25, host_pages=-1)
    for number in range(8):
        whole.send(str(number), [number, *PROMPT], 40)
    whole.run()
    for number in range(8):
        ids = whole.ids(str(number))
        tight.send(str(number), [number, *PROMPT], 40, output_ids=ids[: 4 + number])
    tight.run()
    assert tight.engine.stats()["rebootstraps_total"] > 0
    assert all(isinstance(end, Tokens) for end in tight.ends().values())
    for number in range(8):
        assert tight.ids(str(number)) == whole.ids(str(number))[4 + number :]
