"""``/generate``: SGLang's request and answer."""

from __future__ import annotations

import itertools

import pytest
from scripted_leader import CONTEXT, FrontendProcess, byte_tokenizer

from pdjax import wire

IDS = byte_tokenizer().encode("hello world").ids


def sent(process: FrontendProcess) -> list[wire.Generate]:
    return [message for message in process.leader.received if isinstance(message, wire.Generate)]


def message(answer) -> str:
    return answer["error"]["message"]


def test_an_answer_has_sglangs_shape(unified):
    status, answer = unified.post("/generate", {"text": "hi", "return_logprob": True, "rid": "mine"})
    assert status == 200
    meta = answer.pop("meta_info")
    assert answer == {"text": "hello world", "output_ids": IDS}
    assert meta.pop("e2e_latency") > 0
    assert meta == {
        "id": "mine",
        "finish_reason": {"type": "length", "length": len(IDS)},
        "prompt_tokens": 2,
        "completion_tokens": len(IDS),
        "cached_tokens": 0,
        "input_token_logprobs": [],
        "output_token_logprobs": [[-0.5, token, None] for token in IDS],
        "timeline": {"total_s": 0.5},
    }


def test_the_engine_gets_ids_and_parameters(unified):
    params = {
        "max_new_tokens": 5,
        "temperature": 0,
        "top_k": -1,
        "top_p": 0.5,
        "stop_token_ids": [3],
        "ignore_eos": True,
    }
    unified.post("/generate", {"text": "hello", "sampling_params": params})
    (request,) = sent(unified)
    assert request.input_ids == byte_tokenizer().encode("hello").ids
    assert request.sampling == wire.SamplingParams(
        max_new_tokens=5, temperature=0, top_p=0.5, stop_token_ids=(3,), ignore_eos=True
    )
    assert request.rendezvous is None


def test_a_stream_is_cumulative_and_ends_with_the_mark(unified):
    events = unified.events("/generate", {"text": "hi", "stream": True, "return_logprob": True})
    assert [event["output_ids"] for event in events] == [IDS[: i + 1] for i in range(len(IDS))]
    texts = [event["text"] for event in events]
    assert texts[-1] == "hello world"
    assert all(after.startswith(before) for before, after in itertools.pairwise(texts))
    assert [event["meta_info"]["finish_reason"] for event in events[:-1]] == [None] * (len(IDS) - 1)
    assert all(event["meta_info"]["input_token_logprobs"] == [] for event in events)


@pytest.mark.parametrize("body", [{"text": ["a", "bb"]}, {"input_ids": [[1], [2, 3]]}])
def test_a_batch_is_answered_in_order(unified, body):
    unified.leader.on_generate = lambda request: unified.leader.reply(request, "x" * len(request.input_ids))
    status, answers = unified.post("/generate", body | {"rid": "r"})
    assert status == 200
    assert [answer["text"] for answer in answers] == ["x", "xx"]
    assert [answer["meta_info"]["id"] for answer in answers] == ["r_0", "r_1"]


def test_a_batch_of_one_is_answered_by_a_list(unified):
    assert isinstance(unified.post("/generate", {"input_ids": [[1]]})[1], list)


def test_the_events_of_a_batch_tell_whose_they_are(unified):
    events = unified.events("/generate", {"text": ["a", "b"], "stream": True})
    last = {event["index"]: event["text"] for event in events}
    assert last == {0: "hello world", 1: "hello world"}


def test_each_prompt_may_have_parameters_of_its_own(unified):
    params = [{"max_new_tokens": 1}, {"max_new_tokens": 2}]
    unified.post("/generate", {"text": ["a", "b"], "sampling_params": params})
    assert [request.sampling.max_new_tokens for request in sent(unified)] == [1, 2]


