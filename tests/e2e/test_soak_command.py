"""``soak``: nothing is wrong, lost or leaked, whatever is broken meanwhile."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.e2e


def soak(*arguments: str, seconds: float) -> dict[str, Any]:
    command = [sys.executable, "-m", "pdjax.launch", "soak", "--json", *arguments]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds)
    assert ended.stdout, ended.stderr[-3000:]
    result = json.loads(ended.stdout.splitlines()[-1])
    assert ended.returncode == (0 if result["ok"] else 1)
    return result


def test_faults_cost_requests_and_never_a_token_or_a_page() -> None:
    result = soak("--minutes", "0.35", "--seed", "5", seconds=280)
    assert result["ok"], json.dumps(result)
    assert sum(result["faults"].values()) >= 1 and result["answered"] > 0, json.dumps(result)


@pytest.mark.soak
@pytest.mark.timeout(1500)
def test_2000_requests_without_faults_all_get_their_answer() -> None:
    result = soak("--no-faults", "--requests", "2000", "--minutes", "20", seconds=1400)
    assert result["ok"] and result["requests"] >= 2000, json.dumps(result)


@pytest.mark.soak
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("prefill", "decode"), [("2", "1"), ("1", "2")])
def test_several_instances_of_a_role(prefill: str, decode: str) -> None:
    result = soak("--minutes", "2", "--prefill", prefill, "--decode", decode, seconds=1400)
    assert result["ok"], json.dumps(result)
