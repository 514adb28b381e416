"""Log-probabilities of prompt and output, in SGLang's form and both of OpenAI's."""

from __future__ import annotations

import json
from collections.abc import Iterator

import msgspec
import openai
import pytest
from scripted_leader import FrontendProcess, byte_tokenizer

from pdjax import wire
from pdjax.server import answers
from pdjax.server.vocabulary import Vocabulary

TOKENIZER = byte_tokenizer()
H, E, HELL, O = (TOKENIZER.encode(text).ids[0] for text in ("h", "e", "hell", "o"))  # noqa: E741
TOP = [[(HELL, -0.25), (H, -1.5), (E, -3.0)], [(E, -0.1), (H, -0.9), (HELL, -1.0)]]
HELLO = [{"role": "user", "content": "hi"}]


def tell_all(request: wire.Generate, leader) -> None:
    """Two tokens, the second of which is not among the best, and all that was asked for."""
    prompt = [None, *[-float(i) for i in range(1, len(request.input_ids))]] if request.prompt_logprobs else []
    k = request.top_logprobs
    best = [each[:k] for each in TOP] if k else []
    first = wire.Tokens(
        request.rid, [HELL], [-0.25], top_logprobs=best[:1], prompt_logprobs=prompt,
        prompt_top_logprobs=[[], *[TOP[0][:k]] * (len(prompt) - 1)] if prompt and k else [],
    )  # fmt: skip
    leader.send(first, wire.Tokens(request.rid, [O], [-2.0], finish_reason="length", top_logprobs=best[1:]))


@pytest.fixture
def telling(unified: FrontendProcess) -> FrontendProcess:
    unified.leader.on_generate = lambda request: tell_all(request, unified.leader)
    return unified


@pytest.fixture
def client(telling: FrontendProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{telling.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


def test_sglangs_form_has_prompt_and_output_and_texts_if_wanted(telling):
    body = {"input_ids": [H, E, O], "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    meta = telling.post("/generate", body | {"return_text_in_logprobs": True})[1]["meta_info"]
    assert meta["input_token_logprobs"] == [[None, H, "h"], [-1.0, E, "e"], [-2.0, O, "o"]]
    assert meta["output_token_logprobs"] == [[-0.25, HELL, "hell"], [-2.0, O, "o"]]
    best = [[-0.25, HELL, "hell"], [-1.5, H, "h"]]
    assert meta["input_top_logprobs"] == [None, best, best]
    assert meta["output_top_logprobs"] == [best, [[-0.1, E, "e"], [-0.9, H, "h"]]]
    meta = telling.post("/generate", body | {"logprob_start_len": 2})[1]["meta_info"]
    assert meta["input_token_logprobs"] == [[-2.0, O, None]]
    assert len(meta["input_top_logprobs"]) == 1


def test_what_is_not_asked_for_is_not_asked_of_the_engine(telling):
    body = {"input_ids": [H, E], "return_logprob": True}
    assert telling.post("/generate", body)[1]["meta_info"]["input_token_logprobs"] == []
    asked = telling.leader.wait_for(wire.Generate)
    assert (asked.prompt_logprobs, asked.top_logprobs) == (False, 0)
    assert (
        "output_token_logprobs" not in telling.post("/generate", {"text": "x", "top_logprobs_num": 3})[1]["meta_info"]
    )
    assert telling.leader.received[-1].top_logprobs == 0


def test_each_prompt_of_a_batch_may_ask_for_its_own(telling):
    body = {"input_ids": [[H, E], [H, E]], "return_logprob": [True, False], "logprob_start_len": [1, -1]}
    first, second = telling.post("/generate", body | {"top_logprobs_num": [1, 0]})[1]
    assert first["meta_info"]["input_token_logprobs"] == [[-1.0, E, None]]
    assert "input_token_logprobs" not in second["meta_info"]


def test_a_stream_has_those_of_the_prompt_in_each_event(telling):
    body = {"input_ids": [H, E], "return_logprob": True, "logprob_start_len": 0, "stream": True}
    for each in telling.events("/generate", body):
        assert each["meta_info"]["input_token_logprobs"] == [[None, H, None], [-1.0, E, None]]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"logprob_start_len": 2}, "logprob_start_len must lie in -1..1 for a prompt of 2 tokens, not 2"),
        ({"logprob_start_len": -2}, "logprob_start_len must lie in -1..1"),
        ({"top_logprobs_num": 21}, "0 to 20 can be told, not 21"),
        ({"top_logprobs_num": -1}, "0 to 20 can be told, not -1"),
        ({"top_logprobs_num": [1, 2]}, "top_logprobs_num: a list of 2 for 1 prompts"),
    ],
)
def test_what_can_not_be_told_is_refused(telling, fields, words):
    status, answer = telling.post("/generate", {"input_ids": [H, E], "return_logprob": True} | fields)
    assert (status, words in answer["error"]["message"]) == (400, True), answer


