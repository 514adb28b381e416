"""Options that a frontend splits over samples or rooms mean the same unified and apart."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from processes import Deployment, Part, get, post
from test_answers import RECORDS

pytestmark = pytest.mark.e2e

IDS = RECORDS[0]["input_ids"]


def samples(url: str, body: dict[str, Any]) -> list[list[int]]:
    status, answer = post(f"{url}/generate", body)
    assert status == 200, answer
    return [each["output_ids"] for each in answer]


def test_samples_of_a_seed_are_the_same_unified_and_apart(unified: Part, pair: Deployment) -> None:
    body = {"input_ids": [IDS, IDS[:3]], "sampling_params": {"n": 2, "seed": 11, "max_new_tokens": 8, "temperature": 1}}
    ours = samples(pair.router.url, body)
    assert ours == samples(unified.url, body)
    assert len({tuple(each) for each in ours}) == 4


def test_a_chats_samples_each_have_a_room(pair: Deployment) -> None:
    with openai.OpenAI(base_url=f"{pair.router.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        wanted: Any = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 6, "n": 3, "seed": 1}
        answer = client.chat.completions.create(model="default", **wanted)
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert answer.usage is not None and answer.usage.completion_tokens <= 18
        streamed = {0: "", 1: "", 2: ""}
        for chunk in client.chat.completions.create(model="default", stream=True, **wanted):
            for choice in chunk.choices:
                streamed[choice.index] += choice.delta.content or ""
        assert [choice.message.content for choice in answer.choices] == list(streamed.values())


def test_a_forced_call_is_one_unified_and_apart(unified: Part, pair: Deployment) -> None:
    parameters: dict[str, Any] = {"type": "object", "properties": {"loud": {"type": "boolean"}}, "required": ["loud"]}
    parameters["additionalProperties"] = False
    tool: Any = {"type": "function", "function": {"name": "greet", "parameters": parameters}}
    for url in (unified.url, pair.router.url):
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
            choice = client.chat.completions.create(
                model="default", messages=[{"role": "user", "content": "Greet me."}], tools=[tool],
                tool_choice="required", parallel_tool_calls=False, temperature=0, max_tokens=100,
            ).choices[0]  # fmt: skip
        assert choice.finish_reason == "tool_calls", choice
        calls: Any = choice.message.tool_calls
        ((name, arguments),) = [(call.function.name, call.function.arguments) for call in calls]
        assert name == "greet"
        assert json.loads(arguments)["loud"] in (True, False)


def test_a_pair_tells_the_log_probabilities_of_the_prompt_as_one_instance_does(pair: Deployment, unified: Part) -> None:
    params = {"temperature": 0, "max_new_tokens": 2}
    body = {"input_ids": IDS * 40, "sampling_params": params, "return_logprob": True, "logprob_start_len": 0}
    told = []
    for url in (pair.router.url, unified.url):
        status, answer = post(f"{url}/generate", body | {"top_logprobs_num": 2})
        assert status == 200, answer
        told.append(answer["meta_info"])
    apart, alone = told
    assert [token for _, token, _ in apart["input_token_logprobs"]] == IDS * 40
    assert apart["input_token_logprobs"][0][0] is None
    logprobs = [[entry[0] for entry in each["input_token_logprobs"][1:]] for each in told]
    assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-3)
    assert [len(best or []) for best in apart["input_top_logprobs"]] == [
        len(best or []) for best in alone["input_top_logprobs"]
    ]


def test_all_instances_are_reached_through_the_router(pair: Deployment) -> None:
    status, answer = post(f"{pair.router.url}/flush_cache", {})
    assert (status, answer["workers_flushed"]) == (200, 2)
    assert get(f"{pair.router.url}/health_generate")[0] == 200
    status, loads = get(f"{pair.router.url}/get_loads")
    assert status == 200
    assert all(each["load"] >= 0 for each in json.loads(loads)["workers"])
