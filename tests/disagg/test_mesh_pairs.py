"""Sides on meshes: cut by cp, where a pool's pages are larger than those that are moved; or with several dp ranks, of
which each side takes one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mesh_pairs import LENGTHS, SAMPLED, TOKENS
from small_engine import PAGE

from pdjax.disagg.protocol.topology import FOLLOW_BOOTSTRAP_ROOM, LOOKUP

SECONDS = 600  # on a machine that is busy with other things
pytestmark = pytest.mark.timeout(SECONDS)

PAIRS: dict[str, tuple[dict[str, int], dict[str, int], str]] = {
    "cp2 x tp2 to tp1": ({"devices": 4, "cp": 2}, {}, FOLLOW_BOOTSTRAP_ROOM),
    "tp1 to cp4": ({}, {"devices": 4, "cp": 4}, FOLLOW_BOOTSTRAP_ROOM),
    "cp2 x tp2 to cp4": ({"devices": 4, "cp": 2}, {"devices": 4, "cp": 4}, FOLLOW_BOOTSTRAP_ROOM),
    "dp4 to dp2": ({"devices": 4, "dp": 4}, {"devices": 2, "dp": 2}, LOOKUP),
}
POLICIES = ("early", "prefill_complete")
CASES = [(name, policy) for name in PAIRS for policy in POLICIES]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, dict[str, Any]]:
    """What one engine answers, by the name "unified", and what each pair does."""
    program = Path(__file__).with_name("mesh_pairs.py")
    command = [sys.executable, str(program), str(tmp_path_factory.mktemp("meshes")), json.dumps(list(PAIRS.values()))]
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
    _, decode, _ = PAIRS[name]
    cp, dp = decode.get("cp", 1), decode.get("dp", 1)

    def known(tokens: int) -> int:
        """Pages that the decode side has of a text: it shares whole ones of its pool only."""
        return tokens // (PAGE * cp) * cp

    first = [-(-length // PAGE) for length in LENGTHS]
    second = [-(-(length + TOKENS + 5) // PAGE) - known(length + TOKENS - 1) for length in LENGTHS]
    whole = -(-SAMPLED // PAGE)
    rest = whole - known(SAMPLED)
    pages = found[name, "early"]["pages"]
    assert [pages[0], pages[2]] == [sum(first), whole + 2 * rest]  # samples go where the first of them is
    assert pages[3] == min(dp, 2) * whole + (3 - min(dp, 2)) * rest  # a rank has what was sent to it
    assert pages[1] == sum(second) or dp > 1


@pytest.mark.parametrize("name", PAIRS)
def test_requests_that_lose_their_pages_are_computed_again_and_keep_their_tokens(
    found: dict[Any, dict[str, Any]], name: str
) -> None:
    answers, computed_again = found[name, POLICIES[-1]]["crowd"]
    assert computed_again > 0
    assert answers == found["unified"]["crowd"]
