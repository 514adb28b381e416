"""Instances that the end-to-end tests share. Those that kill something start their own."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from processes import Deployment, Part, instance, router
from tiny_pair import CONFIG

from pdjax import config
from pdjax.engine_thread import EngineThread
from pdjax.models.random import tiny_config, write_random_model
from pdjax.wire import Failed, Generate, SamplingParams, Tokens


@pytest.fixture(scope="session")
def unified(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Iterator[Part]:
    part = instance(tmp_path_factory.mktemp("unified"), "unified")
    try:
        yield part.wait_ready()
    finally:
        part.kill()


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("pair")
    started: list[Part] = []
    try:
        started.append(instance(folder, "prefill", Disagg__bootstrap_port=0))
        started.append(instance(folder, "decode"))
        prefill, decode = (part.wait_ready() for part in started)
        started.append(router(folder, [prefill], [decode]))
        yield Deployment(prefill, decode, started[-1].wait_ready())
    finally:
        for part in started:
            part.kill()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_random_model(folder, tiny_config(), seed=1)
    return folder


@pytest.fixture(scope="session")
def tiny_answer(tiny_model: Path) -> Iterator[Callable[[list[int], int], list[int]]]:
    """What a unified engine answers, greedily."""
    engine = EngineThread(config.load([CONFIG], [f"Model.folder={tiny_model}"]), tiny_model)
    known: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def ask(input_ids: list[int], tokens: int) -> list[int]:
        key = (tuple(input_ids), tokens)
        if key in known:
            return known[key]
        replies: queue.SimpleQueue[Tokens | Failed] = queue.SimpleQueue()
        sampling = SamplingParams(max_new_tokens=tokens, temperature=0.0, ignore_eos=True)
        engine.submit([Generate(f"expected-{len(known)}", input_ids, sampling)], replies)
        ids = known[key] = []
        while True:
            frame = engine.next(replies)
            assert isinstance(frame, Tokens), frame
            ids += frame.token_ids
            if frame.finish_reason is not None:
                return ids

    yield ask
    engine.stop()
