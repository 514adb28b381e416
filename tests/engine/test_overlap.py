"""Dispatching a step before the last one's tokens are read saves time, and changes no token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from small_engine import SmallEngine, TinyModel

from pdjax.engine.runner import Runner, RunningStep
from pdjax.wire import Aborted, Tokens


def serve(tiny: TinyModel, *, overlap: bool, seed: int, pages: int) -> SmallEngine:
    """Requests that come one after the other and end by length, by stop tokens, or because nobody waits for them."""
    random = np.random.default_rng(seed)
    small = SmallEngine(tiny, overlap=overlap, pages=pages)
    for number in range(24):
        options: dict[str, Any] = {"temperature": float(random.choice([0.0, 1.0])), "seed": number}
        if random.random() < 0.5:
            options["stop_token_ids"] = tuple(random.choice(256, 30, replace=False).tolist())
        if random.random() < 0.4:
            options |= {"frequency_penalty": 1.5, "repetition_penalty": 1.3}
        if random.random() < 0.3:
            options["min_new_tokens"] = 9
        small.send(str(number), random.integers(0, 256, random.integers(1, 40)).tolist(), int(random.integers(1, 40)),
                   **options)  # fmt: skip
        for _ in range(int(random.integers(0, 6))):
            small.turn()
    small.run()
    return small


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("pages", [257, 33])
def test_both_loops_give_the_same_answers(tiny: TinyModel, seed: int, pages: int) -> None:
    overlapped, plain = (serve(tiny, overlap=overlap, seed=seed, pages=pages) for overlap in (True, False))
    for number in range(24):
        assert overlapped.ids(str(number)) == plain.ids(str(number))
    for rid, end in plain.ends().items():
        other = overlapped.ends()[rid]
        assert isinstance(end, Tokens) and isinstance(other, Tokens)
        assert (end.finish_reason, end.matched) == (other.finish_reason, other.matched)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_step_is_dispatched_before_the_tokens_of_the_one_before_are_read(
    tiny: TinyModel, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    dispatch, read = Runner.dispatch, RunningStep.read
    monkeypatch.setattr(Runner, "dispatch", lambda *args: (events.append("dispatch"), dispatch(*args))[1])
    monkeypatch.setattr(RunningStep, "read", lambda *args: (events.append("read"), read(*args))[1])
    small = SmallEngine(tiny, overlap=overlap)
    small.send("a", [1, 2, 3], 5)
    small.run()
    # One prefill step and four decode steps; the last token's step is the last: its length is known beforehand.
    assert len(small.ids("a")) == 5
    between = ["dispatch", "read"] * 3 if overlap else ["read", "dispatch"] * 3
    rest = ["dispatch", *between, "read"]
    assert events == ["dispatch", "read", *rest]


def test_the_step_past_a_stop_token_is_thrown_away(tiny: TinyModel) -> None:
    plain = SmallEngine(tiny, overlap=False)
    plain.send("a", [5, 6, 7], 12)
    plain.run()
    stop = plain.ids("a")[4]
    small = SmallEngine(tiny)
    small.send("a", [5, 6, 7], 12, stop_token_ids=(stop,))
    small.run()
    frames = small.frames("a")
    assert small.ids("a") == plain.ids("a")[: plain.ids("a").index(stop) + 1]
    assert (frames[-1].finish_reason, frames[-1].matched) == ("stop", stop)


def test_an_id_may_come_back_while_its_last_step_is_under_way(tiny: TinyModel) -> None:
    small = SmallEngine(tiny)
    small.send("again", [1, 2, 3], 30)
    for _ in range(6):
        small.turn()
    told = len(small.ids("again"))
    assert 0 < told < 30
    small.abort("again")
    small.send("again", [9, 8, 7], 6)
    small.run()
    alone = SmallEngine(tiny)
    alone.send("alone", [9, 8, 7], 6)
    alone.run()
    assert small.ids("again")[told:] == alone.ids("alone")
    end_of_first = small.emitted.index(Aborted("again"))
    assert len([frame for frame in small.emitted[:end_of_first] if isinstance(frame, Tokens)]) == told
