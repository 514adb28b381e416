from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from pdjax.models.errors import ModelError
from pdjax.models.huggingface import HuggingFaceModel
from pdjax.models.random import RandomTensors, byte_tokenizer, tiny_config

CONFIG = tiny_config()


def write_folder(folder: Path, *, files: int = 1, dtype: Any = np.float32) -> RandomTensors:
    """A folder as transformers saves it."""
    folder.mkdir(exist_ok=True)
    tensors = RandomTensors(CONFIG, 2)
    names = list(tensors.shapes)
    places = {}
    for index in range(files):
        file = "model.safetensors" if files == 1 else f"model-{index + 1:05}-of-{files:05}.safetensors"
        part = {name: tensors.read(name).astype(dtype) for name in names[index::files]}
        save_file(part, folder / file)
        places |= dict.fromkeys(part, file)
    if files > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (folder / "config.json").write_text(json.dumps(CONFIG.to_huggingface()))
    byte_tokenizer(CONFIG).write(folder)
    return tensors


@pytest.mark.parametrize("files", [1, 3])
def test_one_file_or_several_give_the_same_tensors(tmp_path: Path, files: int):
    original = write_folder(tmp_path, files=files)
    model = HuggingFaceModel(tmp_path)
    assert model.config == CONFIG and model.shapes == original.shapes
    for name in original.shapes:
        np.testing.assert_array_equal(model.read(name), original.read(name), err_msg=name)


def test_bfloat16_weights_are_read_as_they_are(tmp_path: Path):
    original = write_folder(tmp_path, dtype=ml_dtypes.bfloat16)
    values = HuggingFaceModel(tmp_path).read("lm_head.weight")
    assert values.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(values, original.read("lm_head.weight").astype(ml_dtypes.bfloat16))


def test_end_tokens_of_the_generation_config_count(tmp_path: Path):
    write_folder(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [258, 257]}))
    assert HuggingFaceModel(tmp_path).config.eos_token_ids == (257, 258)


def test_tokens_and_templates_are_found_in_all_the_forms_that_they_have(tmp_path: Path):
    write_folder(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(
        json.dumps({"eos_token": {"content": "<|eos|>"}, "chat_template": [{"name": "default", "template": "{{ a }}"}]})
    )
    settings = HuggingFaceModel(tmp_path).tokenizer_files().settings
    assert settings["eos_token"] == "<|eos|>" and settings["chat_template"] == "{{ a }}"
    (tmp_path / "chat_template.jinja").write_text("{{ b }}")
    assert HuggingFaceModel(tmp_path).tokenizer_files().settings["chat_template"] == "{{ b }}"


def test_a_folder_without_safetensors_is_refused(tmp_path: Path):
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor"):
        HuggingFaceModel(tmp_path)


def test_an_index_that_names_a_file_outside_the_folder_is_refused(tmp_path: Path):
    write_folder(tmp_path / "other")
    (tmp_path / "model").mkdir()
    index = {"weight_map": {"lm_head.weight": "../other/model.safetensors"}}
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"\.\./other"):
        HuggingFaceModel(tmp_path / "model")


def test_a_weight_file_cut_short_is_refused(tmp_path: Path):
    write_folder(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match="cannot be read as safetensors"):
        HuggingFaceModel(tmp_path)


def test_quantised_tensors_are_refused_by_name(tmp_path: Path):
    write_folder(tmp_path)
    save_file({"model.norm.weight": np.ones(4, np.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.norm\.weight is of type I8"):
        HuggingFaceModel(tmp_path)


def test_a_missing_tokenizer_is_named(tmp_path: Path):
    write_folder(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        HuggingFaceModel(tmp_path).tokenizer_files()
