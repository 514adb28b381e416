"""A configuration is taken whole or refused with the place and the nearest right name."""

from __future__ import annotations

import re
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


def test_a_binding_in_a_roles_scope_is_for_that_role_only(tmp_path: Path) -> None:
    file = tmp_path / "pair.gin"
    file.write_text("Instance.tp = 1\nprefill/Instance.tp = 2\ndecode/Instance:\n    tp = 4\n    dp = 2\n")
    found = {role: config.load([file], ["decode/Cache.pages=9"], role=role) for role in (*config.ROLES, "")}
    assert {role: (loaded.instance.tp, loaded.instance.dp, loaded.cache.pages) for role, loaded in found.items()} == {
        "prefill": (2, 1, 0), "decode": (4, 2, 9), "unified": (1, 1, 0), "": (1, 1, 0),
    }  # fmt: skip


@pytest.mark.parametrize("file", sorted((ROOT / "configs").glob("*_to_*.gin")), ids=lambda file: file.name)
def test_a_pairs_file_cuts_its_sides_as_its_name_says(file: Path) -> None:
    for role, name in zip(("prefill", "decode"), file.stem.split("_to_"), strict=True):
        instance = config.load([file], role=role).instance
        said = {axis: int(size) for axis, size in re.findall(r"([a-z]+)([0-9]+)", name)}
        for axis in {"dp", "cp", "tp", *said}:
            assert (getattr(instance, axis) or 1) == said.get(axis, 1), f"{role}: {axis}"


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
        ("prefil/Instance.tp = 2", "did you mean 'prefill'"),
        ("prefill/Instance.pt = 2", "did you mean 'tp'"),
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
