"""Whatever happens to an instance, in whatever state a room is: each request ends in time, rightly or with a reason,
every page and slot comes home, and the next request is right.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from halves import Room
from processes import get, post
from tiny_pair import LONG, STATES, TinyPair, prompt, stage, stop, until, wait_ended

pytestmark = pytest.mark.e2e
PAIRED = ("waiting", "transferring")  # states in which both halves wait for each other


@pytest.fixture(scope="module")
def shared(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, tiny_answer: Callable[[list[int], int], list[int]]
) -> Iterator[TinyPair]:
    pair = TinyPair(tmp_path_factory.mktemp("tiny"), tiny_model, tiny_answer)
    try:
        yield pair
    finally:
        pair.kill()


@pytest.fixture
def pair(shared: TinyPair) -> Iterator[TinyPair]:
    """The shared pair, sound before and after: whoever breaks it replaces the part."""
    shared.mend()
    yield shared
    shared.hold(0)
    shared.answers_rightly()
    shared.at_rest()


def assert_right_or_told(pair: TinyPair, rooms: list[Room], *, gone: str = "") -> None:
    """Each half has its answer or a reason; whoever asked an instance that is `gone` sees that by the connection."""
    for half in [half for room in rooms for half in room.halves if half.part.name != gone]:
        assert half.told or (half.status == 200 and not half.error and not half.broken), half
    for room in rooms:
        if room.decode is not None and room.decode.status == 200 and not room.decode.error and not room.decode.broken:
            assert pair.is_right(room), room


@pytest.mark.parametrize(
    ("victim", "whole", "same_ports"),
    [
        ("prefill", False, False),
        ("decode", True, True),
        pytest.param("prefill", True, True, marks=pytest.mark.soak),
        pytest.param("decode", False, False, marks=pytest.mark.soak),
    ],
)
def test_an_instance_is_killed_with_rooms_in_every_state(
    pair: TinyPair, victim: str, whole: bool, same_ports: bool
) -> None:
    part, other = (pair.prefill, pair.decode) if victim == "prefill" else (pair.decode, pair.prefill)
    staged = stage(pair)
    killed = time.monotonic()
    if whole:
        part.kill()
    else:
        part.leader().kill()
    pair.hold(0)
    wait_ended(staged.all())
    assert_right_or_told(pair, staged.all(), gone=victim)
    # Both halves knew of the other instance: its end is told at once.
    for room in staged.all(*PAIRED):
        for half in room.halves:
            assert half.ended_at - killed < 10.0, half
    decoding = staged.rooms["decoding"][0]
    if victim == "prefill":
        assert pair.is_right(decoding), "a request that has its pages needs no prefill instance"
    else:
        assert decoding.decode is not None and (decoding.decode.broken or decoding.decode.told)
    survivor = [half for room in staged.all() for half in room.halves if half.part is other]
    assert any(half.told for half in survivor)
    pair.replace(victim, same_ports=same_ports)


@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_an_instance_that_stops_for_a_while_harms_nobody(pair: TinyPair, victim: str) -> None:
    staged = stage(pair)
    go_on = stop(getattr(pair, victim))
    time.sleep(2.0)
    go_on()
    pair.hold(0)
    wait_ended(staged.all())
    for room in staged.all("waiting", "transferring", "decoding"):
        assert pair.is_right(room), room
    for room in staged.all("bootstrapping on prefill", "bootstrapping on decode"):
        assert room.halves[0].told and room.halves[0].status in (502, 504), room


@pytest.mark.soak
@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_an_instance_that_stops_for_good_is_given_up_within_the_bounds(pair: TinyPair, victim: str) -> None:
    other = "decode" if victim == "prefill" else "prefill"
    staged = stage(pair)
    stopped = time.monotonic()
    go_on = stop(getattr(pair, victim))
    pair.hold(0)
    try:
        theirs = [half for room in staged.all() for half in room.halves if half.part.name == other]
        for half in theirs:
            half.join(max(0.0, stopped + 25.0 - time.monotonic()))
            assert half.ended_at, f"{half!r} still waits"
            assert half.told or half.status == 200, half
    finally:
        go_on()
        pair.replace(victim, same_ports=True)
    wait_ended(staged.all())


@pytest.mark.parametrize("way", ["abort", "disconnect"])
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_client_gives_up_in_every_state(pair: TinyPair, side: str, way: str) -> None:
    staged = stage(pair)
    part = getattr(pair, side)
    mine = [half for room in staged.all() for half in room.halves if half.part is part and not half.ended_at]
    ended = time.monotonic()
    if way == "abort":
        status, said = post(f"{part.url}/abort_request", {"abort_all": True})
        assert status == 200 and said["aborted"] == len(mine), said
    else:
        for half in mine:
            half.disconnect()
    pair.hold(0)
    wait_ended(staged.all())
    for room in staged.all(*PAIRED):
        for half in room.halves:
            assert half.ended_at - ended < 10.0, half
            if half.part is not part:
                assert half.told and "abort" in half.error, half
    if side == "prefill":
        assert pair.is_right(staged.rooms["decoding"][0]), "a request that has its pages needs no prefill instance"


def test_a_write_that_lands_after_the_abort_reaches_no_other_request(pair: TinyPair) -> None:
    """The slots of an aborted room are held back, its pages are not: others get them while the write is on its way."""
    held = pair.held()
    pair.hold(3.0)
    aborted = [pair.room(prompt(1500)), pair.room(prompt(1500))]  # a third of the pool
    until(lambda: pair.held() >= held + 2, pair.prefill)
    pair.hold(0)
    status, _ = post(f"{pair.decode.url}/abort_request", {"abort_all": True})
    assert status == 200
    wait_ended(aborted, 2.5)
    late = [pair.room(prompt(100), 400) for _ in range(6)]  # they decode on those pages as the writes land
    wait_ended(late)
    for room in late:
        assert pair.is_right(room), room
    assert all(room.decode is not None and not room.decode.output_ids for room in aborted)


def test_a_data_path_that_loses_what_is_sent_takes_no_request_and_health_says_so(pair: TinyPair) -> None:
    pair.replace("decode", same_ports=True)  # it has no link yet, and has moved nothing
    pair.drop()
    room = pair.room(prompt(40))
    wait_ended([room])
    assert room.decode is not None and room.decode.told and room.decode.status == 502, room
    assert "failed its test: no test message came within" in room.decode.error, room
    status, body = get(f"{pair.decode.url}/health")
    assert status == 503 and "failed its test" in json.loads(body)["error"]["message"], body
    pair.hold(0)
    pair.answers_rightly()
    until(pair.decode.healthy, pair.decode)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_an_instance_shows_that_it_can_generate_without_a_partner(pair: TinyPair, side: str) -> None:
    part, other = getattr(pair, side), pair.decode if side == "prefill" else pair.prefill
    body = {"input_ids": LONG[0], "bootstrap_host": "2.2.2.2", "bootstrap_room": 0}
    body["sampling_params"] = {"temperature": 0, "max_new_tokens": 5, "ignore_eos": True}
    go_on = stop(other)
    try:
        before = part.metrics()["pdjax_steps_total"]
        assert get(f"{part.url}/health_generate")[0] == 200
        until(lambda: part.metrics()["pdjax_steps_total"] > before, part)  # they are told half a second late
        answers = [post(f"{part.url}/generate", body) for _ in range(2)]
    finally:
        go_on()
    assert all(status == 200 for status, _ in answers), answers
    first, second = (answer["output_ids"] for _, answer in answers)
    assert first == second, "no request sees what was in its pages before"
    assert len(first) == 5 if side == "decode" else first == pair.answer(LONG[0], 1)
    assert pair.is_right(ended(pair.room(*LONG))), "what it left in its pages is nobody's prefix"


def ended(room: Room) -> Room:
    wait_ended([room])
    return room


def test_every_state_is_staged(pair: TinyPair) -> None:
    """What the other tests rely on: the rooms are where they are said to be."""
    staged = stage(pair)
    prefill, decode = pair.prefill.metrics(), pair.decode.metrics()
    held = staged.all("bootstrapping on prefill", "bootstrapping on decode", "waiting", "transferring")
    assert all(not half.ended_at for room in held for half in room.halves), held
    assert prefill["pdjax_rooms"] == 5 and decode["pdjax_rooms"] == 4, (prefill, decode)
    assert prefill["pdjax_waiting_requests"] == 1 and prefill["pdjax_writes_in_flight"] >= 2
    pair.hold(0)
    wait_ended(staged.all())
    assert set(staged.rooms) == set(STATES)


def traced(pair: TinyPair, room: Room, folder: Path) -> list[dict[str, Any]]:
    """What both instances' trace has of a room that has ended."""
    output = folder / "trace.json"
    command = [
        sys.executable,
        "-m",
        "pdjax.launch",
        "trace",
        "--prefill",
        pair.prefill.url,
        "--decode",
        pair.decode.url,
    ]
    subprocess.run([*command, "-o", str(output)], check=True, timeout=60, stdout=subprocess.DEVNULL)
    events = json.loads(output.read_text())["traceEvents"]
    assert room.prefill is not None
    number = room.prefill.rid.removeprefix("p-")
    return [event for event in events if event.get("args", {}).get("room") == number]


