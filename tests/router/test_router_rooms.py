"""The rooms that the router gives are the ones that both halves of an instance pair make the same of."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from pdjax import wire
from pdjax.router.rooms import rooms_wanted, with_rooms
from pdjax.server.jobs import MAX_BATCH, MAX_ROOM, Bootstrap, Instance, rendezvous


class Highest(random.Random):
    """Draws the highest room that there can be."""

    def randrange(self, start: int, *_: Any) -> int:  # type: ignore[override]
        return start - 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"n": None}),
        ("/v1/chat/completions", {"n": 1}),
        ("/v1/chat/completions", {"n": True}),
        ("/v1/chat/completions", {"n": "2"}),
        ("/v1/chat/completions", {"n": 10**9}),
        ("/v1/completions", {"prompt": "a", "n": 2}),
        ("/v1/completions", {"prompt": [1, 2], "n": 2}),
        ("/generate", {"text": "a", "sampling_params": {"n": 2}}),
    ],
)
def test_one_room_stands_for_one_prompt_and_for_what_makes_no_sense(path, body):
    assert rooms_wanted(path, body) is None


@pytest.mark.parametrize(
    ("path", "body", "samples"),
    [
        ("/generate", {"text": "a", "sampling_params": {"n": 3}}, [3]),
        ("/generate", {"text": ["a", "b"], "sampling_params": {"n": 2}}, [2, 2]),
        ("/generate", {"text": "a", "sampling_params": {"n": MAX_BATCH}}, [MAX_BATCH]),
        ("/v1/completions", {"prompt": ["a", "b", "c"], "n": 2}, [2, 2, 2]),
        ("/v1/completions", {"prompt": ["a"], "n": 2}, [2]),
        ("/v1/completions", {"prompt": "a", "n": 4}, [4]),
        ("/v1/chat/completions", {"n": 4}, [4]),
        ("/v1/chat/completions", {}, [1]),
    ],
)
@pytest.mark.parametrize("source", [random.Random(1), Highest()])
@pytest.mark.parametrize("dp_sizes", [(1, 1), (2, 6)])
def test_both_halves_meet_in_rooms_that_exist_and_differ(path, body, samples, source, dp_sizes):
    sent = with_rooms(path, body, host="h", port=8998, random_source=source, dp_sizes=dp_sizes)
    bootstrap = Bootstrap(sent["bootstrap_host"], sent["bootstrap_port"], sent["bootstrap_room"])
    prefill, decode = (
        rendezvous(Instance(role, max_context=100, vocabulary_size=100), bootstrap, samples)
        for role in ("prefill", "decode")
    )
    assert prefill == decode
    met = [each for each in decode if isinstance(each, wire.Rendezvous)]
    assert len(met) == sum(samples)
    assert all(0 <= each.room <= MAX_ROOM for each in met)
    if not isinstance(source, Highest):
        assert len({each.room for each in met}) == len(met)
    rooms = iter(each.room for each in met)
    for count in samples if max(samples) <= 128 else []:
        assert len({tuple(room % dp for dp in dp_sizes) for room in itertools.islice(rooms, count)}) == 1


@pytest.mark.parametrize("name", ["data_parallel_rank", "routed_dp_rank", "disagg_prefill_dp_rank"])
@pytest.mark.parametrize("source", [random.Random(1), Highest()])
def test_a_client_that_names_a_dp_rank_gets_rooms_that_belong_to_it_on_both_sides(name, source):
    for rank in range(2):
        body = {"text": ["a", "b"], name: rank}
        sent = with_rooms("/generate", body, host="h", port=1, random_source=source, dp_sizes=(2, 6))
        assert all(0 <= room <= MAX_ROOM for room in sent["bootstrap_room"])
        assert [(room % 2, room % 6) for room in sent["bootstrap_room"]] == [(rank, rank)] * 2
    for strange in (6, -1, "1", True, None):
        body = {"text": "a", name: strange}
        assert with_rooms("/generate", body, host="h", port=1, random_source=source, dp_sizes=(2, 6))["bootstrap_room"]
