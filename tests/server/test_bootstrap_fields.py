"""What a prefill or a decode instance asks of a request, and what it makes of its room."""

from __future__ import annotations

import pytest
from scripted_leader import FrontendProcess

from pdjax import wire

ROOM_MAX = 2**63 - 1
MEETING = {"bootstrap_host": "10.0.0.1", "bootstrap_port": 8998, "bootstrap_room": ROOM_MAX}


def sent(process: FrontendProcess) -> list[wire.Generate]:
    return [message for message in process.leader.received if isinstance(message, wire.Generate)]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "x"}),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ],
)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_request_without_a_room_is_refused_and_one_with_a_room_is_taken(role, path, body, request):
    process = request.getfixturevalue(role)
    status, answer = process.post(path, body)
    assert status == 400
    assert f"bootstrap_room: a {role} instance takes no request without one" in answer["error"]["message"]
    assert process.post(path, body | MEETING)[0] == 200
    assert [each.rendezvous for each in sent(process)] == [wire.Rendezvous("10.0.0.1", 8998, ROOM_MAX)]


def test_a_unified_instance_takes_no_notice_of_rooms(unified):
    assert unified.post("/generate", {"text": "x"} | MEETING | {"bootstrap_room": -5})[0] == 200
    assert sent(unified)[0].rendezvous is None


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
def test_prefill_makes_one_token_and_answers_at_once_also_for_a_stream(prefill, path):
    prompt = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}
    body = {"text": "x", "sampling_params": {"max_new_tokens": 9, "min_new_tokens": 3}}
    body = (body if path == "/generate" else prompt | {"max_tokens": 9, "min_tokens": 3}) | MEETING | {"stream": True}
    status, answer = prefill.post(path, body)
    assert status == 200
    assert isinstance(answer, dict)
    assert (sent(prefill)[0].sampling.max_new_tokens, sent(prefill)[0].sampling.min_new_tokens) == (1, 1)


def test_room_zero_is_a_room(decode):
    assert decode.post("/generate", {"text": "x"} | MEETING | {"bootstrap_room": 0})[0] == 200
    assert sent(decode)[0].rendezvous == wire.Rendezvous("10.0.0.1", 8998, 0)


@pytest.mark.parametrize("body", [{"text": ["a", "b", "c"]}, {"input_ids": [[1], [2], [3]]}])
def test_a_single_room_counts_up_over_a_batch(decode, body):
    assert decode.post("/generate", body | MEETING | {"bootstrap_room": 7})[0] == 200
    assert [each.rendezvous.room for each in sent(decode) if each.rendezvous] == [7, 8, 9]


def test_lists_give_each_prompt_its_own(decode):
    meeting = {"bootstrap_host": ["a", "b"], "bootstrap_port": [1, 2], "bootstrap_room": [5, ROOM_MAX]}
    assert decode.post("/v1/completions", {"prompt": ["x", "y"]} | meeting)[0] == 200
    assert [each.rendezvous for each in sent(decode)] == [
        wire.Rendezvous("a", 1, 5), wire.Rendezvous("b", 2, ROOM_MAX)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("meeting", "words"),
    [
        ({"bootstrap_room": -1}, "0..2^63-1"),
        ({"bootstrap_room": 2**63}, "0..2^63-1"),
        ({"bootstrap_room": 2**80}, "bootstrap_room"),
        ({"bootstrap_room": 1.5}, "bootstrap_room: expected int"),
        ({"bootstrap_room": "7"}, "bootstrap_room: expected int"),
        ({"bootstrap_room": [1, 2]}, "bootstrap_room: a list of 2 for 1 prompts"),
        ({"bootstrap_host": None}, "bootstrap_host"),
        ({"bootstrap_port": None}, "bootstrap_port: null"),
        ({"bootstrap_port": 0}, "1..65535"),
        ({"bootstrap_port": 65536}, "1..65535"),
        ({"bootstrap_port": [8998, 8998]}, "bootstrap_port: a list of 2"),
    ],
)
def test_a_meeting_that_can_not_be_is_refused_in_words(decode, meeting, words):
    status, answer = decode.post("/generate", {"text": "x"} | MEETING | meeting)
    assert status == 400
    assert words in answer["error"]["message"]


def test_a_batch_may_not_count_beyond_the_last_room(decode):
    assert decode.post("/generate", {"text": ["a", "b"]} | MEETING)[0] == 400
    assert not sent(decode)


def test_prefill_knows_its_own_bootstrap_address(prefill):
    assert prefill.post("/generate", {"text": "x", "bootstrap_port": None, "bootstrap_room": 1})[0] == 200
    assert sent(prefill)[0].rendezvous == wire.Rendezvous("127.0.0.1", 8998, 1)


PROMPTS = [
    ("/generate", {"text": "x", "sampling_params": {"n": 2}}),
    ("/v1/completions", {"prompt": "x", "n": 2}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "n": 2}),
]


@pytest.mark.parametrize(("path", "body"), PROMPTS)
def test_a_dp_rank_that_a_client_names_reaches_the_engine(path, body, unified, decode, prefill):
    assert unified.post(path, body | {"data_parallel_rank": 3})[0] == 200
    assert [each.dp_rank for each in sent(unified)] == [3, 3]
    assert decode.post(path, body | MEETING | {"bootstrap_room": 4, "routed_dp_rank": 0})[0] == 200
    assert [each.dp_rank for each in sent(decode)] == [0, None], "the second sample has a room of its own"
    assert decode.post(path, body | MEETING | {"bootstrap_room": 4, "disagg_prefill_dp_rank": 1})[0] == 200
    assert [each.dp_rank for each in sent(decode)[2:]] == [None, None]
    assert prefill.post(path, body | MEETING | {"bootstrap_room": 4, "disagg_prefill_dp_rank": 1})[0] == 200
    assert [each.dp_rank for each in sent(prefill)] == [1, None]
    status, answer = prefill.post(path, body | MEETING | {"data_parallel_rank": 0, "disagg_prefill_dp_rank": 1})
    assert status == 400
    assert "asks for several dp ranks: [0, 1]" in answer["error"]["message"]
