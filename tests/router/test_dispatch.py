"""What a client sees of a pair of instances through the router, when all is well and when one of them is not."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time

import pytest
from aiohttp import web
from upstream import PATIENCE, Client, Handler, Upstream, asked, dies, message, streams, wait_until, waits_forever

from pdjax.web import MAX_BODY

ROOM_MAX = 2**63 - 1
AT_ONCE = 10.0  # seconds; the other side would wait for 600


def fails(status: int, message: str, *, once_asked: Upstream) -> Handler:
    """Answers with an error, after another upstream has got its half of the request."""

    async def handle(request: web.Request, body: dict) -> web.StreamResponse:
        await asked(once_asked, body)
        return web.json_response({"error": {"message": message}}, status=status)

    return handle


def test_both_instances_get_the_same_body_with_a_room_and_the_client_gets_decodes_answer(router, prefill, decode):
    status, body = router.request("/generate", {"text": "hi", "sampling_params": {"temperature": 0.7}})
    assert status == 200
    assert prefill.bodies == decode.bodies
    (sent,) = decode.bodies
    assert sent["text"] == "hi"
    assert sent["sampling_params"] == {"temperature": 0.7}
    assert sent["bootstrap_host"] == "127.0.0.1"
    assert sent["bootstrap_port"] == 8998
    assert 0 <= sent["bootstrap_room"] <= ROOM_MAX
    assert json.loads(body) == {"text": "fine", "room": sent["bootstrap_room"]}


@pytest.mark.parametrize(
    ("path", "body", "count"),
    [
        ("/generate", {"text": ["a", "b"]}, 2),
        ("/generate", {"input_ids": [[1, 2], [3]]}, 2),
        ("/generate", {"input_ids": [[1, 2]]}, 1),
        ("/v1/completions", {"prompt": ["a", "b", "c"]}, 3),
        ("/v1/completions", {"prompt": [[1], [2]]}, 2),
        ("/v1/completions", {"prompt": ["a", "b"], "n": 2}, 2),
        ("/v1/chat/completions", {"messages": [], "n": 3}, 3),
    ],
)
def test_each_prompt_of_a_list_and_each_sample_of_a_chat_gets_a_room_of_its_own(
    router, prefill, decode, path, body, count
):
    assert router.request(path, body)[0] == 200
    (sent,) = decode.bodies
    assert len(set(sent["bootstrap_room"])) == count
    assert sent["bootstrap_host"] == ["127.0.0.1"] * count
    assert sent["bootstrap_port"] == [8998] * count


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"input_ids": [1, 2]}),
        ("/v1/completions", {"prompt": [1, 2]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    ],
)
def test_one_prompt_gets_one_room(router, prefill, decode, path, body):
    assert router.request(path, body)[0] == 200
    assert isinstance(decode.bodies[0]["bootstrap_room"], int)


def test_large_integers_and_what_a_client_put_into_bootstrap_fields(router, prefill, decode):
    body = {"text": "x", "sampling_params": {"sampling_seed": ROOM_MAX}, "bootstrap_room": 5, "bootstrap_host": "evil"}
    assert router.request("/generate", body)[0] == 200
    sent = decode.bodies[0]
    assert sent["sampling_params"]["sampling_seed"] == ROOM_MAX
    assert sent["bootstrap_host"] == "127.0.0.1"
    assert sent["bootstrap_room"] != 5


def test_a_stream_reaches_the_client_while_it_is_made_and_while_prefill_still_answers(router, prefill, decode):
    first = threading.Event()

    async def after_the_first(request: web.Request, body: dict) -> web.StreamResponse:
        while not first.is_set():
            await asyncio.sleep(0.01)
        return web.Response()

    prefill.handle = waits_forever()
    decode.handle = streams("data: 1\n\n", then=after_the_first)
    client = Client(router, {"text": "x", "stream": True})
    response = client.connection.getresponse()
    assert response.headers["content-type"] == "text/event-stream"
    assert response.readline() == b"data: 1\n"
    first.set()
    assert response.read() == b"\n"
    client.leave()


@pytest.mark.parametrize("text", [b"{", b"[1]", b"", b"\xff"])
def test_a_body_that_is_no_json_object_is_refused_in_words(router, prefill, decode, text):
    status, body = router.request("/generate", text)
    assert status == 400
    assert "JSON" in message(body)
    assert not prefill.bodies


def test_a_body_that_is_too_long_is_refused_in_words(router, prefill, decode):
    host, port = router.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
        head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {MAX_BODY + 2}\r\n\r\n".encode()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(head + b"x" * (MAX_BODY + 1))
        assert connection.recv(100).startswith(b"HTTP/1.1 400")


def test_a_prefill_error_ends_the_request_at_once_although_decode_waits(router, prefill, decode):
    prefill.handle, decode.handle = fails(500, "out of pages", once_asked=decode), waits_forever()
    started = time.monotonic()
    status, body = router.request("/generate", {"text": "x", "stream": True})
    assert status == 500
    assert "prefill" in message(body)
    assert "out of pages" in message(body)
    assert time.monotonic() - started < AT_ONCE
    assert decode.left.wait(PATIENCE)


def test_a_clients_own_fault_is_told_alike_whichever_instance_finds_it(router, prefill, decode):
    prefill.handle, decode.handle = fails(400, "n must lie in 1..128, not 0", once_asked=decode), waits_forever()
    status, body = router.request("/generate", {"text": "x"})
    assert (status, message(body)) == (400, "n must lie in 1..128, not 0")


def test_a_decode_error_reaches_the_client_as_it_is_and_ends_prefill(router, prefill, decode):
    prefill.handle, decode.handle = waits_forever(), fails(400, "too long", once_asked=prefill)
    status, body = router.request("/generate", {"text": "x"})
    assert (status, message(body)) == (400, "too long")
    assert prefill.left.wait(PATIENCE)


def test_decode_dying_in_the_middle_of_a_stream_is_said_in_an_event_of_its_own(router, prefill, decode):
    decode.handle = streams("data: 1\n\n", "data: 2", then=dies())
    started = time.monotonic()
    status, body = router.request("/generate", {"text": "x", "stream": True})  # the stream ends properly
    assert time.monotonic() - started < AT_ONCE
    assert status == 200
    first, second, last, end = body.decode().split("\n\n")
    assert (first, second, end) == ("data: 1", "data: 2", "")
    error = json.loads(last.removeprefix("data: "))["error"]
    assert error["code"] == 502
    assert "decode" in error["message"]
    assert decode.url in error["message"]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_instance_dying_before_the_first_byte_is_a_502_in_words(router, prefill, decode, role):
    dying, waiting = (prefill, decode) if role == "prefill" else (decode, prefill)
    dying.handle, waiting.handle = dies(once_asked=waiting), waits_forever()
    started = time.monotonic()
    status, body = router.request("/generate", {"text": "x"})
    assert status == 502
    assert f"the {role} instance {dying.url}" in message(body)
    assert time.monotonic() - started < AT_ONCE
    assert waiting.left.wait(PATIENCE)


def test_a_stream_that_stands_still_ends_in_words(router, prefill, decode):
    decode.handle = streams("data: 1\n\n", then=waits_forever())
    status, body = router.request("/generate", {"text": "x", "stream": True})
    assert status == 200
    error = json.loads(body.decode().split("\n\n")[1].removeprefix("data: "))["error"]
    assert (error["code"], "sent nothing for 2 s" in error["message"]) == (504, True)
    assert decode.left.wait(PATIENCE)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_both_calls(router, prefill, decode, stream):
    prefill.handle = waits_forever()
    decode.handle = streams("data: 1\n\n", then=waits_forever()) if stream else waits_forever()
    client = Client(router, {"text": "x", "stream": stream})
    if stream:
        assert client.connection.getresponse().readline() == b"data: 1\n"
    else:
        wait_until(lambda: bool(prefill.bodies and decode.bodies))
    client.leave()
    assert decode.left.wait(PATIENCE)
    assert prefill.left.wait(PATIENCE)


def test_the_routers_own_pages(router, prefill, decode):
    (model,) = json.loads(router.request("/v1/models")[1])["data"]
    assert (model["id"], model["max_model_len"]) == ("tiny", 200)
    assert json.loads(router.request("/v1/models/tiny")[1]) == model
    status, body = router.request("/v1/models/org/gpt")
    assert (status, message(body)) == (404, "model: 'org/gpt' is not served here; served now: 'tiny'")
    info = json.loads(router.request("/server_info")[1])
    assert [each["url"] for each in info["prefill"] + info["decode"]] == [prefill.url, decode.url]
    assert router.request("/get_model_info")[0] == 200
    assert b'pdjax_router_instance_up{role="prefill"' in router.request("/metrics")[1]
    assert router.request("/nowhere")[0] == 404