def test_a_prefill_half_shows_none_of_the_prompt_since_the_router_would_show_them_twice(prefill):
    prefill.leader.on_generate = lambda request: tell_all(request, prefill.leader)
    body = {"input_ids": [H, E], "return_logprob": True, "logprob_start_len": 0, "bootstrap_room": 5}
    assert prefill.post("/generate", body)[1]["meta_info"]["input_token_logprobs"] == []
    assert prefill.leader.wait_for(wire.Generate).prompt_logprobs


def test_a_refusal_of_the_engine_is_passed_on(decode):
    words = "prompt log-probabilities are not given between instances yet"
    decode.leader.on_generate = lambda request: decode.leader.send(wire.Failed(request.rid, 400, words))
    body = {"text": "x", "return_logprob": True, "logprob_start_len": 0, "bootstrap_host": "h", "bootstrap_port": 1}
    status, answer = decode.post("/generate", body | {"bootstrap_room": 5})
    assert (status, answer["error"]["message"]) == (400, words)


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_has_the_best_tokens_with_text_and_bytes(client, stream):
    wanted = {"model": "tiny", "messages": HELLO, "logprobs": True, "top_logprobs": 2, "stream": stream}
    answer = client.chat.completions.create(**wanted)
    choices = [chunk.choices[0] for chunk in answer] if stream else [answer.choices[0]]
    content = [each for choice in choices if choice.logprobs for each in choice.logprobs.content]
    assert [(each.token, each.logprob, bytes(each.bytes)) for each in content] == [
        ("hell", -0.25, b"hell"), ("o", -2.0, b"o")]  # fmt: skip
    assert [(each.token, each.logprob) for each in content[1].top_logprobs] == [("e", -0.1), ("h", -0.9)]


@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_has_the_best_tokens_and_the_chosen_one(client, stream):
    answer = client.completions.create(model="tiny", prompt="he", logprobs=2, stream=stream)
    choices = [chunk.choices[0] for chunk in answer] if stream else [answer.choices[0]]
    top = [each for choice in choices for each in choice.logprobs.top_logprobs]
    assert top == [{"hell": -0.25, "h": -1.5}, {"e": -0.1, "h": -0.9, "o": -2.0}]


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_with_logprobs_starts_with_those_of_the_prompt(client, stream):
    answer = client.completions.create(model="tiny", prompt=[H, E], echo=True, logprobs=1, stream=stream)
    choices = [chunk.choices[0] for chunk in answer] if stream else [answer.choices[0]]
    assert "".join(choice.text for choice in choices) == "hehello"
    joined = {name: [x for c in choices for x in getattr(c.logprobs, name)] for name in (
        "tokens", "token_logprobs", "top_logprobs", "text_offset")}  # fmt: skip
    assert joined == {
        "tokens": ["h", "e", "hell", "o"],
        "token_logprobs": [None, -1.0, -0.25, -2.0],
        "top_logprobs": [None, {"hell": -0.25, "e": -1.0}, {"hell": -0.25}, {"e": -0.1, "o": -2.0}],
        "text_offset": [0, 1, 2, 6],
    }


def test_bytes_of_a_token_that_is_a_part_of_a_character_are_told():
    vocabulary = Vocabulary(byte_tokenizer())
    ids = byte_tokenizer().encode("€\n").ids
    assert [vocabulary.token_bytes(each) for each in ids] == [[0xE2], [0x82], [0xAC], [0x0A]]


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("/generate", {"text": "x", "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2},
         answers.GenerateAnswer),
        ("/generate", {"text": "x", "sampling_params": {"n": 2}}, list[answers.GenerateAnswer]),
        ("/v1/completions", {"prompt": "xy", "n": 2, "logprobs": 2, "echo": True}, answers.CompletionAnswer),
        ("/v1/chat/completions", {"messages": HELLO, "logprobs": True, "top_logprobs": 2}, answers.ChatAnswer),
    ],
)  # fmt: skip
def test_answers_are_as_they_are_described(telling, path, body, kind):
    status, answer = telling.post(path, body)
    assert status == 200
    msgspec.json.decode(json.dumps(answer), type=kind)
