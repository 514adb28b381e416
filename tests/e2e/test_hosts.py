"""Instances on hosts of their own, and what a cable that is pulled does to them: nobody is told, nothing is refused."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from far import SECRET, Answer, Far, answers_everywhere, at_rest, ended_with, far_apart, is_right
from processes import free_port
from tiny_pair import BOUND_SECONDS, LONG, wait_ended

from tests.hosts import needs_hosts

pytestmark = [pytest.mark.e2e, needs_hosts]


@pytest.fixture(scope="module")
def far(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Far]:
    with far_apart(tmp_path_factory.mktemp("hosts"), tiny_model, prefill=[1], decode=[2], other=[3]) as far:
        yield far


def test_prompts_of_every_length_go_from_host_to_host(far: Far, tiny_answer: Answer) -> None:
    answers_everywhere(far, tiny_answer)
    assert "decode instance joined (tcp/net0)" in far.prefill.tail()


def test_the_path_between_two_hosts_can_be_looked_at_before_traffic(far: Far) -> None:
    port, address = free_port(), far.hosts.address(1)
    check = [sys.executable, "-m", "pdjax.launch", "check"]
    serving = subprocess.Popen(
        [*far.hosts.on(1), "env", f"PDJAX_SECRET={SECRET['PDJAX_SECRET']}", *check, "--serve", f"{address}:{port}"],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while True:
            asked = [*far.hosts.on(2), "env", f"PDJAX_SECRET={SECRET['PDJAX_SECRET']}", *check]
            asked += ["--prefill", f"{address}:{port}"]
            said = subprocess.run(asked, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
            if said.returncode == 0 or time.monotonic() > deadline:
                break
        words = said.stdout + said.stderr
        assert said.returncode == 0 and "tcp/net0" in words and "GB/s" in words, words
    finally:
        serving.kill()
        serving.wait(10)


def test_a_decode_instance_out_of_reach_costs_prefill_its_rooms_and_nothing_else(far: Far, tiny_answer: Answer) -> None:
    room = far.room(far.prefill, 60, LONG[1])
    assert room.decode is not None and room.decode.first.wait(30)
    rooms = far.cut_midway(1, 2)
    try:
        cut = time.monotonic()
        rooms += [far.room(far.prefill, 40, sides="p") for _ in range(2)]
        for each in rooms:
            assert each.prefill is not None
            each.prefill.join(BOUND_SECONDS)
            assert each.prefill.ended_at - cut < BOUND_SECONDS, each.prefill
            assert each.prefill.status == 200 or each.prefill.told, each.prefill
        at_rest(far.prefill)
    finally:
        far.hosts.mend(2)
    wait_ended([room, *rooms], 2 * BOUND_SECONDS)
    deadline = time.monotonic() + BOUND_SECONDS
    while not is_right(far.room(far.prefill, 40), tiny_answer):
        assert time.monotonic() < deadline, f"{far.prefill.tail()}\n{far.decode.tail()}"
    for part in far.parts:
        at_rest(part)


def test_a_prefill_host_that_vanishes_takes_no_slot_with_it_for_good(far: Far, tiny_answer: Answer) -> None:
    assert is_right(far.room(far.prefill, 40), tiny_answer)
    rooms = far.cut_midway(1, 1)
    try:
        cut = time.monotonic()
        for room in rooms:
            assert room.decode is not None
            room.decode.join(BOUND_SECONDS)
            assert room.decode.status == 200 or ended_with(room.decode, "out of reach", "landed", "compute", "confirm")
            assert room.decode.ended_at - cut < BOUND_SECONDS
        at_rest(far.decode)
        assert is_right(far.room(far.other, 1500), tiny_answer), far.decode.tail()
    finally:
        far.hosts.mend(1)
    wait_ended(rooms, 2 * BOUND_SECONDS)
    # What it had sent comes now, and is refused; it is linked again, and serves.
    deadline = time.monotonic() + BOUND_SECONDS
    while not is_right(far.room(far.prefill, 40), tiny_answer):
        assert time.monotonic() < deadline, f"{far.prefill.tail()}\n{far.decode.tail()}"
    assert is_right(far.room(far.other, 200), tiny_answer)
    for part in far.parts:
        at_rest(part)
