"""Fixtures that more than one folder of tests uses."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

from pdjax.launch.fetch import fetch

settings.register_profile("loaded-machine", deadline=None)
settings.load_profile("loaded-machine")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The model folder of SmolLM2-135M-Instruct, downloaded on first use and kept in the cache."""
    return fetch("smollm2-135m-instruct", progress=False)
