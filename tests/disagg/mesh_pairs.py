"""A program of its own, for it needs many devices: serves the same requests by one engine, and by one pair after the
other.

python mesh_pairs.py FOLDER PAIRS, the latter as JSON: for each the axes of its prefill and of its decode side, and its
policy for dp ranks. Prints a JSON list of what `answers` and `serve` return.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

sys.path.append(str(Path(__file__).parents[1]))
from close_pair import ClosePair
from small_engine import PAGE, SmallEngine, TinyModel  # pyright: ignore[reportMissingImports]

from pdjax.disagg.protocol import messages

LENGTHS = [1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 8 * PAGE - 1, 8 * PAGE, 8 * PAGE + 1, 13 * PAGE + 2]
TOKENS = 9
CROWD_TOKENS = 60  # of a request, in all
SAMPLED = 5 * PAGE + 2  # tokens of the prompt that has several samples


def text(seed: int, tokens: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, tokens).tolist()


def first_turns(side: ClosePair | SmallEngine) -> None:
    for length in LENGTHS:
        side.send(f"first {length}", text(length, length), TOKENS, prompt_logprobs=length > PAGE)
    side.run()


def second_turns(side: ClosePair | SmallEngine) -> None:
    """What was said so far, and more."""
    for length in LENGTHS:
        said = [*text(length, length), *side.ids(f"first {length}")]
        side.send(f"second {length}", [*said, *text(1000 + length, 5)], TOKENS)
    side.run()


def samples(side: ClosePair | SmallEngine) -> None:
    for sample in range(3):
        of = "sample 0" if sample else ""
        side.send(f"sample {sample}", text(7, SAMPLED), TOKENS, temperature=1.0, seed=sample, sample_of=of)
    side.run()


def forced(side: ClosePair | SmallEngine) -> None:
    """A prompt three times: in the first dp rank, and twice in the last that both sides have."""
    sides = [side.prefill, side.decode] if isinstance(side, ClosePair) else [side]
    last = min(each.engine.runner.dp for each in sides) - 1
    for number, dp_rank in enumerate((0, last, last)):
        side.send(f"forced {number}", text(9, SAMPLED), TOKENS, dp_rank=dp_rank)
        side.run()


def crowd(side: ClosePair | SmallEngine) -> list[list[int]]:
    """Tokens of requests that generate far more than their prompts."""
    for number in range(6):
        side.send(f"crowd {number}", text(2000 + number, 5 * PAGE), CROWD_TOKENS - 5 * PAGE)
    side.run()
    return [side.ids(f"crowd {number}") for number in range(6)]


def crowd_computed_again(prefill: TinyModel, decode: TinyModel, dp_policy: str) -> tuple[list[list[int]], int]:
    """`crowd` in a pool that has not the room, with no host memory. Also how often a request was computed again."""
    pages = 1 + 2 * CROWD_TOKENS // decode.spec.page_size
    pair = ClosePair(prefill, decode, pages=pages, dp_policy=dp_policy, host_pages=-1)
    for _ in range(10):
        pair.decode.engine.lengths.add(2)
    return crowd(pair), int(pair.prefill.engine.stats()["rebootstraps_total"])


TURNS = (first_turns, second_turns, samples, forced)


def answers(side: ClosePair | SmallEngine) -> dict[str, Any]:
    """Tokens of all requests, and what was told of prompts."""
    turns = [f"{turn} {length}" for turn in ("first", "second") for length in LENGTHS]
    rids = [*turns, *(f"{turn} {number}" for turn in ("sample", "forced") for number in range(3))]
    return {
        "ids": {rid: side.ids(rid) for rid in rids},
        "prompt_logprobs": {rid: side.frames(rid)[0].prompt_logprobs for rid in rids},
    }


def serve(pair: ClosePair) -> dict[str, Any]:
    """`answers`, and how many pages have come for each turn."""
    came = []
    for turn in TURNS:
        before = pair.stats()["received_pages_total"]
        turn(pair)
        came.append(int(pair.stats()["received_pages_total"] - before))
    return answers(pair) | {"pages": came}


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 4)
    folder, pairs = Path(sys.argv[1]), json.loads(sys.argv[2])
    known: dict[str, TinyModel] = {}

    def model(side: str, axes: dict[str, int]) -> TinyModel:
        key = f"{side} {axes}"
        if key not in known:
            known[key] = TinyModel(folder, **axes)
        return known[key]

    small = SmallEngine(model("prefill", {}))
    for turn in TURNS:
        turn(small)
    found = [answers(small) | {"crowd": crowd(small)}]
    for prefill, decode, dp_policy in pairs:
        for allocation in (messages.EARLY, messages.PREFILL_COMPLETE):
            sides = model("prefill", prefill), model("decode", decode)
            found.append(serve(ClosePair(*sides, allocation=allocation, dp_policy=dp_policy)))
        found[-1]["crowd"] = crowd_computed_again(*sides, dp_policy)
    print(json.dumps(found))
