"""Instances of several processes: one mesh over all their devices, which lives and dies as a whole."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import psutil
import pytest
from models.dense_attention import DenseModel
from processes import Part, get, instance, post

from pdjax.layers.sharding import tensor_mesh
from pdjax.models.checkpoint import load_model
from pdjax.models.random import tiny_config, write_random_model

pytestmark = pytest.mark.e2e

PAGE = 4
SHAPE: dict[str, Any] = {
    "Cache__page_size": PAGE,
    "Cache__pages": 33,
    "Engine__max_context": 128,
    "Engine__max_running_requests": 2,
    "Engine__prefill_tokens": 32,
    "Instance__processes": 2,
}
FLIPPED_PAGE = Path(__file__).parent / "flipped_page"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mesh") / "tiny"
    write_random_model(folder, tiny_config(), seed=1)
    return folder


@pytest.fixture(scope="module")
def dense(model: Path) -> DenseModel:
    return DenseModel(load_model(model, dtype="float32", mesh=tensor_mesh(jax.devices()[:1])), 128)


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Part]:
    """Two processes with two devices each."""
    part = instance(tmp_path_factory.mktemp("mesh"), "unified", Model__folder=model, **SHAPE,
                    Instance__devices_per_process=2)  # fmt: skip
    try:
        yield part.wait_ready()
    finally:
        part.kill()


def start(folder: Path, model: Path, env: dict[str, str] | None = None) -> Part:
    """Two processes with a device each, which compile what they are asked for."""
    return instance(folder, "unified", env=env, Model__folder=model, **SHAPE, Engine__warmup=False)


def ranks(part: Part) -> dict[int, psutil.Process]:
    """The processes that hold a part's devices."""
    found = {}
    for process in part.processes():
        command = process.cmdline()
        if command[:1] == [sys.executable] and "pdjax.launch" in command and process.parent() is not None:
            found[int(process.environ()["PMI_RANK"])] = process
    return found


def greedy(ids: list[int], tokens: int) -> dict:
    return {"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}}


def gone(processes: list[psutil.Process], seconds: float) -> None:
    """Wait until none of them is left."""
    _, alive = psutil.wait_procs(processes, seconds)
    assert not alive, f"left behind: {[' '.join(process.cmdline()) for process in alive]}"


def test_four_devices_of_two_processes_give_the_tokens_of_one(mesh: Part, dense: DenseModel) -> None:
    """Also where requests share pages, and where the pool is too small for all of them."""
    text = [(7 * i) % 250 for i in range(60)]
    lengths = [1, PAGE * 5 - 1, PAGE * 5, PAGE * 5 + 1, 45, 60]
    with ThreadPoolExecutor(len(lengths)) as pool:
        answers = list(
            pool.map(lambda length: post(f"{mesh.url}/generate", greedy(text[:length], 60), timeout=300), lengths)
        )
    for length, (status, answer) in zip(lengths, answers, strict=True):
        assert status == 200, answer
        assert answer["output_ids"] == dense.greedy(text[:length], 60), f"{length} prompt tokens"
    metrics = mesh.metrics()
    assert metrics["pdjax_retractions_total"] > 0, "the pool was not too small"
    assert metrics["pdjax_compiles_after_warmup_total"] == 0
    info = get(f"{mesh.url}/server_info")[1].decode()
    assert '"tp_size":4' in info and '"processes":2' in info


@pytest.mark.parametrize("axis", ["dp", "cp", "pp"])
def test_an_axis_over_two_processes_gives_the_tokens_of_one_device(
    tmp_path: Path, model: Path, dense: DenseModel, axis: str
) -> None:
    shape = SHAPE | {"Engine__max_running_requests": 4, "Engine__warmup": False, f"Instance__{axis}": 2}
    part = instance(tmp_path, "unified", Model__folder=model, **shape, Instance__tp=2)
    try:
        part.wait_ready()
        texts = [[(7 * i + length) % 250 for i in range(length)] for length in (1, PAGE * 5, PAGE * 5 + 1, 45, 60, 61)]
        with ThreadPoolExecutor(len(texts)) as pool:
            answers = list(pool.map(lambda ids: post(f"{part.url}/generate", greedy(ids, 40), timeout=300), texts))
        for ids, (status, answer) in zip(texts, answers, strict=True):
            assert status == 200, answer
            assert answer["output_ids"] == dense.greedy(ids, 40), f"{len(ids)} prompt tokens"
        assert part.metrics()["pdjax_pages"] == (64 if axis == "dp" else 32)
        info = get(f"{part.url}/server_info")[1].decode()
        assert f'"{axis}_size":2' in info and '"tp_size":2' in info and '"processes":2' in info
    finally:
        part.kill()


def test_an_idle_worker_sleeps(mesh: Part) -> None:
    worker = ranks(mesh)[1]
    time.sleep(1.0)
    before = worker.cpu_times()
    time.sleep(3.0)
    after = worker.cpu_times()
    assert after.user + after.system - before.user - before.system < 0.6, "MPI's waits take all of 3 s"


def test_a_worker_that_is_asked_to_stop_ends_the_whole_instance_in_order(mesh: Part) -> None:
    everything = mesh.processes()
    ranks(mesh)[1].send_signal(signal.SIGTERM)
    assert mesh._process.wait(20) == 0, mesh.tail()
    gone(everything, 10)


@pytest.mark.parametrize("victim", [1, 0])
def test_a_process_that_is_killed_takes_its_instance_with_it(tmp_path: Path, model: Path, victim: int) -> None:
    part = start(tmp_path, model).wait_ready()
    everything = part.processes()
    process = ranks(part)[victim]
    process.kill()
    killed = time.monotonic()
    assert part._process.wait(20) != 0
    gone(everything, 10)
    assert time.monotonic() - killed < 8.0
    if victim == 1:
        assert f"rank 1 (process {process.pid} on " in part.tail()


def test_a_flipped_page_in_one_workers_plan_stops_the_instance_and_is_named(tmp_path: Path, model: Path) -> None:
    path = os.pathsep.join([str(FLIPPED_PAGE), *filter(None, [os.environ.get("PYTHONPATH")])])
    part = start(tmp_path, model, {"PYTHONPATH": path}).wait_ready()
    everything = part.processes()
    try:
        status, answer = post(f"{part.url}/generate", greedy([1, 2, 3], 77), timeout=300)
        assert status == 503 and "out of step" in answer["error"]["message"], answer
    finally:
        code = part._process.wait(20)
        gone(everything, 10)
    said = part.tail()
    found = re.search(r"rank 1 .* is out of step: it disagrees about order \d+: rows\[0\]\.pages\[0\] is (\d+), "
                      r"the leader's is (\d+)", said)  # fmt: skip
    assert found is not None and int(found[1]) ^ 1 == int(found[2]), said
    assert code != 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["unified", "--nproc", "2", "--gin.Instance.tp=3"],
            "which all must take part: set it to 4 or 0",
        ),
    ],
)
def test_a_shape_that_is_not_served_is_refused_in_words(model: Path, arguments: list[str], words: str) -> None:
    command = [sys.executable, "-m", "pdjax.launch", *arguments, f"--gin.Model.folder={model}", "--gin.Server.port=0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, stdin=subprocess.DEVNULL, check=False)
    assert ended.returncode != 0
    assert words in ended.stderr, ended.stderr
