"""Real processes, each its own mpiexec job, that are linked, talk, and die."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable

import pytest

from tests.jobs import Job

pytestmark = pytest.mark.e2e


def link(connector: Job, acceptor: Job, name: str = "link") -> str:
    """Link two. Returns the acceptor's name for the link."""
    connector.do("connect", link=name, port=acceptor.ask("listen")["port"])
    assert not connector.event("up", link=name)["incoming"]
    return acceptor.event("up", incoming=True)["link"]


def is_dropped(connection: socket.socket) -> bool:
    try:
        return connection.recv(100) == b""
    except ConnectionResetError:
        return True


def test_linked_instances_know_each_others_registration_and_talk(start: Callable[..., Job]) -> None:
    a, b = start("I am a", "s"), start("I am b", "s")
    b.do("connect", link="to a", port=a.ask("listen")["port"])
    assert b.event("up")["hello"] == "I am a"
    up = a.event("up")
    assert up["hello"] == "I am b"
    b.do("send", link="to a", text="how are you?")
    assert a.event("frame") == {"event": "frame", "link": up["link"], "body": "how are you?"}
    a.do("send", link=up["link"], text="")
    assert b.event("frame") == {"event": "frame", "link": "to a", "body": ""}


def test_a_thousand_messages_each_way_at_once_arrive_whole_and_in_order(start: Callable[..., Job]) -> None:
    a, b = start("a"), start("b")
    incoming = link(b, a)
    a.ask("expect_flood", frames=1000)
    b.ask("expect_flood", frames=1000)
    a.do("flood", link=incoming, seed=1, frames=1000, largest=1 << 20)
    b.do("flood", link="link", seed=2, frames=1000, largest=1 << 20)
    sent = [job.wait(lambda line: line.get("answer") == "flood")["digest"] for job in (a, b)]
    assert [b.event("flooded")["digest"], a.event("flooded")["digest"]] == sent


def test_a_wrong_secret_is_refused_with_a_sentence(start: Callable[..., Job]) -> None:
    a, b = start("a", "right"), start("b", "wrong")
    b.do("connect", link="x", port=a.ask("listen")["port"])
    assert "shared secret is not the one" in b.event("failed", link="x")["reason"]
    assert not a.has("up")


def test_garbage_and_silence_on_the_port_harm_nobody(start: Callable[..., Job]) -> None:
    a, b = start("a"), start("b")
    port = a.ask("listen")["port"]
    with socket.create_connection(("127.0.0.1", port), timeout=20) as probe:
        probe.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert is_dropped(probe)
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
    b.do("connect", link="x", port=port)
    assert b.event("up", link="x")["hello"] == "a"
    for connection in silent:
        connection.close()


def test_nobody_at_the_address_is_told_at_once(start: Callable[..., Job]) -> None:
    a = start("a")
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    a.do("connect", link="x", port=port)
    assert f"127.0.0.1:{port}: " in a.event("failed", link="x")["reason"]


def test_a_port_that_never_answers_fails_at_the_timeout(start: Callable[..., Job]) -> None:
    a = start("a")
    with socket.create_server(("127.0.0.1", 0)) as mute:
        a.do("connect", link="x", port=mute.getsockname()[1], timeout=0.5)
        assert "too long" in (reason := a.event("failed", link="x")["reason"]) or "timed out" in reason


def test_after_kill_9_of_a_peer_the_other_goes_on_and_links_with_a_new_one(start: Callable[..., Job]) -> None:
    a, b, c = start("a"), start("b"), start("c")
    first, second = link(b, a), link(c, a)
    killed = time.monotonic()
    b.kill()
    down = a.event("down", link=first)
    assert "died" in down["reason"]
    assert down["at"] - killed < 5
    a.do("send", link=first, text="anyone there?")
    d = start("d")
    third = link(d, a)
    for job, name, incoming in ((c, "link", second), (d, "link", third)):
        assert job.ask("round_trips", link=name, count=20)["p50"] < 5
        a.do("send", link=incoming, text="still here")
        assert job.event("frame")["body"] == "still here"


