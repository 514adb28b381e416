"""Tiny models for both sides of a pair: their steps are compiled once."""

from __future__ import annotations

import pytest
from close_pair import ClosePair
from small_engine import TinyModel


class Models:
    """The same weights twice, each over a pool of its own; makes pairs over them."""

    def __init__(self, prefill: TinyModel, decode: TinyModel) -> None:
        self.prefill, self.decode = prefill, decode

    def pair(self, **options) -> ClosePair:
        return ClosePair(self.prefill, self.decode, **options)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(*(TinyModel(tmp_path_factory.mktemp("model")) for _ in range(2)))
