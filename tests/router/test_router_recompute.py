"""A request that an instance or a transfer has lost is computed anew, and its client does not hear of it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from aiohttp import web
from upstream import Handler, RouterProcess, Upstream, answer_ok, dies, message, streams, wait_until, waits_forever


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def fleet(
    stack: ExitStack, *, prefill: int, decode: int, **options
) -> tuple[list[Upstream], list[Upstream], RouterProcess]:
    prefills = [Upstream("prefill", disaggregation_bootstrap_port=9001 + each) for each in range(prefill)]
    decodes = [Upstream("decode") for _ in range(decode)]
    for each in (*prefills, *decodes):
        stack.callback(each.close)
    router = RouterProcess([each.url for each in prefills], [each.url for each in decodes], **options)
    stack.callback(router.close)
    wait_until(lambda: router.request("/metrics")[1].count(b"} 1.0\n") == prefill + decode)
    return prefills, decodes, router


def says(status: int, text: str, *, pause: float = 0.0) -> Handler:
    async def handle(request: web.Request, body: dict) -> web.StreamResponse:
        await asyncio.sleep(pause)
        return web.json_response({"error": {"message": text}}, status=status)

    return handle


def waits_for(port: int) -> Handler:
    """A decode instance that is served by one prefill instance only."""

    async def handle(request: web.Request, body: dict) -> web.StreamResponse:
        good = body["bootstrap_port"] in (port, [port, port])
        return await (answer_ok if good else waits_forever())(request, body)

    return handle


def recomputed(router: RouterProcess) -> float:
    (line,) = [
        line for line in router.request("/metrics")[1].split(b"\n") if line.startswith(b"pdjax_recomputed_rooms")
    ]
    return float(line.split()[-1])


@pytest.mark.parametrize("body", [{"text": "x"}, {"text": "x", "stream": True}, {"text": ["x", "y"]}])
def test_what_a_dying_prefill_instance_had_is_computed_by_another_in_a_new_room(stack, body):
    prefills, (decode,), router = fleet(stack, prefill=2, decode=1)
    prefills[0].handle, decode.handle = dies(once_asked=decode), waits_for(9002)
    answers = [router.request("/generate", body) for _ in range(2)]
    assert [status for status, _ in answers] == [200, 200]
    lost, again = prefills[0].bodies[0], decode.bodies[-1]
    assert lost["bootstrap_room"] != again["bootstrap_room"]
    assert decode.left.wait(10), "the room that was lost is aborted"
    assert recomputed(router) == len(prefills[0].bodies) * (2 if isinstance(body["text"], list) else 1)


@pytest.mark.parametrize("handle", [dies(), says(502, "the link has ended"), says(503, "this instance is stopping")])
@pytest.mark.parametrize("stream", [False, True])
def test_what_a_decode_instance_has_lost_before_its_first_token_is_given_to_another(stack, handle, stream):
    (prefill,), decodes, router = fleet(stack, prefill=1, decode=2)
    prefill.handle, decodes[0].handle = waits_forever(), handle
    decodes[1].handle = streams("data: 1\n\n") if stream else answer_ok
    for _ in range(2):
        status, said = router.request("/generate", {"text": "x", "stream": stream})
        assert status == 200 and (said == b"data: 1\n\n" or json.loads(said)["text"] == "fine")
    assert recomputed(router) == len(decodes[0].bodies) > 0


def test_a_stream_whose_head_has_come_and_no_event_is_not_lost_either(stack):
    (prefill,), decodes, router = fleet(stack, prefill=1, decode=2)
    prefill.handle = waits_forever()
    decodes[0].handle, decodes[1].handle = streams(then=dies()), streams("data: 1\n\n")
    for _ in range(2):
        assert router.request("/generate", {"text": "x", "stream": True}) == (200, b"data: 1\n\n")


def test_with_one_pair_the_same_is_asked_again_so_often_and_then_the_reason_is_told(stack):
    (prefill,), (decode,), router = fleet(stack, prefill=1, decode=1, recomputes=3)
    prefill.handle, decode.handle = waits_forever(), says(502, "chunk 0 arrived damaged 3 times")
    status, said = router.request("/generate", {"text": "x"})
    assert status == 502 and message(said).startswith("chunk 0 arrived damaged 3 times")
    assert "4 times" in message(said)
    assert len(decode.bodies) == 4 and len({body["bootstrap_room"] for body in decode.bodies}) == 4


@pytest.mark.parametrize(
    ("status", "text"), [(400, "too long"), (429, "too many wait"), (500, "a bug"), (499, "abort")]
)
def test_a_request_that_fails_by_itself_is_not_computed_again(stack, status, text):
    (prefill,), (decode,), router = fleet(stack, prefill=1, decode=1)
    prefill.handle, decode.handle = waits_forever(), says(status, text)
    got, said = router.request("/generate", {"text": "x"})
    assert (got, message(said)) == (status, text)
    assert len(decode.bodies) == 1 and recomputed(router) == 0


OPENING = ': pdjax opening {"rid": "r", "id": "i", "began": 2.5}\n\n'


def tokens(*numbers: int, error: str = "") -> list[str]:
    """A resumable stream's blocks from here on: an event and a frame for each number."""
    blocks = [f'data: {number}\n\n: pdjax told {{"token_ids": [{number}]}}\n\n' for number in numbers]
    return [OPENING, *blocks, *([f"data: {error}\n\n"] if error else [])]


