"""The real model's log-probabilities, through pages and a compiled step, are those of the reference."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np

from pdjax.cache.spec import StateSpec
from pdjax.engine.buckets import Buckets
from pdjax.engine.plan import PrefillStep, Row
from pdjax.engine.runner import Runner
from pdjax.layers.attention import block_width
from pdjax.layers.sharding import tensor_mesh
from pdjax.models.checkpoint import load_model
from pdjax.wire import SamplingParams

RECORDS = json.loads((Path(__file__).parents[1] / "data" / "smollm2_reference.json").read_text())["records"]


def test_first_step_logprobs_are_the_reference_ones(smollm2: Path) -> None:
    mesh = tensor_mesh(jax.devices()[:1])
    model = load_model(smollm2, dtype="float32", mesh=mesh)
    config = model.config
    spec = StateSpec(name="kv", layers=config.num_layers, heads=config.num_kv_heads, head_dim=config.head_dim,
                     page_size=16, dtype="float32")  # fmt: skip
    records = [record for record in RECORDS if len(record["input_ids"]) <= 64]
    buckets = Buckets(prefill_tokens=(64,), decode_rows=(1,), width=block_width(16))
    runner = Runner(model, spec=spec, pages=5, buckets=buckets, mesh=mesh)
    assert records
    for record in records:
        row = Row("a", [1, 2, 3, 4], SamplingParams(temperature=0.0), 0, top=5)
        result = runner.run(PrefillStep(row, record["input_ids"], 0, targets=record["input_ids"][1:]))
        ids = [token for token, _ in record["first_step_top5"]]
        assert [token for token, _ in result.top[0]] == ids
        np.testing.assert_allclose([value for _, value in result.top[0]], record["first_step_top5_logprobs"], atol=1e-3)
        assert result.token_ids == ids[:1]
        np.testing.assert_allclose(result.logprobs[0], record["first_step_top5_logprobs"][0], atol=1e-3)
        assert [top[0][0] for top in result.prompt_top] == record["prompt_argmax"][:-1]
