"""What a router asks of all its instances."""

from __future__ import annotations

import json

from aiohttp import web
from upstream import answer_ok, message, waits_forever

from pdjax.web import MAX_BODY


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


def test_what_an_instance_says_is_heard_to_its_end_though_it_comes_in_pieces(router, prefill, decode):
    prefill.in_pieces = decode.in_pieces = True
    try:
        assert router.request("/abort_request", {"rid": "r"}) == (200, b'{"aborted":2}')
        assert message(router.request("/abort_request", {})[1]) == "rid: missing"
        assert [each["load"] for each in json.loads(router.request("/get_loads")[1])["workers"]] == [40, 40]
        decode.flush_status = 503
        assert json.loads(router.request("/flush_cache", {})[1])["failed"] == {decode.url: "flushed"}
        assert json.loads(router.request("/tokenize", {"prompt": "hi"})[1])["body"] == {"prompt": "hi"}
        prefill.handle, decode.handle = fails, waits_forever()
        assert message(router.request("/generate", {"text": "x"})[1]).endswith(
            "answered 503: no pages (computed 3 times, and lost each time)"
        )
        prefill.handle, decode.handle = waits_forever(), fails
        assert message(router.request("/generate", {"text": "x"})[1]).startswith("no pages")
    finally:
        prefill.in_pieces = decode.in_pieces = False


def test_a_body_that_is_too_long_is_refused_on_every_route(router, prefill, decode):
    for path in ("/tokenize", "/abort_request"):
        status, body = router.request(path, b" " * (MAX_BODY + 1))
        assert status == 400 and "the most that is taken" in message(body)


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