def test_a_room_is_seen_in_one_trace_of_both_instances(pair: TinyPair, tmp_path: Path) -> None:
    room = pair.room(prompt(200), 12)
    wait_ended([room])
    mine = traced(pair, room, tmp_path)
    names = {pid: {event["name"] for event in mine if event["pid"] == pid} for pid in (1, 2)}
    assert names[1] == {"queue", "prefill chunk", "slot wait", "gather", "write"}
    assert names[2] == {"alloc wait", "land", "scatter", "first token", "decode"}
    for event in (event for event in mine if event["name"] == "scatter"):
        gathers = [each["ts"] for each in mine if each["name"] == "gather"]
        assert event["ts"] > min(gathers) - 50e3, "the clocks of one machine do not differ"


def test_the_first_chunk_has_landed_before_the_last_is_computed(pair: TinyPair, tmp_path: Path) -> None:
    room = pair.room(prompt(12 * 128), 2)
    wait_ended([room])
    ends: dict[str, list[float]] = {}
    for event in traced(pair, room, tmp_path):
        ends.setdefault(event["name"], []).append(event["ts"] + event["dur"])
    assert len(ends["prefill chunk"]) == len(ends["land"]) == 12
    assert min(ends["land"]) < sorted(ends["prefill chunk"])[-2] and max(ends["land"]) > max(ends["prefill chunk"])