def test_what_a_router_adds_is_tolerated(unified):
    body = {
        "text": "hi", "model": None, "sampling_params": {"temperature": 0.0, "max_new_tokens": 4},
        "return_text_in_logprobs": False, "stream": False, "log_metrics": True, "return_hidden_states": False,
        "background": False, "no_logs": False, "return_bytes": False, "return_entropy": False,
        "bootstrap_host": "127.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 5710775682013253410,
    }  # fmt: skip
    assert unified.post("/generate", body)[0] == 200


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "not JSON"),
        (b"[]", "must be a JSON object"),
        (b"", "not JSON"),
        ({}, "text or input_ids"),
        ({"text": "a", "input_ids": [1]}, "text or input_ids"),
        ({"text": ""}, "the prompt is empty"),
        ({"text": []}, "1 to 1024 prompts, not 0"),
        ({"input_ids": []}, "the prompt is empty"),
        ({"input_ids": [[1], []]}, "the prompt is empty"),
        ({"input_ids": [1, [2]]}, "not both"),
        ({"input_ids": [1, 264]}, "264 is not in the vocabulary of 264 tokens"),
        ({"input_ids": [-1]}, "-1 is not in the vocabulary"),
        ({"text": 5}, "text: expected str"),
        ({"text": "a", "stream": "yes"}, "stream: expected bool"),
        ({"text": "a", "sampling_params": {"max_tokens": 5}}, "'max_tokens' in sampling_params; did you mean"),
        ({"text": ["a"], "sampling_params": [{}, {}]}, "a list of 2 for 1 prompts"),
        ({"text": ["a", "b"], "rid": ["x"]}, "rid: a list of 1 for 2 prompts"),
        ({"text": ["a", "b"], "rid": ["x", "x"]}, "running already"),
        ({"text": "a", "lora_path": "x"}, "lora_path: this option is not supported"),
        ({"input_ids": [1] * CONTEXT}, f"{CONTEXT} tokens; with at least one new token that is over"),
    ],
)
def test_a_clients_fault_is_a_400_in_words(unified, body, words):
    status, answer = unified.post("/generate", body)
    assert status == 400
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["code"] == 400
    assert words in message(answer)
    assert not sent(unified)


def test_new_tokens_are_cut_to_what_the_context_leaves(unified):
    unified.post("/generate", {"input_ids": [1] * (CONTEXT - 3), "sampling_params": {"max_new_tokens": 50}})
    unified.post("/generate", {"input_ids": [1] * (CONTEXT - 1)})
    assert [request.sampling.max_new_tokens for request in sent(unified)] == [3, 1]


def test_what_a_stop_string_ends_has_a_timeline_too(unified):
    def reply(request: wire.Generate) -> None:
        unified.leader.send(wire.Tokens(request.rid, [7], [0.0], timeline={"queue_s": 0.25}))
        unified.leader.reply(request, "and so on")

    unified.leader.on_generate = reply
    first, *others = unified.events("/generate", {"text": "x", "stream": True, "sampling_params": {"stop": "so"}})
    assert "timeline" not in first["meta_info"]
    timeline = others[-1]["meta_info"]["timeline"]
    assert timeline["queue_s"] == 0.25 and timeline["total_s"] > 0


@pytest.mark.parametrize(("keep", "text"), [(False, "hello "), (True, "hello wor")])
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_text_and_engine_request(unified, keep, text, stream):
    unified.leader.on_generate = lambda request: unified.leader.send(  # and it never finishes by itself
        *(wire.Tokens(request.rid, [token], [0.0]) for token in IDS)
    )
    params = {"stop": ["wor", "zzz"], "no_stop_trim": keep}
    body = {"text": "hi", "sampling_params": params, "stream": stream}
    answer = unified.events("/generate", body)[-1] if stream else unified.post("/generate", body)[1]
    assert answer["text"] == text
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": "wor"}
    unified.leader.wait_for(wire.Abort, lambda abort: abort.rid == answer["meta_info"]["id"])


