"""One tiny model for all of the engine's tests: its steps are compiled once."""

from __future__ import annotations

import pytest
from small_engine import TinyModel


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return TinyModel(tmp_path_factory.mktemp("model"))