def resumed(router: RouterProcess) -> float:
    said = router.request("/metrics")[1].split(b"\n")
    (line,) = [line for line in said if line.startswith(b"pdjax_router_resumed_streams_total")]
    return float(line.split()[-1])


def goes_on(*, until: int = 4, then: Handler | None = None, error: str = "") -> Handler:
    """Tells the numbers up to `until` that were not told, and ends the stream, or goes on with `then`."""

    async def handle(request: web.Request, body: dict) -> web.StreamResponse:
        known = len(body.get("pdjax_resume", {}).get("told", []))
        end = [] if then or error else ["data: [DONE]\n\n"]
        return await streams(*tokens(*range(known, until), error=error), *end, then=then)(request, body)

    return handle


LOST = '{"error": {"message": "its engine has ended", "type": "server_error", "code": 503}}'
WHOLE = b"".join(b"data: %d\n\n" % number for number in range(4)) + b"data: [DONE]\n\n"


@pytest.mark.parametrize("first", [goes_on(until=2, then=dies()), goes_on(until=2, error=LOST)])
def test_a_stream_that_has_begun_goes_on_elsewhere_after_what_was_told(stack, first):
    (prefill,), decodes, router = fleet(stack, prefill=1, decode=2)
    decodes[0].handle, decodes[1].handle = first, goes_on()
    for _ in range(2):
        status, said = router.request("/generate", {"text": "x", "stream": True})
        assert (status, said) == (200, WHOLE)
    assert resumed(router) == len(decodes[0].bodies) > 0 and recomputed(router) == 0
    again = next(body for body in decodes[1].bodies if "pdjax_resume" in body)
    assert again["rid"] == "r" and again["pdjax_resume"] | {"told": 0} == {"id": "i", "began": 2.5, "told": 0}
    assert again["bootstrap_room"] not in [body["bootstrap_room"] for body in decodes[0].bodies]
    assert again in prefill.bodies, "samples that had not begun need their other half"


def test_a_stream_is_broken_off_nowhere_but_between_frames(stack):
    _, decodes, router = fleet(stack, prefill=1, decode=2)
    half = streams(*tokens(0, 1), "data: 2\n\n", 'data: "cut', then=dies())
    decodes[0].handle, decodes[1].handle = half, goes_on()
    for _ in range(2):
        assert router.request("/generate", {"text": "x", "stream": True}) == (200, WHOLE)


