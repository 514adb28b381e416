"""The simulator as machine code: it plays the same worlds, and says why where it can't be made."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pdjax.launch import compiled


def _play(*options: str) -> list[str]:
    command = [sys.executable, "-m", "pdjax.launch", "simulate", "--seeds", "1:8", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500)
    assert not done.returncode, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.soak  # compiling takes a minute
@pytest.mark.timeout(1800)
@pytest.mark.skipif(importlib.util.find_spec("mypyc") is None, reason="mypyc is not installed")
def test_compiled_worlds_are_those_that_are_interpreted() -> None:
    *worlds, speed = _play()
    *same, faster = _play("--compiled")
    assert worlds == same
    assert "interpreted" in speed and "compiled" in faster


@pytest.mark.parametrize("lacking", ["mypyc", "C compiler"])
def test_what_is_lacking_for_compiling_is_named(lacking: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None if lacking == "mypyc" else "there")
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(compiled.NotCompiled, match=f"{lacking}.*without --compiled"):
        compiled.use(tmp_path)
