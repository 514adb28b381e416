"""Pairs whose sides are cut differently: each answers as one device does, and all pages and slots come home."""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from halves import Half, Room, open_room
from models.dense_attention import DenseModel
from processes import Part, get, instance, post, router
from tiny_pair import stop, until

from pdjax.layers.sharding import tensor_mesh
from pdjax.models.checkpoint import load_model
from pdjax.models.random import tiny_config, write_random_model

pytestmark = pytest.mark.e2e

BACKEND = Path(__file__).with_name("delayed_writes")
PAGE, SLOTS, CONTEXT = 4, 4, 128
SHAPE: dict[str, Any] = {
    "Cache__page_size": PAGE,
    "Cache__pages": 257,
    "Engine__max_context": CONTEXT,
    "Engine__max_running_requests": 4,
    "Engine__prefill_tokens": 32,
    "Transfer__slots": SLOTS,
    "Transfer__backend": "delayed",
}
LAYOUTS: dict[str, dict[str, int]] = {
    "tp1": {},
    "tp2": {"tp": 2},
    "tp4": {"processes": 2, "devices_per_process": 2},  # of two heads: each is on both devices of a process
    "dp2": {"dp": 2},  # rooms go to either device by their number
    "dp4": {"dp": 4},  # which of them is looked up
    "cp2": {"cp": 2},
    "cp2 x tp2": {"processes": 2, "devices_per_process": 2, "cp": 2},  # a process for each part of a request
    "pp2": {"pp": 2},  # a layer each
    "pp2 x tp2": {"processes": 2, "devices_per_process": 2, "pp": 2},  # a stage is a process
}
PAIRS = [
    *itertools.product(("tp1", "tp2", "tp4", "dp2", "pp2", "pp2 x tp2"), ("tp1", "tp2", "tp4", "dp2", "pp2")),
    ("tp4", "dp4"),
    ("cp2", "tp1"),
    ("cp2", "tp2"),
    ("cp2 x tp2", "tp1"),
    ("cp2 x tp2", "dp4"),
    ("tp2", "cp2"),
    ("cp2", "cp2"),
]
LENGTHS = (1, PAGE - 1, PAGE, PAGE + 1, PAGE * 8, PAGE * 8 + 1, 100)
_seeds = itertools.count()


