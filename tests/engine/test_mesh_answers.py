"""However a mesh cuts the model and the pool, answers are those of one device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mesh_answers import serve
from small_engine import PAGE, POOL_PAGES, TinyModel

SECONDS = 900  # on a machine that is busy with other things; alone a sixth of it
pytestmark = pytest.mark.timeout(SECONDS)

MESHES: dict[str, tuple[dict[str, int], list[int]]] = {  # TinyModel's arguments, and a device's shard of the pool
    "dp4": ({"devices": 4, "dp": 4}, [2, POOL_PAGES, 4, 2, PAGE, 16]),
    "cp2": ({"devices": 2, "cp": 2}, [2, POOL_PAGES, 4, 2, PAGE, 16]),
    "tp8": ({"devices": 8}, [2, POOL_PAGES, 1, 2, PAGE, 16]),
    "dp2 x cp2 x tp2": ({"devices": 8, "dp": 2, "cp": 2}, [2, POOL_PAGES, 2, 2, PAGE, 16]),
    # Three microchunks, which 52 tokens do not fill.
    "pp2 x tp2": ({"devices": 4, "pp": 2, "prefill_tokens": 52}, [1, POOL_PAGES, 2, 2, PAGE, 16]),
    "pp2 x dp2 x cp2": ({"devices": 8, "pp": 2, "dp": 2, "cp": 2}, [1, POOL_PAGES, 4, 2, PAGE, 16]),
}


@pytest.fixture(scope="module")
def one_device(tiny: TinyModel) -> dict[str, Any]:
    return serve(tiny)


@pytest.fixture(scope="module")
def meshes(tiny: TinyModel) -> dict[str, dict[str, Any]]:
    program = Path(__file__).with_name("mesh_answers.py")
    shapes = json.dumps([arguments for arguments, _ in MESHES.values()])
    command = [sys.executable, str(program), str(tiny.folder), shapes]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return dict(zip(MESHES, json.loads(ended.stdout), strict=True))


@pytest.mark.parametrize("name", MESHES)
def test_answers_are_those_of_one_device(
    one_device: dict[str, Any], meshes: dict[str, dict[str, Any]], name: str
) -> None:
    """Prompts around whole pages and chunks, cached prefixes, full batches, a pool too small for all of them."""
    found = meshes[name]
    assert found["ids"] == one_device["ids"]
    for rid, logprobs in one_device["logprobs"].items():
        assert found["logprobs"][rid] == pytest.approx(logprobs, abs=1e-4), rid
    assert found["prompt_logprobs"][1:] == pytest.approx(one_device["prompt_logprobs"][1:], abs=1e-4)
    assert found["cached"] > 0 and found["retractions"] > 0, "the requests were meant to share and to crowd"
    assert found["compiles"] == 0
    assert found["shard"] == MESHES[name][1]
    assert not found["misplaced"]
    assert not found["on the wrong rank"], "these had named the last dp rank"


def test_a_device_of_a_pipeline_stage_holds_no_weights_of_another_stage(
    one_device: dict[str, Any], meshes: dict[str, dict[str, Any]]
) -> None:
    whole = one_device["weights"][0]
    assert max(meshes["pp2 x tp2"]["weights"]) < 1.05 * whole / 4, "matrices are cut by 4, norms by 2"
