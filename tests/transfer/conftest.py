"""Processes with a transfer backend."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.jobs import Job
from tests.transfer import emulated_gpu

RING, SMALL = 64 << 20, 1 << 20
PATHS = {"mapped": "mapped, notices by tcp/", "put": "tcp/"}  # how each mode of ucx describes itself
_SCRIPT = Path(__file__).with_name("peer.py")


def _needs(mode: str, *modules: str) -> object:
    there = any(importlib.util.find_spec(module) for module in modules)
    return pytest.param(mode, marks=pytest.mark.skipif(not there, reason=f"{modules[0]} is not installed"))


MOVING = [*PATHS, "jax", _needs("nixl", "nixl_cu12", "nixl_cu13"), _needs("mooncake", "mooncake")]
every_backend = pytest.mark.parametrize("mode", [*MOVING, "fake"])
needs_emulated_gpu = pytest.mark.skipif(not emulated_gpu.IS_POSSIBLE, reason="there is no libucx or no C compiler")
every_backend_that_moves = pytest.mark.parametrize("mode", [*MOVING, pytest.param("cuda", marks=needs_emulated_gpu)])
both_paths = pytest.mark.parametrize("mode", PATHS)


def connect(source: Job, target: Job, name: str = "target") -> str:
    """Open a path. Returns it in words."""
    return source.ask("connect", peer=name, description=target.ask("describe")["description"])["path"]


@pytest.fixture(scope="session", name="emulated_gpu")
def emulated_gpu_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where an emulated GPU's driver is."""
    folder = tmp_path_factory.mktemp("gpu")
    emulated_gpu.build(folder)
    return folder


@pytest.fixture
def start(request: pytest.FixtureRequest) -> Iterator[Callable[..., Job]]:
    """Starts a peer whose ring and source have `RING` bytes; all end with the test."""
    jobs: list[Job] = []

    def start_one(mode: str = "mapped", size: int = RING) -> Job:
        more = [str(request.getfixturevalue("emulated_gpu"))] if mode == "cuda" else []
        return Job(_SCRIPT, str(size), mode, *more, started=jobs.append)

    yield start_one
    for job in jobs:
        job.end()


@pytest.fixture(scope="module")
def pair() -> Iterator[Callable[[str], tuple[Job, Job]]]:
    """Target and source of a mode, connected, for tests that leave them as they were."""
    jobs: list[Job] = []
    pairs: dict[str, tuple[Job, Job]] = {}

    def pair_of(mode: str) -> tuple[Job, Job]:
        if mode not in pairs:
            target, source = (Job(_SCRIPT, str(SMALL), mode, started=jobs.append) for _ in range(2))
            connect(source, target)
            pairs[mode] = (target, source)
        return pairs[mode]

    yield pair_of
    for job in jobs:
        job.end()
