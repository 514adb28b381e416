"""The benchmarks start as they are written down: as scripts, from any folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "bench"
BENCHMARKS = [path for path in sorted(FOLDER.glob("*.py")) if '"--json"' in path.read_text()]


@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda path: path.stem)
def test_a_benchmark_says_what_it_takes(benchmark: Path, tmp_path: Path) -> None:
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    asked = subprocess.run(
        [sys.executable, benchmark, "--help"], cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=120
    )
    assert asked.returncode == 0, asked.stderr
    assert "--json" in asked.stdout
