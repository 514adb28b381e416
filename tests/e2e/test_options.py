"""Sampling options and grammars mean the same unified and apart: the first token is picked by another instance."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from processes import Deployment, Part, post

RECORD = json.loads((Path(__file__).parent.parent / "data" / "smollm2_reference.json").read_text())["records"][0]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "year": {"type": "integer"}},
    "required": ["city", "year"],
    "additionalProperties": False,
}
DATE = "(19|20)[0-9]{2}-[0-9]{2}-[0-9]{2}"
OPTIONS: dict[str, dict[str, Any]] = {
    "repetition": {"temperature": 0, "repetition_penalty": 1.3},
    "presence and frequency": {"temperature": 0, "presence_penalty": 1.5, "frequency_penalty": 0.7},
    "bias": {"temperature": 0, "logit_bias": {"7042": -100, "260": 4}},
    "seeded": {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "sampling_seed": 11, "repetition_penalty": 1.1},
    "regex": {"temperature": 0, "regex": DATE},
}

pytestmark = pytest.mark.e2e


def ask(url: str, options: dict[str, Any], **more: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": 24, "ignore_eos": True} | options
    status, answer = post(f"{url}/generate", {"input_ids": RECORD["input_ids"], "sampling_params": sampling} | more)
    assert status == 200, answer
    return answer


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_give_the_same_tokens_unified_and_apart(
    unified: Part, pair: Deployment, options: dict[str, Any]
) -> None:
    answers = [ask(url, options)["output_ids"] for url in (unified.url, pair.router.url)]
    assert answers[0] == answers[1]
    assert answers[0] != RECORD["output_ids"][: len(answers[0])], "the options change nothing"


@pytest.mark.parametrize("where", ["unified", "pair"])
def test_structured_output_follows_its_grammar(unified: Part, pair: Deployment, where: str) -> None:
    url = unified.url if where == "unified" else pair.router.url
    assert re.fullmatch(DATE, ask(url, {"temperature": 1.0, "regex": DATE})["text"])
    led = ask(url, {"temperature": 0, "json_schema": SCHEMA, "max_new_tokens": 100, "ignore_eos": False})
    jsonschema.validate(json.loads(led["text"]), SCHEMA)
    body = {"input_ids": RECORD["input_ids"], "sampling_params": {"regex": "(ab"}}
    status, answer = post(f"{url}/generate", body)
    assert status == 400 and "regex" in json.dumps(answer), answer


def test_best_tokens_of_the_first_position_come_with_the_handoff(unified: Part, pair: Deployment) -> None:
    for url in (unified.url, pair.router.url):
        meta = ask(url, {"temperature": 0}, return_logprob=True, top_logprobs_num=5)["meta_info"]
        first = meta["output_top_logprobs"][0]
        assert [entry[1] for entry in first] == [token for token, _ in RECORD["first_step_top5"]]
        np.testing.assert_allclose([entry[0] for entry in first], RECORD["first_step_top5_logprobs"], atol=1e-3)
        assert all(len(place) == 5 for place in meta["output_top_logprobs"])


def test_prompt_logprobs_are_those_of_the_prompt_unified_and_apart(unified: Part, pair: Deployment) -> None:
    more: dict[str, Any] = {"return_logprob": True, "logprob_start_len": 0}
    for url in (unified.url, pair.router.url):
        told = ask(url, {"temperature": 0}, **more)["meta_info"]["input_token_logprobs"]
        assert [token for _, token, _ in told] == RECORD["input_ids"]
        assert told[0][0] is None and all(logprob < 0 for logprob, _, _ in told[1:])
