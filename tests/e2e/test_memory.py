"""A pair whose decode pool is small, and so is its host memory: requests share it, leave it and come back, most of them
computed again, with a unified instance's tokens."""

from __future__ import annotations

import concurrent.futures
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import Deployment, Part, free_port, instance, post, router, stream

from pdjax.models.random import tiny_config, write_random_model

pytestmark = pytest.mark.e2e

CONFIG = Path(__file__).with_name("tiny.gin")
PAGES = 60
_rooms = itertools.count(random.SystemRandom().randrange(1 << 40), 100)


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Deployment, Part, int]]:
    """A pair behind a router, a unified instance, and the pair's bootstrap port."""
    folder = tmp_path_factory.mktemp("memory")
    write_random_model(folder / "model", tiny_config(), seed=1)
    bootstrap = free_port()
    model: dict[str, Any] = {"config": CONFIG, "Model__folder": folder / "model"}
    decode: dict[str, Any] = {
        "Cache__pages": PAGES + 1,
        "Cache__host_pages": 8,
        "Disagg__num_reserved_decode_tokens": 16,
    }
    started = [
        instance(folder, "prefill", Disagg__bootstrap_port=bootstrap, **model),
        instance(folder, "decode", **model, **decode),
        instance(folder, "unified", **model),
    ]
    try:
        prefill, decoding, unified = (part.wait_ready() for part in started)
        started.append(router(folder, [prefill], [decoding]))
        yield Deployment(prefill, decoding, started[-1].wait_ready()), unified, bootstrap
    finally:
        for part in started:
            part.kill()


def test_under_pressure_every_request_gets_its_tokens(parts: tuple[Deployment, Part, int]) -> None:
    pair, unified, _ = parts
    options = {"max_new_tokens": 300, "temperature": 1, "ignore_eos": True, "repetition_penalty": 1.1}
    bodies = [
        {
            "input_ids": [(17 * number + 3 * index) % 250 for index in range(20 + 9 * number)],
            "sampling_params": options | {"seed": number},
        }
        for number in range(8)
    ]
    with concurrent.futures.ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(lambda body: post(f"{pair.router.url}/generate", body), bodies))
    assert [status for status, _ in answers] == [200] * 8
    for body, (_, answer) in zip(bodies, answers, strict=True):
        assert answer["output_ids"] == post(f"{unified.url}/generate", body)[1]["output_ids"]
    metrics, again = pair.decode.metrics(), pair.prefill.metrics()["pdjax_rebootstraps_total"]
    resumed = metrics["pdjax_resumed_requests_total"]
    assert metrics["pdjax_rebootstraps_total"] == again > 0
    assert metrics["pdjax_retractions_total"] == resumed + again
    assert metrics["pdjax_free_pages"] == PAGES and metrics["pdjax_host_pages"] == 0
    assert metrics["pdjax_compiles_after_warmup_total"] == 0


def test_samples_of_one_room_sent_to_both_halves_are_streamed_under_their_numbers(
    parts: tuple[Deployment, Part, int],
) -> None:
    """As SGLang's router has it: one room number stands for all samples of a prompt."""
    pair, unified, bootstrap = parts
    body: dict[str, Any] = {
        "input_ids": [(7 * index) % 250 for index in range(100)],
        "sampling_params": {"n": 3, "max_new_tokens": 20, "temperature": 1, "seed": 5, "ignore_eos": True},
    }
    alone = post(f"{unified.url}/generate", body)[1]
    meeting = {"bootstrap_host": "127.0.0.1", "bootstrap_port": bootstrap, "bootstrap_room": next(_rooms)}
    with concurrent.futures.ThreadPoolExecutor(1) as other:
        prefill = other.submit(post, f"{pair.prefill.url}/generate", body | meeting)
        outputs: dict[int, list[int]] = {}
        for event in stream(f"{pair.decode.url}/generate", body | meeting | {"stream": True}):
            outputs[event["index"]] = event["output_ids"]
        assert prefill.result()[0] == 200
    assert [outputs[index] for index in range(3)] == [each["output_ids"] for each in alone]
