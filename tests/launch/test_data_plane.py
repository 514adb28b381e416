"""What the configuration says about peers."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdjax.config import Config, ConfigError, Disagg
from pdjax.launch.data_plane import read_secret


def test_the_secret_comes_from_its_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "secret"
    file.write_text("word\n")
    monkeypatch.delenv("PDJAX_SECRET", raising=False)
    assert read_secret(Config()) is None
    assert read_secret(Config(disagg=Disagg(secret_file=str(file)))) == b"word"
    monkeypatch.setenv("PDJAX_SECRET", "other")
    assert read_secret(Config()) == b"other"
    assert read_secret(Config(disagg=Disagg(secret_file=str(file)))) == b"word"


def test_a_secret_file_that_has_none_is_refused_in_words(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    with pytest.raises(ConfigError, match=r"Disagg\.secret_file: .*secret cannot be read: No such file"):
        read_secret(Config(disagg=Disagg(secret_file=str(file))))
    file.write_text(" \n")
    with pytest.raises(ConfigError, match="is empty"):
        read_secret(Config(disagg=Disagg(secret_file=str(file))))