def test_no_start_of_a_stop_string_is_streamed(unified):
    events = unified.events("/generate", {"text": "x", "stream": True, "sampling_params": {"stop": "o world"}})
    assert {event["text"] for event in events} == {"hell"}


def test_text_that_looked_like_a_stop_string_comes_at_the_end(unified):
    status, answer = unified.post("/generate", {"text": "x", "sampling_params": {"stop": "world!"}})
    assert (status, answer["text"]) == (200, "hello world")
    assert answer["meta_info"]["finish_reason"]["type"] == "length"


@pytest.mark.parametrize(
    ("params", "text"), [({}, "hi"), ({"no_stop_trim": True, "skip_special_tokens": False}, "hi<|im_end|>")]
)
def test_a_stop_token_is_in_the_ids_and_not_in_the_text(unified, params, text):
    ids = byte_tokenizer().encode("hi<|im_end|>").ids
    unified.leader.on_generate = lambda request: unified.leader.send(
        wire.Tokens(request.rid, ids, [0.0] * len(ids), finish_reason="stop", matched=ids[-1])
    )
    answer = unified.post("/generate", {"text": "x", "sampling_params": params})[1]
    assert (answer["text"], answer["output_ids"]) == (text, ids)
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": ids[-1]}


def test_a_failure_before_the_first_token_has_its_status_also_on_a_stream(unified):
    unified.leader.on_generate = lambda request: unified.leader.send(wire.Failed(request.rid, 429, "too many wait"))
    for stream in (False, True):
        status, answer = unified.post("/generate", {"text": "x", "stream": stream})
        assert (status, message(answer), answer["error"]["type"]) == (429, "too many wait", "rate_limit_error")


def test_a_failure_after_the_first_token_is_an_event(unified):
    def fail(request: wire.Generate) -> None:
        unified.leader.send(wire.Tokens(request.rid, IDS[:1], [0.0]), wire.Failed(request.rid, 502, "the link is gone"))

    unified.leader.on_generate = fail
    status, text = unified.post("/generate", {"text": "x", "stream": True})
    assert status == 200
    first, last, end = text.split("\n\n")
    assert first.startswith('data: {"text":"hell"')
    assert last == 'data: {"error":{"message":"the link is gone","type":"server_error","code":502}}'
    assert end == ""


def test_one_failure_in_a_batch_ends_the_others(unified):
    def fail_the_second(request: wire.Generate) -> None:
        if request.rid == "r_1":
            unified.leader.send(wire.Failed(request.rid, 400, "no pages"))

    unified.leader.on_generate = fail_the_second
    status, answer = unified.post("/generate", {"text": ["a", "b"], "rid": "r"})
    assert (status, message(answer)) == (400, "no pages")
    unified.leader.wait_for(wire.Abort, lambda abort: abort.rid == "r_0")


def test_a_text_that_holds_the_end_mark_does_not_end_the_stream(unified):
    unified.leader.on_generate = lambda request: unified.leader.reply(request, "data: [DONE]", pieces=100)
    status, text = unified.post("/generate", {"text": "x", "stream": True})
    assert status == 200
    assert text.count("data: [DONE]") == 1
    assert unified.events("/generate", {"text": "x", "stream": True})[-1]["text"] == "data: [DONE]"


def test_without_new_tokens_a_prompt_is_only_read(unified):
    body = {"text": ["hi", "ho"], "sampling_params": {"max_new_tokens": 0}, "return_logprob": True}
    unified.leader.on_generate = lambda request: unified.leader.reply(request, "h")
    status, answers = unified.post("/generate", body)
    assert status == 200
    for answer in answers:
        assert (answer["text"], answer["output_ids"]) == ("", [])
        meta = answer["meta_info"]
        assert (meta["finish_reason"], meta["completion_tokens"]) == ({"type": "length", "length": 0}, 0)
        assert meta["output_token_logprobs"] == []
