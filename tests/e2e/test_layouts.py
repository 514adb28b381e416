"""Pairs whose sides are cut differently: each answers as one device does, and all pages and slots come home."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import pytest
from halves import Room, open_room
from models.dense_attention import DenseModel
from processes import Part, free_port, instance

from pdjax.layers.sharding import tensor_mesh
from pdjax.models.checkpoint import load_model
from pdjax.models.random import tiny_config, write_random_model

pytestmark = pytest.mark.e2e

PAGE, SLOTS, CONTEXT = 4, 4, 128
SHAPE: dict[str, Any] = {
    "Cache__page_size": PAGE,
    "Cache__pages": 257,
    "Engine__max_context": CONTEXT,
    "Engine__max_running_requests": 4,
    "Engine__prefill_tokens": 32,
    "Transfer__slots": SLOTS,
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp1": {},
    "tp2": {"Instance__tp": 2, "Instance__devices_per_process": 2},
    # Of two heads: each is on both devices of a process.
    "tp4": {"Instance__processes": 2, "Instance__devices_per_process": 2},
}
PAIRS = list(itertools.product(LAYOUTS, LAYOUTS))
PROMPTS = [
    [(7 * token) % 250 for token in range(length)] for length in (1, PAGE - 1, PAGE, PAGE * 8, PAGE * 8 + 1, 100)
]


@dataclass
class Fleet:
    """One instance of each role and layout, any two of which make a pair."""

    prefill: dict[str, Part]
    decode: dict[str, Part]
    bootstrap: dict[str, int]
    dense: DenseModel

    @property
    def parts(self) -> list[Part]:
        return [*self.prefill.values(), *self.decode.values()]

    def room(self, prefill: str, decode: str, prompt: list[int], tokens: int = 12) -> Room:
        return open_room(self.prefill[prefill], self.decode[decode], self.bootstrap[prefill], prompt, tokens)


def start(folder: Path, model: Path, role: str, layout: str, **options: Any) -> Part:
    return instance(folder, role, Model__folder=model, **SHAPE | LAYOUTS[layout] | options)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layouts") / "tiny"
    write_random_model(folder, tiny_config(num_heads=4, num_kv_heads=2), seed=1)
    return folder


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    dense = DenseModel(load_model(model, dtype="float32", mesh=tensor_mesh(jax.devices()[:1])), CONTEXT)
    found = Fleet({}, {}, {layout: free_port() for layout in LAYOUTS}, dense)
    try:
        for layout, port in found.bootstrap.items():
            found.prefill[layout] = start(folder, model, "prefill", layout, Disagg__bootstrap_port=port)
            found.decode[layout] = start(folder, model, "decode", layout)
        for part in found.parts:
            part.wait_ready()
        yield found
    finally:
        for part in found.parts:
            part.kill()


def ended(room: Room, seconds: float = 60.0) -> Room:
    for half in room.halves:
        half.join(seconds)
        assert half.ended_at, half
    return room


def at_rest(part: Part) -> dict[str, float]:
    """Every page and slot is home."""
    deadline = time.monotonic() + 20.0
    while True:
        metrics = part.metrics()
        if (
            not metrics["pdjax_live_requests"]
            and not metrics["pdjax_rooms"]
            and metrics["pdjax_staging_slots_free"] == SLOTS
            and metrics["pdjax_free_pages"] == metrics["pdjax_pages"]
        ):
            return metrics
        assert time.monotonic() < deadline, f"{part.name}: {metrics}\n{part.tail()}"
        time.sleep(0.2)


@pytest.mark.parametrize(("prefill", "decode"), PAIRS)
def test_every_pair_of_layouts_gives_the_tokens_of_one_device(fleet: Fleet, prefill: str, decode: str) -> None:
    rooms = [fleet.room(prefill, decode, prompt) for prompt in PROMPTS]
    for room in rooms:
        ended(room)
        assert room.prefill is not None and room.prefill.status == 200, room
        assert room.decode is not None and room.decode.output_ids == fleet.dense.greedy(room.prompt, 12), room
    for part in (fleet.prefill[prefill], fleet.decode[decode]):
        metrics = at_rest(part)
        assert metrics["pdjax_compiles_after_warmup_total"] == 0 and metrics["pdjax_failed_rooms_total"] == 0
    assert fleet.decode[decode].metrics()["pdjax_damaged_chunks_total"] == 0
