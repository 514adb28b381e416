from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from safetensors.numpy import save_file

from pdjax.launch.convert import add_arguments, main
from pdjax.models.folder import model_identity, read_config, read_record
from pdjax.models.random import RandomTensors, byte_tokenizer, tiny_config


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    tensors = RandomTensors(tiny_config(), 5)
    save_file({name: tensors.read(name) for name in tensors.shapes}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(tiny_config().to_huggingface()))
    byte_tokenizer(tiny_config()).write(folder)
    return folder


def run(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return main(parser.parse_args([str(argument) for argument in arguments]))


def test_a_folder_is_converted_and_says_what_it_was_made_from(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert run("--from", source, "--to", tmp_path / "model") == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "model")
    record = read_record(tmp_path / "model")
    assert read_config(tmp_path / "model") == tiny_config() and record.source == "source"
    assert {parameter.dtype for parameter in record.parameters.values()} == {"float32"}
    assert (tmp_path / "model" / "tokenizer.json").read_text() == (source / "tokenizer.json").read_text()


def test_weights_are_stored_in_the_dtype_asked_for(source: Path, tmp_path: Path):
    assert run("--from", source, "--to", tmp_path / "model", "--dtype", "bfloat16") == 0
    record = read_record(tmp_path / "model")
    assert {parameter.dtype for parameter in record.parameters.values()} == {"bfloat16"}


def test_a_model_is_replaced_only_when_forced(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run("--from", source, "--to", tmp_path / "model") == 0
    before = model_identity(tmp_path / "model")
    assert run("--from", source, "--to", tmp_path / "model", "--dtype", "bfloat16") == 2
    assert "--force" in capsys.readouterr().err and model_identity(tmp_path / "model") == before
    assert run("--from", source, "--to", tmp_path / "model", "--dtype", "bfloat16", "--force") == 0
    assert model_identity(tmp_path / "model") != before


def test_a_source_that_cannot_be_used_is_told_in_words_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert run("--from", tmp_path / "nothing", "--to", tmp_path / "model") == 2
    assert "nothing does not exist" in capsys.readouterr().err
    (tmp_path / "text.gguf").write_text("text")
    assert run("--from", tmp_path / "text.gguf", "--to", tmp_path / "model") == 2
    assert "text.gguf cannot be read as a GGUF file" in capsys.readouterr().err
    assert not (tmp_path / "model").exists()
