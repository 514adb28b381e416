"""Several samples of one prompt: ids, seeds, rooms, order and what they cost."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from scripted_leader import FrontendProcess

from pdjax import wire

ROOM_MAX = 2**63 - 1
HELLO = [{"role": "user", "content": "hi"}]
MEETING = {"bootstrap_host": "10.0.0.1", "bootstrap_port": 8998}


def sent(process: FrontendProcess) -> list[wire.Generate]:
    return [message for message in process.leader.received if isinstance(message, wire.Generate)]


def rooms(process: FrontendProcess) -> list[int]:
    return [each.rendezvous.room for each in sent(process) if each.rendezvous]


def say_the_id(process: FrontendProcess) -> FrontendProcess:
    process.leader.on_generate = lambda request: process.leader.reply(request, request.rid[-3:])
    return process


def test_samples_have_ids_and_seeds_of_their_own(unified):
    body = {"text": "hi", "rid": "r", "sampling_params": {"n": 3, "seed": 7}}
    status, answer = say_the_id(unified).post("/generate", body)
    assert status == 200
    assert [each["meta_info"]["id"] for each in answer] == ["r-0", "r-1", "r-2"]
    assert [each["text"] for each in answer] == ["r-0", "r-1", "r-2"]
    assert [each.sampling.seed for each in sent(unified)] == [7, 8, 9]
    assert [each.sample_of for each in sent(unified)] == ["", "r-0", "r-0"]


def test_samples_of_a_batch_come_prompt_by_prompt(unified):
    body = {"text": ["a", "b"], "rid": "r", "sampling_params": {"n": 2, "seed": 7}}
    answer = say_the_id(unified).post("/generate", body)[1]
    assert [each["meta_info"]["id"] for each in answer] == ["r_0-0", "r_0-1", "r_1-0", "r_1-1"]
    assert [each.sampling.seed for each in sent(unified)] == [7, 8, 7, 8]
    events = unified.events("/generate", body | {"stream": True})
    assert {event["index"]: event["text"] for event in events} == {0: "0-0", 1: "0-1", 2: "1-0", 3: "1-1"}


@pytest.mark.parametrize("route", ["completions", "chat"])
def test_openais_client_gets_its_choices_and_pays_for_the_prompt_once(unified, route):
    say_the_id(unified)
    with openai.OpenAI(base_url=f"{unified.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        create: Any = client.chat.completions.create if route == "chat" else client.completions.create
        wanted: dict[str, Any] = {"messages": HELLO} if route == "chat" else {"prompt": "hello", "best_of": 2}
        wanted |= {"model": "tiny", "n": 2, "extra_body": {"rid": "r"}}
        answer = create(**wanted)
        texts = [each.message.content if route == "chat" else each.text for each in answer.choices]
        assert [each.index for each in answer.choices] == [0, 1]
        assert texts == ["r-0", "r-1"]
        assert answer.usage.prompt_tokens == len(sent(unified)[0].input_ids)
        assert answer.usage.completion_tokens == 6
        streamed = {0: "", 1: ""}
        ends = []
        chunks = list(create(**wanted, stream=True, stream_options={"include_usage": True}))
        for chunk in chunks:
            for choice in chunk.choices:
                streamed[choice.index] += (choice.delta.content if route == "chat" else choice.text) or ""
                ends += [choice.index] if choice.finish_reason else []
        assert streamed == {0: "r-0", 1: "r-1"}
        assert sorted(ends) == [0, 1]
        assert chunks[-1].usage.prompt_tokens == answer.usage.prompt_tokens


CHAT = ("/v1/chat/completions", {"messages": HELLO, "n": 2})
TWO_PROMPTS = ("/v1/completions", {"prompt": ["a", "b"], "n": 2})
NATIVE = ("/generate", {"text": "x", "sampling_params": {"n": 2}})


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("call", "room", "wanted"),
    [
        (NATIVE, 7, [7, 8]),
        (CHAT, [70, 5], [70, 5]),
        (CHAT, 7, [7, 8]),
        (TWO_PROMPTS, 7, [7, 8, 9, 10]),
        (TWO_PROMPTS, [70, 5], [70, 71, 5, 6]),
        (TWO_PROMPTS, [4, 3, 2, 1], [4, 3, 2, 1]),
    ],
)
def test_both_halves_derive_the_same_rooms(role, call, room, wanted, request):
    process = request.getfixturevalue(role)
    path, body = call
    each = {name: [value] * len(room) for name, value in MEETING.items()} if isinstance(room, list) else MEETING
    status, answer = process.post(path, body | each | {"bootstrap_room": room})
    assert status == 200, answer
    assert rooms(process) == wanted


def test_no_sample_may_have_a_room_beyond_the_last(decode):
    status, answer = decode.post("/generate", NATIVE[1] | MEETING | {"bootstrap_room": ROOM_MAX})
    assert (status, "0..2^63-1" in answer["error"]["message"]) == (400, True)
    assert not sent(decode)


def test_priority_and_deadline_reach_the_engine(unified):
    for path, body in (NATIVE, CHAT, TWO_PROMPTS):
        unified.leader.received.clear()
        assert unified.post(path, body | {"priority": -3, "deadline_s": 2.5})[0] == 200
        assert {(each.priority, each.deadline_s) for each in sent(unified)} == {(-3, 2.5)}


@pytest.mark.parametrize(
    ("wanted", "grammar"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, wire.Grammar("json_object")),
        (
            {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}, "strict": True}},
            wire.Grammar("json_schema", '{"type":"integer"}'),
        ),
    ],
)
def test_a_response_format_reaches_the_engine(unified, wanted, grammar):
    for path, body in (CHAT, TWO_PROMPTS):
        unified.leader.received.clear()
        assert unified.post(path, body | {"response_format": wanted})[0] == 200
        assert {each.sampling.grammar for each in sent(unified)} == {grammar}