def test_one_that_is_idle_goes_on_elsewhere_too_and_may_be_lost_again(stack):
    _, decodes, router = fleet(stack, prefill=1, decode=3, idle_timeout=0.5)
    decodes[0].handle, decodes[1].handle = goes_on(until=1, then=waits_forever()), goes_on(until=3, then=dies())
    decodes[2].handle = goes_on()
    for _ in range(3):
        assert router.request("/generate", {"text": "x", "stream": True}) == (200, WHOLE)
    assert resumed(router) >= 2


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (says(400, "unknown field 'pdjax_resume'"), ("its engine has ended", "could not go on elsewhere", "unknown")),
        (streams("data: 0\n\n"), ("its engine has ended", "does not go on")),
        (goes_on(until=3, error=LOST), ("its engine has ended", "3 times")),
    ],
)
def test_where_it_cannot_go_on_the_client_is_told_why_as_the_last_event(stack, second, words):
    _, decodes, router = fleet(stack, prefill=1, decode=2)

    async def handle(request: web.Request, body: dict) -> web.StreamResponse:
        return await (second if "pdjax_resume" in body else goes_on(until=2, error=LOST))(request, body)

    decodes[0].handle = decodes[1].handle = handle
    status, said = router.request("/generate", {"text": "x", "stream": True})
    *events, last, end = said.split(b"\n\n")
    assert status == 200 and end == b"" and events[:2] == [b"data: 0", b"data: 1"]
    assert all(word in message(last.removeprefix(b"data: ")) for word in words)


def test_an_error_of_the_request_itself_is_its_last_event(stack):
    _, (decode,), router = fleet(stack, prefill=1, decode=1)
    own = '{"error": {"message": "the grammar is too large", "type": "invalid_request_error", "code": 400}}'
    decode.handle = goes_on(until=1, error=own)
    _, said = router.request("/generate", {"text": "x", "stream": True})
    assert said.startswith(b"data: 0\n\ndata: {") and b"too large" in said and len(decode.bodies) == 1


def test_a_stream_that_cannot_go_on_is_not_computed_again_after_the_first_byte(stack):
    _, decodes, router = fleet(stack, prefill=1, decode=2)
    for decode in decodes:
        decode.handle = streams("data: 1\n\n", then=dies())
    _, said = router.request("/generate", {"text": "x", "stream": True})
    assert said.count(b"data: 1\n\n") == 1 and b'"error"' in said
    assert recomputed(router) == 0


def test_a_deadline_counts_from_the_first_attempt(stack):
    (prefill,), (decode,), router = fleet(stack, prefill=1, decode=1, recomputes=100)
    prefill.handle, decode.handle = waits_forever(), says(504, "nothing came", pause=0.3)
    began = time.monotonic()
    status, said = router.request("/generate", {"text": "x", "deadline_s": 1.0})
    assert status == 504 and message(said) == "nothing came"
    left = [body["deadline_s"] for body in decode.bodies]
    assert left == sorted(left, reverse=True) and left[0] <= 1.0 and left[-1] > 0
    assert len(left) < 6 and time.monotonic() - began >= 1.0


def test_so_does_the_routers_own_limit(stack):
    (prefill,), (decode,), router = fleet(stack, prefill=1, decode=1, recomputes=100, request_timeout=1.0)
    prefill.handle, decode.handle = waits_forever(), says(502, "lost", pause=0.3)
    status, _ = router.request("/generate", {"text": "x"})
    assert status in (502, 504) and len(decode.bodies) < 6


def test_an_instance_lets_go_of_a_clients_id_before_it_is_asked_again(stack):
    (prefill,), (decode,), router = fleet(stack, prefill=1, decode=1, recomputes=1)
    prefill.handle, decode.handle = dies(once_asked=decode), waits_forever()
    assert router.request("/generate", {"text": "x", "rid": "mine"})[0] == 502
    first, release, second = decode.bodies
    assert release == {"rid": "mine"} and first["rid"] == second["rid"] == "mine"


def test_the_reason_names_what_was_lost_and_what_is_missing(stack):
    (prefill,), (decode,), router = fleet(stack, prefill=1, decode=1)

    async def ends(request: web.Request, body: dict) -> web.StreamResponse:
        prefill.health_status = 503
        await asyncio.to_thread(router.wait_for_health, 503)
        return await dies()(request, body)

    prefill.handle, decode.handle = ends, waits_forever()
    status, said = router.request("/generate", {"text": "x"})
    assert status == 502
    assert f"the prefill instance {prefill.url} failed" in message(said) and "no prefill instance serves" in message(
        said
    )
