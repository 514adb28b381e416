"""The real model, against outputs that transformers, llama.cpp and vLLM agree on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from dense_attention import DenseModel
from tokenizers import Tokenizer

from pdjax.layers.sharding import tensor_mesh
from pdjax.models.checkpoint import load_model
from pdjax.models.folder import read_json

REFERENCE = json.loads((Path(__file__).parents[1] / "data" / "smollm2_reference.json").read_text())
RECORDS: list[dict[str, Any]] = REFERENCE["records"]
LENGTH = max(len(record["input_ids"]) for record in RECORDS)


@pytest.fixture(scope="module")
def model(smollm2: Path) -> DenseModel:
    loaded = load_model(smollm2, dtype="float32", mesh=tensor_mesh(jax.devices()[:1]))
    return DenseModel(loaded, LENGTH)


def test_every_text_becomes_the_reference_ids(smollm2: Path):
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    for record in RECORDS:
        assert tokenizer.encode(record["text"]).ids == record["input_ids"], record["text"]
        assert tokenizer.decode(record["output_ids"], skip_special_tokens=False) == record["output_text"]


def test_the_folder_brings_the_chat_template_and_names_the_end_token(smollm2: Path):
    settings = read_json(smollm2 / "tokenizer_config.json")
    assert settings["eos_token"] == "<|im_end|>" and "add_generation_prompt" in settings["chat_template"]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record["prompt"][:24])
def test_logits_are_the_reference_ones(model: DenseModel, record: dict[str, Any]):
    logits = model.logits(record["input_ids"])
    assert logits.argmax(axis=-1).tolist() == record["prompt_argmax"]
    ids, values = zip(*record["first_step_top5"])
    np.testing.assert_allclose(logits[-1][list(ids)], values, atol=1e-3)


def test_a_greedy_continuation_is_the_reference_one(model: DenseModel):
    record = min(RECORDS, key=lambda record: len(record["input_ids"]))
    count = min(16, LENGTH - len(record["input_ids"]))
    assert model.greedy(record["input_ids"], count) == record["output_ids"][:count]


def test_bfloat16_agrees_wherever_the_choice_is_clear(smollm2: Path):
    loaded = load_model(smollm2, dtype="bfloat16", mesh=tensor_mesh(jax.devices()[:1]))
    record = RECORDS[0]
    ids = record["input_ids"] + record["output_ids"][:-1]
    picked = DenseModel(loaded, len(ids)).logits(ids)[len(record["input_ids"]) - 1 :].argmax(axis=-1)
    clear = np.array(record["margins"]) > 0.5
    assert clear.sum() > 20
    np.testing.assert_array_equal(picked[clear], np.array(record["output_ids"])[clear])
