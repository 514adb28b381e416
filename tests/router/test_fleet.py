"""Which instances a router uses: those that serve now, in turn."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from aiohttp import web
from upstream import PATIENCE, Client, RouterProcess, Upstream, answer_ok, message, streams, wait_until, waits_forever

from pdjax.launch.ports import free_ports
from pdjax.router.app import serve
from pdjax.router.fleet import FleetError, parse_instance
from pdjax.router.rooms import with_rooms


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def start(stack: ExitStack, role: str, **options) -> Upstream:
    upstream = Upstream(role, **options)
    stack.callback(upstream.close)
    return upstream


def route(stack: ExitStack, prefill: list[str], decode: list[str], **options) -> RouterProcess:
    router = RouterProcess(prefill, decode, **options)
    stack.callback(router.close)
    return router


def test_an_instance_may_say_who_it_is_in_pieces(stack):
    prefill, decode = (start(stack, role, padding="x" * 5000) for role in ("prefill", "decode"))
    prefill.in_pieces = decode.in_pieces = True
    router = route(stack, [prefill.url], [decode.url])
    router.wait_until_ready()
    assert not any("not a JSON object" in line for line in router.lines)


def test_a_router_starts_before_its_instances_and_says_what_is_missing(stack):
    prefill, port = start(stack, "prefill"), free_ports(1)[0]
    router = route(stack, [prefill.url], [f"http://127.0.0.1:{port}"])
    wait_until(lambda: b"no prefill" not in router.request("/health")[1])
    said = message(router.wait_for_health(503))
    assert f"no decode instance serves now (http://127.0.0.1:{port}: " in said
    status, body = router.request("/generate", {"text": "x"})
    assert (status, message(body)) == (503, said)
    start(stack, "decode", port=port)
    router.wait_until_ready()
    assert router.request("/generate", {"text": "x"})[0] == 200
    wait_until(lambda: any("is up" in line for line in router.lines))


def test_requests_go_to_instances_in_turn(stack):
    prefills = [start(stack, "prefill", disaggregation_bootstrap_port=port) for port in (9001, 9002)]
    decodes = [start(stack, "decode") for _ in range(3)]
    router = route(stack, [each.url for each in prefills], [each.url for each in decodes])
    wait_until(lambda: router.request("/metrics")[1].count(b"} 1.0\n") == 5)
    for _ in range(6):
        assert router.request("/generate", {"text": "x"})[0] == 200
    assert [len(each.bodies) for each in prefills] == [3, 3]
    assert [len(each.bodies) for each in decodes] == [2, 2, 2]
    assert {each["bootstrap_port"] for each in prefills[0].bodies} == {9001}


def test_a_request_to_an_instance_that_has_just_died_is_answered_by_another(stack):
    prefill, dead, other = start(stack, "prefill"), start(stack, "decode"), start(stack, "decode")
    router = route(stack, [prefill.url], [dead.url, other.url])
    wait_until(lambda: router.request("/metrics")[1].count(b"} 1.0\n") == 3)
    dead.die()
    for _ in range(4):
        assert router.request("/generate", {"text": "x"})[0] == 200
    assert len(other.bodies) == 4


def test_a_request_fails_in_words_when_the_only_instance_has_just_died(stack):
    prefill, decode = start(stack, "prefill"), start(stack, "decode")
    router = route(stack, [prefill.url], [decode.url])
    router.wait_until_ready()
    decode.die()
    status, body = router.request("/generate", {"text": "x"})
    assert status == 503
    assert decode.url in message(body)


@pytest.mark.parametrize("how", ["says that it is not well", "does not answer", "has ended"])
def test_an_instance_that_is_not_well_is_not_used_until_it_is(stack, how):
    prefill, decode = start(stack, "prefill"), start(stack, "decode")
    router = route(stack, [prefill.url], [decode.url])
    router.wait_until_ready()
    port, hung = decode.port, None
    if how == "says that it is not well":
        decode.health_status = 503
    else:
        decode.die()
    if how == "does not answer":
        hung = socket.create_server(("127.0.0.1", port))  # takes connections, and says nothing
    router.wait_for_health(503)
    if hung is not None:
        hung.close()
    if how == "says that it is not well":
        decode.health_status = 200
    else:
        start(stack, "decode", port=port)
    router.wait_until_ready()
    assert router.request("/generate", {"text": "x"})[0] == 200


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("whole", [True, False])
def test_whoever_waits_for_an_instance_that_hangs_is_told(stack, role, whole):
    """The whole of it, or only its engine, as its frontend says."""
    prefill, decode = start(stack, "prefill"), start(stack, "decode")
    router = route(stack, [prefill.url], [decode.url])
    router.wait_until_ready()
    stuck = {"prefill": prefill, "decode": decode}[role]

    async def never(request, body):
        if whole:
            stuck.hangs = True
        else:
            stuck.health_status = 504
        await asyncio.sleep(PATIENCE * 2)
        return await answer_ok(request, body)

    prefill.handle = decode.handle = never
    started = time.monotonic()
    status, body = router.request("/generate", {"text": "x"})
    assert status == 504 and stuck.url in message(body), body
    assert time.monotonic() - started < PATIENCE


def test_who_streams_does_not_hang_although_its_health_is_not_answered(stack):
    prefill, decode = start(stack, "prefill"), start(stack, "decode")
    router = route(stack, [prefill.url], [decode.url])
    router.wait_until_ready()

    async def slowly(request, body):
        decode.health_status = 504  # each such answer counts as a silence
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(16):
            await response.write(b"data: 1\n\n")
            await asyncio.sleep(0.25)
        return response

    decode.handle = slowly
    assert router.request("/generate", {"text": "x", "stream": True}) == (200, 16 * b"data: 1\n\n")


def test_an_instance_of_the_wrong_role_is_not_used_and_the_reason_is_told(stack):
    prefill, other = start(stack, "prefill"), start(stack, "unified")
    router = route(stack, [prefill.url], [other.url])
    wait_until(lambda: b"it says that it is a unified instance" in router.request("/health")[1])


def test_a_bootstrap_port_of_the_command_line_goes_before_the_instances_own(stack):
    prefill, decode = start(stack, "prefill"), start(stack, "decode")
    router = route(stack, [f"{prefill.url},9876"], [decode.url])
    router.wait_until_ready()
    router.request("/generate", {"text": "x"})
    assert decode.bodies[0]["bootstrap_port"] == 9876


def test_a_router_told_to_stop_ends_open_streams_in_words_and_exits_with_zero(stack):
    prefill, decode = start(stack, "prefill"), start(stack, "decode")
    decode.handle = streams("data: 1\n\n", then=waits_forever())
    router = route(stack, [prefill.url], [decode.url])
    router.wait_until_ready()
    client = Client(router, {"text": "x", "stream": True})
    response = client.connection.getresponse()
    assert response.readline() == b"data: 1\n"
    router.process.send_signal(signal.SIGTERM)
    said = response.read()
    assert b"this router is stopping" in said
    assert router.process.wait(PATIENCE) == 0


def test_a_router_lets_a_request_end_when_told_to_stop(stack):
    prefill, decode = start(stack, "prefill"), start(stack, "decode")
    decode.handle = streams("data: 1\n\n", *(["data: more\n\n"] * 20), "data: [DONE]\n\n")
    router = route(stack, [prefill.url], [decode.url])
    router.wait_until_ready()
    client = Client(router, {"text": "x", "stream": True})
    response = client.connection.getresponse()
    assert response.readline() == b"data: 1\n"
    router.process.send_signal(signal.SIGTERM)
    assert response.read().endswith(b"data: [DONE]\n\n")
    assert router.process.wait(PATIENCE) == 0


def test_many_clients_that_leave_leave_nothing_behind(stack):
    prefill, decode = start(stack, "prefill"), start(stack, "decode")
    prefill.handle = decode.handle = waits_forever()
    router = route(stack, [prefill.url], [decode.url])
    router.wait_until_ready()
    clients = [Client(router, {"text": "x"}) for _ in range(20)]
    wait_until(lambda: len(decode.bodies) == len(prefill.bodies) == 20)
    for client in clients:
        client.leave()
    wait_until(lambda: router.request("/metrics")[1].count(b"pdjax_router_outstanding{") == 2)
    wait_until(
        lambda: b'outstanding{role="decode",url="%s"} 0.0' % decode.url.encode() in router.request("/metrics")[1]
    )


def test_a_port_that_is_taken_is_said_with_exit_code_2(capsys):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert serve(["http://127.0.0.1:1"], ["http://127.0.0.1:2"], port=port) == 2
    assert f"cannot listen on 127.0.0.1 port {port}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["127.0.0.1:1", "https://x:1", "http://", "http://x/path", "http://x:1,0", "http://x,y"]
)
def test_a_url_that_is_none_is_refused_in_words(text):
    with pytest.raises(FleetError, match="--prefill"):
        parse_instance(text, "prefill")


def test_rooms_use_all_63_bits_and_no_more():
    source = random.Random(7)
    rooms = [
        with_rooms("/generate", {"text": "x"}, host="h", port=1, random_source=source)["bootstrap_room"]
        for _ in range(1000)
    ]
    assert len(set(rooms)) == 1000
    assert 2**62 < max(rooms) < 2**63
    assert json.loads(json.dumps(rooms)) == rooms


def test_an_idle_router_sleeps(stack):
    prefill, decode = start(stack, "prefill"), start(stack, "decode")
    router = route(stack, [prefill.url], [decode.url])
    router.wait_until_ready()
    before = cpu_seconds(router.process)
    time.sleep(2)
    assert cpu_seconds(router.process) - before < 0.2  # a router that spins would use 2


def cpu_seconds(process: subprocess.Popen) -> float:
    with open(f"/proc/{process.pid}/stat") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
