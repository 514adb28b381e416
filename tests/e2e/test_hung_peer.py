"""An instance that hangs is found out by its silence: who waits for it is told, and once it goes on all is well."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from halves import open_room
from processes import Part, free_port, instance
from tiny_pair import CONFIG, START_SECONDS, prompt, stop, until, wait_ended

from pdjax.models.random import tiny_config, write_random_model

pytestmark = pytest.mark.e2e


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[Part, Part, int]]:
    model, bootstrap = tmp_path / "tiny", free_port()
    write_random_model(model, tiny_config(), seed=1)
    options = {"config": CONFIG, "Model__folder": model, "Disagg__peer_timeout": 3.0, "Disagg__waiting_timeout": 60.0}
    parts = [instance(tmp_path, "prefill", Disagg__bootstrap_port=bootstrap, **options),
             instance(tmp_path, "decode", Disagg__bootstrap_port=0, **options)]  # fmt: skip
    try:
        prefill, decode = (part.wait_ready(START_SECONDS) for part in parts)
        yield prefill, decode, bootstrap
    finally:
        for part in parts:
            part.kill()


def test_a_prefill_that_hangs_is_given_up_and_taken_back(two: tuple[Part, Part, int]) -> None:
    prefill, decode, bootstrap = two
    first = open_room(prefill, decode, bootstrap, prompt(40), 4)
    wait_ended([first])
    assert first.decode is not None and len(first.decode.output_ids) == 4, first

    go_on = stop(prefill)
    asked = time.monotonic()
    try:
        room = open_room(prefill, decode, bootstrap, prompt(40), 4, sides="d")
        wait_ended([room])
        half = room.decode
        assert half is not None and half.told and "it hangs" in half.error, half
        assert half.ended_at - asked < 12
    finally:
        go_on()
    until(prefill.healthy, prefill)
    again = open_room(prefill, decode, bootstrap, prompt(40), 4)
    wait_ended([again])
    assert again.decode is not None and len(again.decode.output_ids) == 4, again
    assert decode.metrics()["pdjax_hung_peers_total"] == 1
