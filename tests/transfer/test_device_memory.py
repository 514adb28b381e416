"""A GPU's memory is left to UCX where UCX moves it; where it does not, an instance finds out at start and says why."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pdjax.net.mpi import environment
from tests.transfer.conftest import needs_emulated_gpu

pytestmark = pytest.mark.e2e


def asked(*arguments: str, **variables: str) -> dict[str, Any]:
    root = Path(__file__).parents[2]
    python = [sys.executable, "-m", "tests.transfer.proofs", *arguments]
    whole = environment(dict(os.environ)) | {"PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"} | variables
    command = [str(Path(sys.executable).with_name("mpiexec")), "-n", "1", *python]
    done = subprocess.run(command, cwd=root, env=whole, capture_output=True, text=True, timeout=120, check=False)
    assert not done.returncode, done.stderr
    return next(json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))


def test_without_cuda_transports_it_is_not() -> None:
    assert asked() == {"problem": "this UCX has no cuda transports"}


@needs_emulated_gpu
@pytest.mark.parametrize(("variables", "flushes"), [({}, 1), ({"EMULATED_GPU_ORDERS": "1"}, 0)])
def test_only_a_ucx_that_moves_what_is_there_is_left_to_it(emulated_gpu: Path, variables: dict, flushes: int) -> None:
    """And a GPU that does not order what network cards write is flushed."""
    said = asked(str(emulated_gpu), **variables)
    assert said["whole"] is None and said["copied"] >= 1 << 20
    for ucx, words in {
        "unknown": "UCX takes the GPU's memory",
        "elsewhere": "has not moved what was there",
        "silent": "was not done within 0.5 s",
    }.items():
        assert words in said[ucx]
    assert said["to a GPU"] == said["from a GPU"] == 100_000
    assert said["flushes"] == flushes