@dataclass
class Fleet:
    """One instance of each role and layout that some pair has."""

    prefill: dict[str, Part]
    decode: dict[str, Part]
    bootstrap: dict[str, int]
    dense: DenseModel
    order: Path  # to the backends

    @property
    def parts(self) -> list[Part]:
        return [*self.prefill.values(), *self.decode.values()]

    def room(self, prefill: str, decode: str, length: int = 100, tokens: int = 12) -> Room:
        """With a prompt of its own, that no prefix cache has."""
        prompt = np.random.default_rng(next(_seeds)).integers(0, 250, length).tolist()
        return open_room(self.prefill[prefill], self.decode[decode], self.bootstrap[prefill], prompt, tokens)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layouts") / "tiny"
    write_random_model(folder, tiny_config(num_heads=4, num_kv_heads=2), seed=1)
    return folder


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    dense = DenseModel(load_model(model, dtype="float32", mesh=tensor_mesh(jax.devices()[:1])), CONTEXT)
    found = Fleet({}, {}, {}, dense, folder / "order")
    path = os.pathsep.join([str(BACKEND), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {"PYTHONPATH": path, "PDJAX_TEST_DELAY": str(found.order)}
    try:
        for layout, sizes in LAYOUTS.items():
            options: dict[str, Any] = {"env": env, "Model__folder": model, **SHAPE}
            options |= {f"Instance__{name}": size for name, size in sizes.items()}
            if layout == "dp4":
                options["Disagg__dp_policy"] = "lookup"
            if any(layout == prefill for prefill, _ in PAIRS):
                found.prefill[layout] = instance(folder, "prefill", **options, Disagg__bootstrap_port=0)
            if any(layout == decode for _, decode in PAIRS):
                found.decode[layout] = instance(folder, "decode", **options)
        for part in found.parts:
            part.wait_ready()
        for layout, part in found.prefill.items():
            info = json.loads(get(f"{part.url}/server_info")[1])
            found.bootstrap[layout] = info["disaggregation_bootstrap_port"]
        yield found
    finally:
        for part in found.parts:
            part.kill()


def wait_ended(room: Room, seconds: float = 60.0) -> None:
    for half in room.halves:
        half.join(seconds)
        assert half.ended_at, half


def is_right(fleet: Fleet, room: Room) -> bool:
    """Whether both halves have ended well, with the tokens of one device."""
    wait_ended(room)
    assert room.prefill is not None and room.decode is not None
    return room.prefill.status == 200 and room.decode.output_ids == fleet.dense.greedy(room.prompt, room.tokens)


def hold(fleet: Fleet, prefill: str, decode: str, tokens: int = 12, seconds: float = 10.0) -> Room:
    """A room some of whose bytes are on their way, and are held there for so long."""
    before = fleet.prefill[prefill].log.read_text(errors="replace").count("is held")
    fleet.order.write_text(str(seconds))
    room = fleet.room(prefill, decode, tokens=tokens)
    until(
        lambda: fleet.prefill[prefill].log.read_text(errors="replace").count("is held") >= before + 2,
        fleet.prefill[prefill],
    )
    fleet.order.write_text("")
    return room


def kill_worker(part: Part) -> None:
    """SIGKILL to the process of rank 1."""
    for process in part.processes():
        command = process.cmdline()
        if command[:1] == [sys.executable] and "pdjax.launch" in command and process.environ().get("PMI_RANK") == "1":
            process.kill()
            return
    raise AssertionError(f"{part.name} has no worker")


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
    rooms = [fleet.room(prefill, decode, length) for length in LENGTHS]
    for room in rooms:
        assert is_right(fleet, room), room
    for part in (fleet.prefill[prefill], fleet.decode[decode]):
        metrics = at_rest(part)
        assert metrics["pdjax_compiles_after_warmup_total"] == 0 and metrics["pdjax_failed_rooms_total"] == 0
    assert fleet.decode[decode].metrics()["pdjax_damaged_chunks_total"] == 0


def test_after_500_requests_pools_and_staging_lie_where_they_did_and_nothing_was_compiled(fleet: Fleet) -> None:
    parts = fleet.prefill["tp2"], fleet.decode["dp2"]
    checks = [part.metrics()["pdjax_integrity_checks_total"] for part in parts]

    def ask(number: int) -> bool:
        return is_right(fleet, fleet.room("tp2", "dp2", length=1 + number % 40, tokens=1 + number % 3))

    with ThreadPoolExecutor(16) as clients:
        assert all(clients.map(ask, range(500)))
    for part, before in zip(parts, checks, strict=True):
        at_rest(part)
        until(lambda: part.metrics()["pdjax_integrity_checks_total"] > before, part)  # noqa: B023 - waits for it here
        assert part.metrics()["pdjax_compiles_after_warmup_total"] == 0


@pytest.mark.parametrize(
    ("prefill", "one", "other"),
    [("tp2", "dp2", "pp2"), ("pp2 x tp2", "tp4", "tp1"), ("cp2 x tp2", "dp4", "tp1"), ("cp2", "cp2", "tp2")],
)
def test_a_stream_goes_on_at_an_instance_that_is_cut_differently(
    fleet: Fleet, tmp_path: Path, prefill: str, one: str, other: str
) -> None:
    pair = [fleet.decode[one], fleet.decode[other]]
    front = router(tmp_path, [fleet.prefill[prefill]], pair, "--idle-timeout", "2")
    try:
        front.wait_ready()
        until(lambda: get(f"{front.url}/metrics")[1].count(b"} 1.0\n") == 3, front)
        prompt = np.random.default_rng(next(_seeds)).integers(0, 250, 30).tolist()
        sampling = {"temperature": 0, "max_new_tokens": 97, "ignore_eos": True}
        fleet.order.write_text("slow")  # so that it has not ended before it is stopped
        stream = Half(front, {"input_ids": prompt, "rid": "goes on", "stream": True, "sampling_params": sampling})
        assert stream.first.wait(30)
        go_on = stop(pair[0])  # of two that have done nothing yet, the router asks the first
        fleet.order.write_text("")
        stream.join(30)
        go_on()
        assert not stream.error and stream.output_ids == fleet.dense.greedy(prompt, 97), front.tail()
        assert front.metrics()["pdjax_router_resumed_streams_total"] == 1
        for part in (fleet.prefill[prefill], *pair):
            assert at_rest(part)["pdjax_failed_rooms_total"] == 0
    finally:
        fleet.order.write_text("")
        front.kill()


def test_a_piece_that_one_process_has_damaged_is_sent_again(fleet: Fleet) -> None:
    fleet.order.write_text("damage 1")
    assert is_right(fleet, fleet.room("tp4", "tp4"))
    until(lambda: fleet.decode["tp4"].metrics()["pdjax_damaged_chunks_total"] == 1, fleet.decode["tp4"])
    for part in (fleet.prefill["tp4"], fleet.decode["tp4"]):
        at_rest(part)


def test_a_path_between_workers_that_moves_nothing_is_found_before_it_has_traffic(fleet: Fleet) -> None:
    fleet.order.write_text("lose tests 1")
    lost = fleet.room("cp2 x tp2", "tp4")
    wait_ended(lost)
    fleet.order.write_text("")
    assert lost.decode is not None and lost.decode.status == 502 and "failed its test" in lost.decode.error
    assert is_right(fleet, fleet.room("cp2 x tp2", "tp4"))


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_room_that_is_aborted_while_all_ranks_write_gives_its_slots_back_when_the_last_has_ended(
    fleet: Fleet, side: str
) -> None:
    room = hold(fleet, "tp4", "tp4")
    status, _ = post(f"{getattr(fleet, side)['tp4'].url}/abort_request", {"abort_all": True})
    assert status == 200
    wait_ended(room, 3.0)
    until(lambda: fleet.decode["tp4"].metrics()["pdjax_staging_slots_free"] < SLOTS, fleet.decode["tp4"], 6.0)
    for part in (fleet.prefill["tp4"], fleet.decode["tp4"]):
        at_rest(part)
    assert is_right(fleet, fleet.room("tp4", "tp4"))


def test_a_killed_worker_of_a_decode_instance_fails_its_rooms_and_no_others(fleet: Fleet) -> None:
    other = fleet.room("tp2", "tp1", tokens=20)
    room = hold(fleet, "tp2", "tp4")
    kill_worker(fleet.decode["tp4"])
    killed = time.monotonic()
    wait_ended(room, 8.0)
    assert room.prefill is not None and room.prefill.told and "decode instance" in room.prefill.error, room
    assert fleet.decode["tp4"]._process.wait(8.0 - (time.monotonic() - killed)) != 0
    assert is_right(fleet, other) and is_right(fleet, fleet.room("tp2", "tp1"))
    at_rest(fleet.prefill["tp2"])


@pytest.mark.parametrize("layout", ["tp4", "pp2 x tp2"])
def test_a_killed_worker_of_a_prefill_instance_fails_its_rooms_and_no_others(fleet: Fleet, layout: str) -> None:
    room = hold(fleet, layout, "tp2")
    kill_worker(fleet.prefill[layout])
    killed = time.monotonic()
    wait_ended(room, 8.0)
    assert room.decode is not None and room.decode.told and "prefill instance" in room.decode.error, room
    assert fleet.prefill[layout]._process.wait(8.0 - (time.monotonic() - killed)) != 0
    assert is_right(fleet, fleet.room("tp1", "tp2"))
    at_rest(fleet.decode["tp2"])
