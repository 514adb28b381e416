"""The OpenAI routes, seen by OpenAI's own client."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from scripted_leader import CONTEXT, FrontendProcess, byte_tokenizer

from pdjax import wire

HELLO = [{"role": "user", "content": "hi"}]


@pytest.fixture
def client(unified: FrontendProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{unified.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


def last_sent(process: FrontendProcess) -> wire.Generate:
    return [message for message in process.leader.received if isinstance(message, wire.Generate)][-1]


def test_a_completion(client, unified):
    answer = client.completions.create(model="tiny", prompt="hi", temperature=0, seed=5)
    assert answer.choices[0].text == "hello world"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 2
    assert answer.usage.total_tokens == 2 + answer.usage.completion_tokens
    assert last_sent(unified).sampling == wire.SamplingParams(max_new_tokens=16, temperature=0, seed=5)


def test_a_completion_stream(client):
    chunks = list(
        client.completions.create(model="tiny", prompt="hi", stream=True, stream_options={"include_usage": True})
    )
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == "hello world"
    assert [chunk.choices[0].finish_reason for chunk in chunks[-2:-1]] == ["length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens == 2


@pytest.mark.parametrize("prompt", [["a", "bb"], [[1], [2, 3]]])
def test_prompts_in_a_list_are_choices_in_order(client, unified, prompt):
    unified.leader.on_generate = lambda request: unified.leader.reply(request, "x" * len(request.input_ids))
    answer = client.completions.create(model="tiny", prompt=prompt)
    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, "x"), (1, "xx")]
    chunks = list(client.completions.create(model="tiny", prompt=prompt, stream=True))
    assert {chunk.choices[0].index for chunk in chunks} == {0, 1}


def test_token_ids_are_a_prompt(client, unified):
    client.completions.create(model="tiny", prompt=[5, 6, 7])
    assert last_sent(unified).input_ids == [5, 6, 7]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_puts_the_prompt_first(client, stream):
    answer = client.completions.create(model="tiny", prompt="hi ", echo=True, stream=stream)
    texts = [chunk.choices[0].text for chunk in answer] if stream else [answer.choices[0].text]
    assert "".join(texts) == "hi hello world"


def test_a_stream_may_tell_its_usage_as_it_goes(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    streams = (
        client.completions.create(model="tiny", prompt="hi", n=2, stream=True, stream_options=options),
        client.chat.completions.create(model="tiny", messages=HELLO, n=2, stream=True, stream_options=options),
    )
    for stream in streams:
        *pieces, last = stream
        prompt = last.usage.prompt_tokens
        assert all(p.usage.prompt_tokens == prompt for p in pieces)
        assert all(p.usage.total_tokens == prompt + p.usage.completion_tokens for p in pieces)
        told = [[p.usage.completion_tokens for p in pieces if p.choices[0].index == index] for index in (0, 1)]
        assert all(each == sorted(each) and each[-1] for each in told)
        assert sum(each[-1] for each in told) == last.usage.completion_tokens


def test_an_answer_can_be_begun_by_the_client(client, unified):
    begun = [*HELLO, {"role": "assistant", "content": "Well,"}]
    client.chat.completions.create(model="tiny", messages=begun, extra_body={"continue_final_message": True})
    prompt = byte_tokenizer().decode(last_sent(unified).input_ids, skip_special_tokens=False)
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nWell,"
    client.chat.completions.create(model="tiny", messages=begun, extra_body={"continue_final_message": False})
    prompt = byte_tokenizer().decode(last_sent(unified).input_ids, skip_special_tokens=False)
    assert prompt.endswith("Well,<|im_end|>\n<|im_start|>assistant\n")
    client.chat.completions.create(model="tiny", messages=HELLO, extra_body={"add_generation_prompt": False})
    prompt = byte_tokenizer().decode(last_sent(unified).input_ids, skip_special_tokens=False)
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n"


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_can_be_scored_without_a_new_token(client, unified, stream):
    def score(request: wire.Generate) -> None:
        best = [[], *([(token, -0.25)] for token in request.input_ids[1:])]
        logprobs = [None, *([-0.25] * (len(request.input_ids) - 1))]
        unified.leader.send(
            wire.Tokens(
                request.rid, [7], [-1.5], finish_reason="stop", matched=7, top_logprobs=[[(7, -1.5)]],
                prompt_logprobs=logprobs, prompt_top_logprobs=best,
            )
        )  # fmt: skip

    unified.leader.on_generate = score
    answer = client.completions.create(model="tiny", prompt="hi", max_tokens=0, echo=True, logprobs=1, stream=stream)
    (piece,) = answer if stream else [answer]
    (choice,) = piece.choices
    assert (choice.text, choice.finish_reason) == ("hi", "length")
    assert choice.logprobs.tokens == ["h", "i"]
    assert choice.logprobs.token_logprobs == [None, -0.25]
    assert choice.logprobs.top_logprobs == [None, {"i": -0.25}]
    assert stream or answer.usage.completion_tokens == 0


def test_logprobs_of_a_completion(client):
    logprobs = client.completions.create(model="tiny", prompt="hi", logprobs=1).choices[0].logprobs
    assert logprobs is not None
    assert "".join(logprobs.tokens or []) == "hello world"
    assert set(logprobs.token_logprobs or []) == {-0.5}
    assert (logprobs.text_offset or [])[:3] == [0, 4, 5]


def test_a_chat(client, unified):
    answer = client.chat.completions.create(model="tiny", messages=HELLO)
    assert answer.choices[0].message.content == "hello world"
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage is not None
    sent = last_sent(unified)
    assert byte_tokenizer().decode(sent.input_ids, skip_special_tokens=False) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert sent.sampling.max_new_tokens == CONTEXT // 4


def test_a_chat_stream_with_usage_and_timeline(client):
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "hello world"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].model_extra is not None
    assert chunks[-1].model_extra["meta_info"]["timeline"] == {"total_s": 0.5}


def test_logprobs_of_a_chat(client):
    logprobs = client.chat.completions.create(model="tiny", messages=HELLO, logprobs=True).choices[0].logprobs
    assert logprobs is not None
    assert [each.token for each in logprobs.content or []][:2] == ["hell", "o"]
    chunks = list(client.chat.completions.create(model="tiny", messages=HELLO, logprobs=True, stream=True))
    found = [each for chunk in chunks if chunk.choices[0].logprobs for each in chunk.choices[0].logprobs.content or []]
    assert [each.logprob for each in found] == [-0.5] * len(logprobs.content or [])


def test_text_parts_are_joined_and_both_names_of_the_limit_work(client, unified):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": parts}], max_tokens=3)
    assert b"user\nab" in byte_tokenizer().decode(last_sent(unified).input_ids, skip_special_tokens=False).encode()
    assert last_sent(unified).sampling.max_new_tokens == 3
    client.chat.completions.create(model="tiny", messages=HELLO, max_completion_tokens=4)
    assert last_sent(unified).sampling.max_new_tokens == 4


def test_stop_strings(client):
    answer = client.chat.completions.create(model="tiny", messages=HELLO, stop=["wor"])
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("hello ", "stop")
    chunks = list(client.chat.completions.create(model="tiny", messages=HELLO, stop="o w", stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "hell"
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_models(client):
    (listed,) = client.models.list()
    assert listed.id == "tiny"
    assert client.models.retrieve("tiny") == listed


def test_a_model_that_is_not_served_is_not_found(client):
    with pytest.raises(openai.NotFoundError, match="'org/gpt' is not served here; the model is 'tiny'"):
        client.models.retrieve("org/gpt")
    with pytest.raises(openai.NotFoundError, match="'gpt' is not served here"):
        client.completions.create(model="gpt", prompt="x")
    with pytest.raises(openai.NotFoundError, match="'gpt' is not served here"):
        client.chat.completions.create(model="gpt", messages=HELLO)


@pytest.mark.parametrize("model", [None, "default", "unknown", "tiny"])
def test_names_that_stand_for_the_served_model(unified, model):
    assert unified.post("/v1/completions", {"prompt": "x", "model": model})[0] == 200


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        ("completions", {"max_token": 3}, "unknown field 'max_token'; did you mean 'max_tokens'?"),
        ("completions", {"max_tokens": -1}, "max_tokens must be at least 0, not -1"),
        ("completions", {"prompt": None}, "prompt: missing"),
        ("completions", {"prompt": ["a", 1]}, "not both"),
        ("completions", {"prompt": ""}, "the prompt is empty"),
        ("completions", {"prompt": []}, "the prompt is empty"),
        ("completions", {"n": 0}, "n must lie in 1..128, not 0"),
        ("completions", {"n": 100, "prompt": ["x"] * 11}, "1100 samples of 11 prompts are over the 1024"),
        ("completions", {"best_of": 2}, "best_of: only the same as n (1) is supported, not 2"),
        ("completions", {"n": 2, "best_of": 3}, "best_of: only the same as n (2)"),
        ("completions", {"logprobs": 21}, "logprobs must lie in 0..20, not 21"),
        ("completions", {"suffix": "x"}, "suffix: this option is not supported"),
        ("completions", {"priority": 2**31}, "priority must fit in 32 bits"),
        ("completions", {"deadline_s": 0}, "deadline_s must be above 0 seconds"),
        ("completions", {"stream_options": {"include_usage": True}}, "only with stream"),
        ("chat/completions", {"messages": []}, "messages: empty"),
        ("chat/completions", {"messages": None}, "messages: expected array"),
        ("chat/completions", {"messages": [{"content": "x"}]}, "messages[0]: object missing required field role"),
        ("chat/completions", {"messages": [{"role": "user"}]}, "messages[0].content: missing"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
        ("chat/completions", {"continue_final_message": True}, "the last message must be a text of the assistant"),
        ("chat/completions", {"top_logprobs": 3}, "top_logprobs: only with logprobs"),
        ("chat/completions", {"logprobs": True, "top_logprobs": 21}, "0 to 20 can be told, not 21"),
        ("chat/completions", {"tools": [{"type": "function"}]}, "tools[0]: object missing required field function"),
        ("chat/completions", {"response_format": {"type": "xml"}}, "expected text, json_object or json_schema"),
        ("chat/completions", {"response_format": {"type": "json_schema"}}, "json_schema.schema: missing"),
        ("chat/completions", {"response_format": {"type": "json_object"}, "regex": "a"}, "one grammar only"),
        ("chat/completions", {"max_completion_tokens": 0}, "max_completion_tokens must be at least 1"),
        ("chat/completions", {"max_tokens": 0}, "max_tokens must be at least 1"),
        ("chat/completions", {"stop": ["x"] * 17}, "17 stop strings"),
    ],
)
def test_a_clients_fault_is_a_400_in_words(unified, path, fields, words):
    body = {"prompt": "x"} if path == "completions" else {"messages": HELLO}
    status, answer = unified.post(f"/v1/{path}", body | fields)
    assert status == 400
    assert words in answer["error"]["message"]


def test_errors_are_the_clients_own_classes(client, unified):
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.completions.create(model="tiny", prompt="x", max_tokens=-1)
    unified.leader.on_generate = lambda request: unified.leader.send(wire.Failed(request.rid, 503, "going down"))
    with pytest.raises(openai.InternalServerError, match="going down"):
        client.completions.create(model="tiny", prompt="x", stream=True)

    def fail_late(request: wire.Generate) -> None:
        unified.leader.send(wire.Tokens(request.rid, [258], [0.0]), wire.Failed(request.rid, 502, "link lost"))

    unified.leader.on_generate = fail_late
    with pytest.raises(openai.APIError, match="link lost"):
        list(client.chat.completions.create(model="tiny", messages=HELLO, stream=True))


def test_what_a_router_adds_to_a_chat_is_taken(unified):
    body = {
        "messages": [{"role": "user", "content": "hello"}], "model": "tiny", "logprobs": False,
        "max_completion_tokens": 4, "n": 1, "stream": False, "no_stop_trim": False, "ignore_eos": False,
        "continue_final_message": False, "skip_special_tokens": True, "separate_reasoning": True,
        "stream_reasoning": True, "return_hidden_states": False,
        "bootstrap_host": "127.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 3158255633423754340,
    }  # fmt: skip
    assert unified.post("/v1/chat/completions", body)[0] == 200


def test_what_a_router_adds_to_a_completion_is_taken(unified):
    body = {
        "model": "tiny", "prompt": ["a", "b"], "max_tokens": 4, "stream": False, "echo": False,
        "no_stop_trim": False, "ignore_eos": False, "skip_special_tokens": True, "return_hidden_states": False,
        "bootstrap_host": ["127.0.0.1", "127.0.0.1"], "bootstrap_port": [8998, 8998],
        "bootstrap_room": [1659201553823542851, 4659753699005967636],
    }  # fmt: skip
    assert unified.post("/v1/completions", body)[0] == 200
