"""Processes with a Network."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.jobs import Job


@pytest.fixture(params=["over MPI", "plain"])
def start(request: pytest.FixtureRequest) -> Iterator[Callable[..., Job]]:
    """Starts a peer that greets with a name, and whose links do with or without MPI; all end with the test."""
    jobs: list[Job] = []

    def start_one(name: str, secret: str | None = None) -> Job:
        job = Job(
            Path(__file__).with_name("peer.py"),
            request.param,
            *([] if secret is None else [secret]),
            started=jobs.append,
        )
        job.do("hello", text=name)
        return job

    yield start_one
    for job in jobs:
        job.end()
