"""Instances on hosts of their own, and what a cable that is pulled does to them: nobody is told, nothing is refused."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from halves import Half, Room, open_room
from hosts import Hosts, can_make_hosts
from processes import Part, free_port, instance, wait_all_ready
from tiny_pair import BOUND_SECONDS, CONFIG, LONG, START_SECONDS, prompt, until, wait_ended

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not can_make_hosts(), reason="hosts are made as root, with ip and unshare"),
]
SECRET = {"PDJAX_SECRET": "what all of them know", "PYTHONFAULTHANDLER": "1"}
SLOTS = 4


class Far:
    """Two prefill instances and a decode instance, each on a host of its own."""

    def __init__(self, folder: Path, model: Path, hosts: Hosts) -> None:
        self.hosts, self.bootstrap = hosts, free_port()
        self._folder, self._model = folder, model
        self.prefill, self.decode, self.other = (
            self._start("prefill", 1),
            self._start("decode", 2),
            self._start("prefill", 3),
        )
        wait_all_ready(self.parts, START_SECONDS)

    @property
    def parts(self) -> tuple[Part, Part, Part]:
        return self.prefill, self.decode, self.other

    def _start(self, role: str, host: int) -> Part:
        options = {"config": CONFIG, "Model__folder": self._model, "env": SECRET}
        if role == "prefill":
            options |= {"Disagg__bootstrap_host": self.hosts.address(host), "Disagg__bootstrap_port": self.bootstrap}
        return instance(self._folder, role, host=self.hosts.address(host), before=self.hosts.on(host), **options)

    def room(self, prefill: Part, length: int, tokens: int = 8, sides: str = "pd") -> Room:
        return open_room(prefill, self.decode, self.bootstrap, prompt(length), tokens, sides=sides)

    def cut_midway(self, host: int) -> list[Room]:
        """Pull a host's cable while the first prefill instance sends, with slots out. Returns its rooms."""
        with self.hosts.slow(1, 20):
            rooms = [self.room(self.prefill, 1500) for _ in range(6)]
            until(lambda: self.decode.metrics()["pdjax_staging_slots_free"] < SLOTS, self.decode)
            self.hosts.cut(host)
        return rooms

    def kill(self) -> None:
        for part in self.parts:
            part.kill()


@pytest.fixture(scope="module")
def far(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Far]:
    folder = tmp_path_factory.mktemp("hosts")
    hosts = Hosts(3, folder)
    try:
        with hosts.joined():
            far = Far(folder, tiny_model, hosts)
            yield far
            far.kill()
    finally:
        hosts.close()


Answer = Callable[[list[int], int], list[int]]


def ended_with(half: Half | None, *words: str) -> bool:
    assert half is not None
    return half.told and any(word in half.error for word in words)


def is_right(room: Room, answer: Answer) -> bool:
    wait_ended([room])
    assert room.decode is not None
    return room.decode.output_ids == answer(room.prompt, room.tokens)


def at_rest(part: Part, seconds: float = BOUND_SECONDS) -> None:
    """Every page and slot is home."""

    def home() -> bool:
        metrics = part.metrics()
        busy = metrics["pdjax_live_requests"] or metrics["pdjax_rooms"]
        all_free = metrics["pdjax_free_pages"] == metrics["pdjax_pages"]
        return not busy and all_free and metrics["pdjax_staging_slots_free"] == SLOTS

    until(home, part, seconds)


def test_prompts_of_every_length_go_from_host_to_host(far: Far, tiny_answer: Answer) -> None:
    rooms = [far.room(prefill, length) for prefill in (far.prefill, far.other) for length in (1, 40, 200, 1500)]
    for room in rooms:
        assert is_right(room, tiny_answer), room
    assert "decode instance joined (tcp/net0)" in far.prefill.tail()
    for part in far.parts:
        at_rest(part)


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
    rooms = far.cut_midway(2)
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
    rooms = far.cut_midway(1)
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
