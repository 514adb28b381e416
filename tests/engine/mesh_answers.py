"""A program of its own, for it needs many devices: serves the same requests on one mesh after the other.

python mesh_answers.py FOLDER MESHES, the latter as JSON: a list of `TinyModel`'s devices and axes. Prints a JSON list
of what `serve` returns.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np

sys.path.append(str(Path(__file__).parents[1]))
from small_engine import PAGE, POOL_PAGES, SmallEngine, TinyModel  # pyright: ignore[reportMissingImports]

from pdjax.launch.devices import layout_of
from pdjax.wire import Tokens

PAGES = 22  # of each rank: too few for two of the long ones
TEXT = [(7 * i + i * i // 5) % 250 for i in range(80)]


def serve(tiny: TinyModel) -> dict[str, Any]:
    """Answers by request, with log-probabilities, and the engine's counters."""
    tiny.runner.warm_up([*tiny.runner.prefill_warm_up(), *tiny.runner.decode_warm_up()])
    parts = tiny.spec.page_size // PAGE
    small = SmallEngine(tiny, pages=1 + (PAGES - 1) // parts)
    before = tiny.runner.compiles_after_warm_up
    tiny.runner.expect_no_compile()
    random = np.random.default_rng(0)
    # One after the other first, so that later ones find what earlier ones have left.
    for length in (PAGE * 4, PAGE * 4 + 1, PAGE * 8 - 1):
        small.send(f"alone {length}", TEXT[:length], 4)
        small.run()
    lengths = [1, PAGE - 1, PAGE, PAGE + 1, PAGE * 4 - 1, PAGE * 4 + 1, 16 * 2, 41, 45]
    for number, length in enumerate(lengths):
        small.send(f"text {length}", TEXT[:length], 20, top_logprobs=number % 3)
        small.send(f"own {length}", random.integers(0, 256, length).tolist(), 12 + 3 * number,
                   temperature=float(number % 2), seed=number, frequency_penalty=0.5 * (number % 3))  # fmt: skip
    small.send("told", TEXT[5:40], 6, prompt_logprobs=True)
    small.run()
    last = tiny.runner.dp - 1
    for number in range(3):
        small.send(f"on the last rank {number}", TEXT[:9], 3, dp_rank=last)
    ranks = set()
    while small.turn() or small.engine.requests or not small.inbox.empty():
        ranks |= {request.dp_rank for request in small.engine.requests.values() if request.pages}
    frames = [message for message in small.emitted if isinstance(message, Tokens)]
    rids = list(dict.fromkeys(frame.rid for frame in frames))
    told = next(frame for frame in frames if frame.rid == "told")
    stats = small.engine.stats()
    return {
        "ids": {rid: small.ids(rid) for rid in rids},
        "logprobs": {rid: [value for frame in small.frames(rid) for value in frame.logprobs] for rid in rids},
        "prompt_logprobs": told.prompt_logprobs,
        "cached": stats["cached_tokens_total"],
        "retractions": stats["retractions_total"],
        "compiles": tiny.runner.compiles_after_warm_up - before,
        "misplaced": misplaced(tiny),
        "on the wrong rank": sorted(ranks - {last}),
        "weights": [
            sum(
                shard.data.nbytes
                for leaf in tiny.model.leaves
                for shard in leaf.addressable_shards
                if shard.device == device
            )
            for device in tiny.mesh.devices.flat
        ],
        "shard": list(tiny.runner.pool.addressable_shards[0].data.shape),
    }


def misplaced(tiny: TinyModel) -> list[str]:
    """Devices whose shard of the pool is not what transfers take it for."""
    layout, spec = layout_of(tiny.mesh), msgspec.structs.replace(tiny.spec, page_size=PAGE)
    shards = {shard.device: shard.index for shard in tiny.runner.pool.addressable_shards}
    wrong = []
    for dp_rank in range(layout.dp):
        for place in layout.places(spec, dp_rank):
            layers, pages, heads, _, slots, _ = shards[tiny.mesh.devices.flat[place.rank]]
            found = [
                (part.start or 0, part.stop or size) for part, size in ((layers, spec.layers), (heads, spec.heads))
            ]
            there = [(place.layers.start, place.layers.stop), (place.heads.start, place.heads.stop)]
            at = ((pages.start or 0) // POOL_PAGES, (slots.start or 0) // PAGE)
            if found != there or at != (dp_rank, place.page_class):
                wrong.append(f"{place} of dp rank {dp_rank} has {found}, {at}")
    return wrong


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    print(json.dumps([serve(TinyModel(Path(sys.argv[1]), **shape)) for shape in json.loads(sys.argv[2])]))