def test_kill_9_in_the_midst_of_messages_both_ways_harms_nobody_else(start: Callable[..., Job]) -> None:
    a, b, c = start("a"), start("b"), start("c")
    first, second = link(b, a), link(c, a)
    a.ask("expect_flood", frames=10**6)
    b.do("flood", link="link", seed=2, frames=500, largest=1 << 20)
    a.do("flood", link=first, seed=1, frames=500, largest=1 << 20)
    b.kill()
    a.event("down", link=first)
    a.do("send", link=second, text="still here")
    assert c.event("frame")["body"] == "still here"
    a.do("quit")
    assert "closed by the peer" in c.event("down")["reason"]
    assert a.exit_code() == 0


def test_a_closed_link_says_so_after_everything_sent_has_arrived(start: Callable[..., Job]) -> None:
    a, b = start("a"), start("b")
    incoming = link(b, a)
    b.do("send", link="link", text="goodbye")
    b.do("close", link="link")
    assert a.event("frame", link=incoming)["body"] == "goodbye"
    assert a.event("down", link=incoming)["reason"] == "closed by the peer"
    again = link(b, a)  # the name is free
    assert again != incoming
    assert not b.has("down")


@pytest.mark.parametrize("end", ["closed", "killed"])
def test_what_comes_late_over_a_link_that_was_given_up_comes_out_of_no_other(
    start: Callable[..., Job], end: str
) -> None:
    a, c = start("a"), start("c")
    for seed in range(3):
        b = start("b")
        incoming = link(b, a, f"link {seed}")
        a.ask("expect_flood", frames=10**6)
        b.do("flood", link=f"link {seed}", seed=seed, frames=2000, largest=1 << 20 if seed else 200)
        a.do("close", link=incoming)
        if end == "killed":
            b.kill()
        else:
            b.event("down")
        a.ask("expect_flood", frames=0)
        c.do("connect", link=f"link {seed}", port=a.ask("listen")["port"])
        up = a.event("up", incoming=True)
        assert up["hello"] == "c"
        c.event("up", link=f"link {seed}")
        for text in ("one", "two"):
            c.do("send", link=f"link {seed}", text=text)
            assert a.event("frame", link=up["link"])["body"] == text
        c.do("close", link=f"link {seed}")
        a.event("down", link=up["link"])


def test_three_instances_that_join_in_a_ring_at_the_same_time_all_get_their_links(start: Callable[..., Job]) -> None:
    jobs = [start(name) for name in "abc"]
    ports = [job.ask("listen")["port"] for job in jobs]
    for round in range(4):
        for i, job in enumerate(jobs):  # both neighbours at once
            job.do("connect", link=f"next {round}", port=ports[(i + 1) % 3])
            job.do("connect", link=f"previous {round}", port=ports[(i - 1) % 3])
        for i, job in enumerate(jobs):
            assert job.event("up", link=f"next {round}")["hello"] == "abc"[(i + 1) % 3]
            assert job.event("up", link=f"previous {round}")["hello"] == "abc"[(i - 1) % 3]
            job.event("up", incoming=True)
            job.event("up", incoming=True)


def test_linked_instances_at_rest_cost_no_processor_time(start: Callable[..., Job]) -> None:
    a, b = start("a"), start("b")
    link(b, a)
    b.ask("round_trips", link="link", count=10)
    before = [job.ask("usage")["cpu"] for job in (a, b)]
    time.sleep(2)
    after = [job.ask("usage")["cpu"] for job in (a, b)]
    for earlier, later in zip(before, after):
        assert (later - earlier) / 2 < 0.03


def test_a_process_stops_although_its_peer_is_dead_or_stuck_with_messages_under_way(start: Callable[..., Job]) -> None:
    a, b, c = start("a"), start("b"), start("c")
    link(a, b, "dead")
    link(a, c, "stuck")
    os.kill(c.pid, signal.SIGSTOP)
    b.kill()
    for name in ("dead", "stuck"):
        a.ask("flood", link=name, seed=1, frames=100, largest=1 << 20)
    a.do("quit")
    assert a.exit_code() == 0
