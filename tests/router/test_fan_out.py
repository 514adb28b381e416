"""What a router asks of all its instances."""

from __future__ import annotations

import json

from aiohttp import web
from upstream import answer_ok, message, waits_forever


def test_a_flush_reaches_all_and_a_failure_is_told(router, prefill, decode):
    status, body = router.request("/flush_cache", {})
    assert (status, json.loads(body)) == (200, {"status": "success", "workers_flushed": 2, "failed": {}})
    decode.flush_status = 503
    status, body = router.request("/flush_cache", {})
    assert (status, json.loads(body)["failed"]) == (206, {decode.url: "flushed"})
    prefill.flush_status = 500
    status, body = router.request("/flush_cache", {})
    assert (status, json.loads(body)["workers_flushed"]) == (503, 0)


def test_texts_are_tokenised_by_any_instance(router, prefill, decode):
    long = {"prompt": "word " * 300_000}
    for path, body in (("/tokenize", {"prompt": "hi"}), ("/detokenize", {"tokens": [5]}), ("/tokenize", long)):
        status, answer = router.request(path, body)
        assert (status, json.loads(answer)) == (200, {"path": path, "body": body})
    assert router.request("/tokenize", {"wrong": 1}) == (400, b"unknown field")


def test_loads_are_told_by_instance(router, prefill, decode):
    decode.load = None
    status, body = router.request("/get_loads")
    assert (status, json.loads(body)) == (
        200, {"workers": [{"worker": prefill.url, "load": 40}, {"worker": decode.url, "load": -1}]}
    )  # fmt: skip


def test_an_abort_reaches_both_halves(router, prefill, decode):
    assert router.request("/abort_request", {"rid": "r"}) == (200, b'{"aborted":2}')
    assert prefill.bodies == decode.bodies == [{"rid": "r"}]
    status, body = router.request("/abort_request", {})
    assert (status, message(body)) == (400, "rid: missing")
    assert router.request("/abort_request", b"{")[0] == 400


def test_health_is_proved_by_a_token_of_a_pair(router, prefill, decode):
    assert router.request("/health_generate") == (200, b"OK")
    assert prefill.bodies == decode.bodies
    assert decode.bodies[0]["sampling_params"]["max_new_tokens"] == 1
    decode.handle = waits_forever()
    prefill.handle = fails
    status, body = router.request("/health_generate")
    assert (status, "no pages" in message(body)) == (503, True)
    prefill.handle = answer_ok


async def fails(request, body):
    return web.json_response({"error": {"message": "no pages"}}, status=503)
