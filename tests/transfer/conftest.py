"""Processes with a UCX backend."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.jobs import Job

RING, SMALL = 96 << 20, 1 << 20
PATHS = {"mapped": "mapped, notices by tcp/", "put": "tcp/"}  # how each mode describes itself
_SCRIPT = Path(__file__).with_name("peer.py")


def connect(source: Job, target: Job, name: str = "target") -> str:
    """Open a path. Returns it in words."""
    return source.ask("connect", peer=name, description=target.ask("describe")["description"])["path"]


@pytest.fixture
def start() -> Iterator[Callable[..., Job]]:
    """Starts a peer whose ring and source have `RING` bytes; all end with the test."""
    jobs: list[Job] = []

    def start_one(mode: str = "mapped", size: int = RING) -> Job:
        return Job(_SCRIPT, str(size), mode, started=jobs.append)

    yield start_one
    for job in jobs:
        job.end()


@pytest.fixture(scope="module")
def pair() -> Iterator[dict[str, tuple[Job, Job]]]:
    """Target and source for each mode, connected, for tests that leave them as they were."""
    jobs: list[Job] = []
    pairs = {}
    try:
        for mode in PATHS:
            target, source = (Job(_SCRIPT, str(SMALL), mode, started=jobs.append) for _ in range(2))
            connect(source, target)
            pairs[mode] = (target, source)
        yield pairs
    finally:
        for job in jobs:
            job.end()
