"""Tokens are the same whichever attention backend computes them."""

from __future__ import annotations

import copy

import numpy as np
from small_engine import POOL_PAGES, SmallEngine, TinyModel

from pdjax.engine.runner import Runner
from pdjax.layers.attention_backend import attention_backend


def test_pallas_kernels_give_the_tokens_that_the_default_gives(tiny: TinyModel) -> None:
    other = copy.copy(tiny)
    backend = attention_backend("pallas", head_dim=tiny.spec.head_dim, devices=1)
    other.runner = Runner(
        tiny.model, spec=tiny.spec, pages=POOL_PAGES, buckets=tiny.buckets, mesh=tiny.mesh, attention=backend
    )
    random = np.random.default_rng(0)
    prompts = [random.integers(0, 256, length).tolist() for length in (1, 4, 17, 39)]
    outputs = []
    for each in (tiny, other):
        small = SmallEngine(each)
        for number, prompt in enumerate(prompts):
            small.send(str(number), prompt, tokens=6)
        small.run()
        outputs.append([small.ids(str(number)) for number in range(len(prompts))])
    assert outputs[0] == outputs[1]
