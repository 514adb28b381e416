"""A configuration is taken whole or refused with the place and the nearest right name."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdjax import config

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("file", sorted((ROOT / "configs").glob("*.gin")), ids=lambda file: file.name)
def test_every_shipped_configuration_loads(file: Path) -> None:
    config.load([file])


def test_later_files_and_overrides_win(tmp_path: Path) -> None:
    base, more = tmp_path / "base.gin", tmp_path / "more.gin"
    base.write_text("TOKENS = 128\nEngine.prefill_tokens = %TOKENS\nEngine.max_context = 512\n")
    more.write_text("include 'base.gin'\nEngine.max_context = 1024\n")
    loaded = config.load([more], ["Server.port=1234", "Model.folder=some/where"])
    assert loaded.engine.prefill_tokens == 128
    assert loaded.engine.max_context == 1024
    assert loaded.server.port == 1234
    assert loaded.model.folder == "some/where"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("Engin.max_context = 4", "did you mean 'Engine'"),
        ("Engine.max_contxt = 4", "did you mean 'max_context'"),
        ('Engine.max_context = "4"', "takes a whole number, not '4'"),
        ("Engine.max_context = 0", "must be at least 1"),
        ("Cache.page_size = 17", "power of two"),
        ("Engine.max_context = ", ":2"),
        ("import os", "imports no code"),
        ("Engine.max_context = @open", "literal"),
        ("Engine.max_context = %NONE", "no macro"),
    ],
)
def test_a_wrong_line_is_refused_with_its_place_and_what_would_be_right(tmp_path: Path, line: str, said: str) -> None:
    file = tmp_path / "wrong.gin"
    file.write_text(f"# a comment\n{line}\n")
    with pytest.raises(config.ConfigError) as refusal:
        config.load([file])
    assert f"{file}:2" in str(refusal.value)
    assert said in str(refusal.value)


def test_help_names_every_option_with_its_default() -> None:
    text = config.describe()
    assert "--gin.Cache.page_size=16" in text
    assert all(f"{name}:" in text for name in config.SECTIONS)
