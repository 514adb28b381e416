"""A stream goes on at another instance after the last tokens that were told, as if nothing had happened."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_leader import FrontendProcess, byte_tokenizer, fetch

from pdjax import wire

ROOM = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 9000, "bootstrap_room": 100}
TOOLS = [{"type": "function", "function": {"name": "time"}}]
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
OPENING, TOLD = ": pdjax opening ", ": pdjax told "


class Leader:
    """Plays the same frames of each sample to whoever runs it, from the token on that it asks for.

    Frames of several samples take turns, whenever all that are run have come.
    """

    def __init__(self, process: FrontendProcess, frames: dict[str, list[wire.Tokens]]) -> None:
        self.frames = frames  # by the end of the request's id
        self.asked: list[wire.Generate] = []
        self._process = process
        self._waiting: list[wire.Generate] = []
        self._lock = threading.Lock()
        self.runs = len(frames)
        process.leader.on_generate = self._generate

    def _generate(self, request: wire.Generate) -> None:
        self.asked.append(request)
        self._waiting.append(request)
        if len(self._waiting) < self.runs:
            return
        queues = [self._left(each) for each in self._waiting]
        self._waiting = []
        while any(queues):
            for queue in queues:
                if queue:
                    self._process.leader.send(queue.pop(0))

    def _left(self, request: wire.Generate) -> list[wire.Tokens]:
        (frames,) = [frames for end, frames in self.frames.items() if request.rid.endswith(end)]
        seen, left = 0, []
        for frame in frames:
            if seen >= len(request.output_ids):
                left.append(wire.Tokens(request.rid, *[getattr(frame, name) for name in FIELDS]))
            seen += len(frame.token_ids)
        return left


FIELDS = wire.Tokens.__struct_fields__[1:]


def cut(text: str, sizes: list[int], *, finish: str = "length", top: bool = False) -> list[wire.Tokens]:
    """A text's tokens in frames of these sizes, over and over."""
    ids = byte_tokenizer().encode(text).ids
    frames: list[wire.Tokens] = []
    start = 0
    while start < len(ids) or not frames:
        part = ids[start : start + sizes[len(frames) % len(sizes)]]
        more: dict[str, Any] = {"top_logprobs": [[(7, -0.1)]] * len(part)} if top else {}
        if not frames:
            more |= {"cached_tokens": 2, "timeline": {"queue_s": 1.0}}
        start += len(part)
        if start >= len(ids):
            more |= {"finish_reason": finish, "timeline": {"total_s": 2.0}}
        frames.append(wire.Tokens("", part, [-0.5 - each for each in range(len(part))], **more))
    return frames


def blocks(process: FrontendProcess, path: str, body: dict, *, noted: bool = True) -> list[str]:
    headers = {"content-type": "application/json"} | ({"x-pdjax-resumable": "1"} if noted else {})
    data = json.dumps({**body, **ROOM, "stream": True}).encode()
    status, said = fetch(urllib.request.Request(process.url + path, data, headers))
    assert status == 200, said
    parts = said.decode().split("\n\n")
    assert parts.pop() == ""
    return parts


def plain(parts: list[str]) -> list[Any]:
    """What a client sees, but for times and drawn ids."""
    seen: list[Any] = []
    for part in parts:
        if not part.startswith(":"):
            text = part.removeprefix("data: ")
            seen.append(text if text == "[DONE]" else blind(json.loads(text)))
    return seen


def blind(value: Any) -> Any:
    if isinstance(value, list):
        return [blind(each) for each in value]
    if not isinstance(value, dict):
        return value
    hidden = {"e2e_latency", "timeline"} | ({"id"} if value.get("type") == "function" else set())
    return {key: blind(each) for key, each in value.items() if key not in hidden}


def by_sample(events: list[Any]) -> list[Any]:
    """Samples take turns, and may do so in another order; what belongs to none stays at the end."""

    def sample(event: Any) -> int:
        event = event if isinstance(event, dict) else {"choices": []}
        return event.get("index", next((choice["index"] for choice in event.get("choices", [{"index": 0}])), 99))

    return sorted(events, key=sample)


def check_every_cut(process: FrontendProcess, path: str, body: dict, leader: Leader) -> None:
    whole = blocks(process, path, body)
    opening = json.loads(whole[0].removeprefix(OPENING))
    ends = [0, *(place for place, part in enumerate(whole) if part.startswith(TOLD))]
    for end in ends:
        told = [json.loads(part.removeprefix(TOLD)) for part in whole[: end + 1] if part.startswith(TOLD)]
        ended = {frame["rid"] for frame in told if "finish_reason" in frame}
        resume = {"id": opening["id"], "began": opening["began"], "told": told}
        leader.runs, leader.asked = len(leader.frames) - len(ended), []
        stops = body.get("stop") or body.get("sampling_params", {}).get("stop")
        if stops:
            leader.runs = len(leader.frames)  # a sample that a stop string has ended is asked for no more
            assert len(leader.frames) == 1
        rest = blocks(process, path, body | {"rid": opening["rid"], "pdjax_resume": resume})
        assert json.loads(rest[0].removeprefix(OPENING)) == opening
        assert by_sample(plain(whole[: end + 1]) + plain(rest)) == by_sample(plain(whole)), end
        known = {request.rid: request.output_ids for request in leader.asked}
        for request in leader.asked:
            number = request.rid.rpartition("-")[2] if len(leader.frames) > 1 else "0"
            ids = [token for frame in told if frame["rid"] == number for token in frame["token_ids"]]
            assert known[request.rid] == ids


