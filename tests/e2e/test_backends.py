"""A pair whose chunks move by another backend than UCX."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_pair import TinyPair, prompt, wait_ended

pytestmark = pytest.mark.e2e


def test_over_jax_transfers_a_pair_answers_as_one_engine_does_also_after_a_death(
    tmp_path: Path, tiny_model: Path, tiny_answer: Callable[[list[int], int], list[int]]
) -> None:
    pair = TinyPair(tmp_path, tiny_model, tiny_answer, Transfer__backend="jax")
    try:
        rooms = [pair.room(prompt(length)) for length in (1, 40, 200, 300)]
        wait_ended(rooms)
        assert all(pair.is_right(room) for room in rooms)
        pair.at_rest()
        pair.replace("prefill", same_ports=True)
        pair.answers_rightly()
        pair.at_rest()
    finally:
        pair.kill()
