"""Instances with processes on several hosts, started by a cluster's mpiexec; and hosts of theirs that vanish."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from far import Answer, Far, answers_everywhere, at_rest, ended_with, far_apart, is_right
from processes import Part
from tiny_pair import BOUND_SECONDS, LONG, until, wait_ended

from tests.hosts import needs_hosts

pytestmark = [pytest.mark.e2e, needs_hosts]


@pytest.fixture(scope="module")
def far(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Far]:
    with far_apart(tmp_path_factory.mktemp("hosts"), tiny_model, prefill=[1, 2], decode=[3, 4], other=[5]) as far:
        yield far


def pythons(part: Part) -> list[str]:
    """What is left of an instance on either side of the cable. Its mpiexec waits for the host that has vanished."""
    names = []
    for process in part.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            names.append(process.name())
    return [name for name in names if name.startswith("python")]


def test_every_process_sends_and_receives_from_its_own_host(far: Far, tiny_answer: Answer) -> None:
    answers_everywhere(far, tiny_answer)


def test_a_prefill_instance_whose_worker_vanishes_ends_and_keeps_nothing_of_the_others(
    far: Far, tiny_answer: Answer
) -> None:
    rooms = far.cut_midway(2, 2)
    cut = time.monotonic()
    for room in rooms:
        assert room.decode is not None and room.prefill is not None
        room.decode.join(BOUND_SECONDS)
        assert room.decode.status == 200 or room.decode.told, room.decode
        assert room.decode.ended_at - cut < BOUND_SECONDS
    until(lambda: not pythons(far.prefill), far.prefill)
    assert "rank 1 (process" in far.prefill.tail() and "host2" in far.prefill.tail(), far.prefill.tail()
    at_rest(far.decode)
    assert is_right(far.room(far.other, 1500), tiny_answer)


def test_a_decode_instance_whose_worker_vanishes_tells_its_clients(far: Far) -> None:
    rooms = [far.room(far.other, 60, LONG[1]) for _ in range(2)]
    for room in rooms:
        assert room.decode is not None and room.decode.first.wait(BOUND_SECONDS)
    far.hosts.cut(4)
    wait_ended(rooms)
    assert all(ended_with(room.decode, "rank 1 (process") for room in rooms), (rooms, far.decode.tail())
    until(lambda: not pythons(far.decode), far.decode)
    at_rest(far.other)
