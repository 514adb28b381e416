"""A side that is cut by cp: its pool's pages are larger than those that are moved, and nobody else need know."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cp_pairs import LENGTHS, SAMPLED, SAMPLES, TOKENS
from small_engine import PAGE

SECONDS = 600  # on a machine that is busy with other things
pytestmark = pytest.mark.timeout(SECONDS)

PAIRS: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "cp2 x tp2 to tp1": ({"devices": 4, "cp": 2}, {}),
    "tp1 to cp4": ({}, {"devices": 4, "cp": 4}),
    "cp2 x tp2 to cp4": ({"devices": 4, "cp": 2}, {"devices": 4, "cp": 4}),
}
POLICIES = ("early", "prefill_complete")
CASES = [(name, policy) for name in PAIRS for policy in POLICIES]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, dict[str, Any]]:
    """What one engine answers, by the name "unified", and what each pair does."""
    program = Path(__file__).with_name("cp_pairs.py")
    command = [sys.executable, str(program), str(tmp_path_factory.mktemp("cp")), json.dumps(list(PAIRS.values()))]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return dict(zip(["unified", *CASES], json.loads(ended.stdout), strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(case))
def test_a_pair_answers_as_one_device_whatever_its_pools_pages(
    found: dict[Any, dict[str, Any]], case: tuple[str, str]
) -> None:
    """Prompts around pages of either side, second turns that find the first ones' pages, samples of one prompt."""
    assert found[case]["ids"] == found["unified"]["ids"]
    for rid, logprobs in found["unified"]["prompt_logprobs"].items():
        if logprobs:
            assert found[case]["prompt_logprobs"][rid][1:] == pytest.approx(logprobs[1:], abs=1e-4), rid


@pytest.mark.parametrize("name", PAIRS)
def test_only_pages_that_hold_something_new_are_moved(found: dict[Any, dict[str, Any]], name: str) -> None:
    cp = PAIRS[name][1].get("cp", 1)

    def known(tokens: int) -> int:
        """Pages that the decode side has of a text: it shares whole ones of its pool only."""
        return tokens // (PAGE * cp) * cp

    first = [-(-length // PAGE) for length in LENGTHS]
    second = [-(-(length + TOKENS + 5) // PAGE) - known(length + TOKENS - 1) for length in LENGTHS]
    whole = -(-SAMPLED // PAGE)
    others = (SAMPLES - 1) * (whole - known(SAMPLED))
    assert found[name, "early"]["pages"] == [sum(first), sum(second), whole + others]
