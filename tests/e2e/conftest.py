"""Instances that the end-to-end tests share. Those that kill something start their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import Deployment, Part, instance, router


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
