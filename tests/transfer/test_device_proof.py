"""Where UCX does not move a device's memory, an instance finds out at start and says why."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pdjax.net.mpi import environment

pytestmark = pytest.mark.e2e


def test_only_a_ucx_that_moves_what_is_there_is_left_to_it() -> None:
    root = Path(__file__).parents[2]
    command = [Path(sys.executable).with_name("mpiexec"), "-n", "1", sys.executable, "-m", "tests.transfer.proofs"]
    whole = environment(dict(os.environ)) | {"PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=root, env=whole, capture_output=True, text=True, timeout=120, check=True)
    said = next(json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    assert said.pop("moves") is None
    for ucx, words in {
        "this machine's": "ucx moves the host's only",
        "without a driver": "the CUDA driver cannot be loaded",
        "takes for the host's": "UCX takes the GPU's memory",
        "moves something else": "has not moved what was there",
        "moves nothing": "was not done within 0.5 s",
    }.items():
        assert words in said.pop(ucx)
    assert not said
