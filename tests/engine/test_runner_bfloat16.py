"""The real model in bfloat16: its next token is the float32 reference's wherever that one is clear, at every step."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from pdjax.cache.spec import StateSpec
from pdjax.engine.buckets import Buckets
from pdjax.engine.plan import DecodeStep, PrefillStep, Row
from pdjax.engine.runner import Runner
from pdjax.kernels import native
from pdjax.launch.cache_folder import cache_root
from pdjax.layers.attention import block_width
from pdjax.layers.sharding import tensor_mesh
from pdjax.models.checkpoint import load_model
from pdjax.wire import SamplingParams

RECORDS = json.loads((Path(__file__).parents[1] / "data" / "smollm2_reference.json").read_text())["records"]
CLEAR = 0.3  # of the logits of the best two tokens; bfloat16 moves a logit by about 0.1
STEPS = 24
PAGES = 6  # of a request of 16 tokens each


def test_tokens_are_the_reference_ones_where_the_choice_is_clear(smollm2: Path) -> None:
    if not native.load(cache_root() / "native"):
        pytest.skip("this machine has no C++ compiler")
    mesh = tensor_mesh(jax.devices()[:1])
    model = load_model(smollm2, dtype="bfloat16", mesh=mesh)
    config = model.config
    spec = StateSpec(name="kv", layers=config.num_layers, heads=config.num_kv_heads, head_dim=config.head_dim,
                     page_size=16, dtype="bfloat16")  # fmt: skip
    records = [record for record in RECORDS if len(record["input_ids"]) <= 64]
    buckets = Buckets(prefill_tokens=(64,), decode_rows=(8,), width=block_width(16))
    runner = Runner(model, spec=spec, pages=1 + PAGES * len(records), buckets=buckets, mesh=mesh)
    greedy = SamplingParams(temperature=0.0)
    rows = [
        Row(str(index), list(range(1 + PAGES * index, 1 + PAGES * (index + 1))), greedy, 0, slot=index, top=5)
        for index in range(len(records))
    ]
    for record, row in zip(records, rows, strict=True):
        result = runner.run(PrefillStep(row, record["input_ids"], 0, targets=record["input_ids"][1:]))
        if record["margins"][0] > CLEAR:
            assert result.token_ids[0] == record["output_ids"][0]
        ours = dict(result.top[0])
        theirs = list(zip((token for token, _ in record["first_step_top5"]), record["first_step_top5_logprobs"],
                          strict=True))  # fmt: skip
        both = [(ours[token], logprob) for token, logprob in theirs if token in ours]
        assert len(both) >= 4
        np.testing.assert_allclose([mine for mine, _ in both], [logprob for _, logprob in both], atol=0.15)
    compared = 0
    for step in range(STEPS):
        # The reference's own tokens go in, so that one close choice does not decide all that follow.
        tokens = [record["output_ids"][step] for record in records]
        positions = [len(record["input_ids"]) + step for record in records]
        result = runner.run(DecodeStep(rows, tokens, positions))
        for record, token in zip(records, result.token_ids, strict=True):
            if record["margins"][step + 1] > CLEAR:
                compared += 1
                assert token == record["output_ids"][step + 1], (record["text"], step)
    assert compared > STEPS * len(records) // 2