TEXT = st.text(alphabet="ab é😀你\n<", min_size=1, max_size=16)
SIZES = st.lists(st.integers(1, 3), min_size=1, max_size=4)
ROUTES: list[tuple[str, dict]] = [
    ("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 100}}),
    (
        "/generate",
        {"text": "x", "return_logprob": True, "top_logprobs_num": 1, "sampling_params": {"stop": ["ab", "é"]}},
    ),
    ("/v1/completions", {"prompt": "x", "echo": True, "logprobs": 1, "stream_options": {"include_usage": True}}),
    ("/v1/completions", {"prompt": "x", "stop": ["b<"]}),
    ("/v1/chat/completions", CHAT | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
    ("/v1/chat/completions", CHAT | {"tools": TOOLS, "logprobs": True, "top_logprobs": 1}),
]


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontendProcess]:
    process = FrontendProcess(tmp_path_factory.mktemp("resume"), "decode", max_context=4000)
    yield process
    process.close()


@settings(max_examples=40, deadline=None)
@given(route=st.sampled_from(ROUTES), text=TEXT, sizes=SIZES)
def test_what_follows_after_any_cut_is_what_followed(process, route, text, sizes):
    path, body = route
    frames = cut(text, sizes, top="logprobs" in body or "return_logprob" in body)
    check_every_cut(process, path, body, Leader(process, {"": frames}))


@pytest.mark.parametrize("text", ['I look. <tool_call>{"name": "time"}</tool_call>', '{"name": "time"}', "a <tool b"])
def test_calls_of_tools_are_told_once(process, text):
    body = CHAT | {"tools": TOOLS}
    check_every_cut(process, "/v1/chat/completions", body, Leader(process, {"": cut(text, [3], finish="stop")}))


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/chat/completions", CHAT), ("/generate", {"text": "x"}), ("/v1/completions", {"prompt": "x"})],
)
def test_each_sample_goes_on_where_it_was_and_one_that_had_ended_is_not_told_again(process, path, body):
    options = (
        {"sampling_params": {"n": 2}} if path == "/generate" else {"n": 2, "stream_options": {"include_usage": True}}
    )
    leader = Leader(process, {"-0": cut("hello", [1]), "-1": cut("a longer answer", [2])})
    check_every_cut(process, path, body | options, leader)


def test_prompts_of_a_batch_go_on_each_by_itself(process):
    leader = Leader(process, {"_0": cut("one", [1]), "_1": cut("another", [2])})
    whole = blocks(process, "/generate", {"text": ["x", "y"], "rid": "mine"})
    opening = json.loads(whole[0].removeprefix(OPENING))
    assert opening["rid"] == ["mine_0", "mine_1"]
    told = [json.loads(part.removeprefix(TOLD)) for part in whole if part.startswith(TOLD)][:1]
    leader.asked = []
    body = {"text": ["x", "y"], "rid": opening["rid"], "pdjax_resume": {"id": "", "began": 0.0, "told": told}}
    rest = blocks(process, "/generate", body)
    assert [len(request.output_ids) for request in leader.asked] == [1, 0]
    assert by_sample(plain(whole)[1:]) == by_sample(plain(rest))


def test_a_client_that_does_not_ask_is_told_nothing_but_its_events(process):
    Leader(process, {"": cut("hello", [1])})
    parts = blocks(process, "/generate", {"text": "x"}, noted=False)
    assert parts and all(part.startswith("data: ") for part in parts)


def test_a_prefill_instance_runs_only_what_had_not_begun(prefill):
    told = [{"rid": "0", "token_ids": [5], "logprobs": [-1.0], "type": "tokens"}]
    body = CHAT | {"n": 2, "stream": True, "bootstrap_room": 5}
    resume = {"id": "a", "began": 0.0, "told": told}
    status, _ = prefill.post("/v1/chat/completions", body | {"pdjax_resume": resume})
    assert status == 200
    (request,) = [each for each in prefill.leader.received if isinstance(each, wire.Generate)]
    assert request.rid.endswith("-1") and request.rendezvous is not None and request.rendezvous.room == 6
    prefill.leader.received.clear()
    resume["told"] = [*told, told[0] | {"rid": "1"}]
    status, _ = prefill.post("/v1/chat/completions", body | {"pdjax_resume": resume})
    assert status == 200 and not any(isinstance(each, wire.Generate) for each in prefill.leader.received)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rid": "1"}, "none of the 1 samples"),
        ({"rid": "x"}, "none of the 1 samples"),
        ({"token_ids": [-1]}, "not in the vocabulary"),
        ({"token_ids": [1, 2]}, "one log-probability"),
        ({"token_ids": None}, "pdjax_resume"),
    ],
)
def test_what_makes_no_sense_is_refused_in_words(process, change, words):
    frame = {"type": "tokens", "rid": "0", "token_ids": [5], "logprobs": [-1.0]} | change
    body = {"text": "x", "stream": True, "pdjax_resume": {"id": "", "began": 0.0, "told": [frame]}} | ROOM
    status, said = process.post("/generate", body)
    assert status == 400 and words in said["error"]["message"]


def test_only_streams_go_on(process):
    status, said = process.post("/generate", {"text": "x", "pdjax_resume": {"id": "", "began": 0.0, "told": []}} | ROOM)
    assert status == 400 and "stream" in said["error"]["message"]
