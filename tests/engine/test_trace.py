"""The engine remembers what it did lately, and no more than that."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from pdjax.engine.trace import Trace
from pdjax.wire import Spans, TraceQuery
from tests.small_engine import SmallEngine, TinyModel


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    folder: Path = tmp_path_factory.mktemp("trace")
    return TinyModel(folder)


def test_a_requests_life_is_told_in_order_and_in_wall_time(tiny: TinyModel) -> None:
    engine = SmallEngine(tiny)
    before = time.time()
    engine.send("a", range(40), tokens=6)
    engine.run()
    engine.inbox.put(TraceQuery(3))
    engine.turn()
    told = next(message for message in engine.emitted if isinstance(message, Spans))
    assert told.id == 3
    mine = {span.name: span for span in told.spans if span.rid == "a"}
    assert list(mine) == ["queue", "prefill chunk", "first token", "decode"]
    chunks = [span for span in told.spans if span.name == "prefill chunk"]
    assert sum(span.numbers["tokens"] for span in chunks) == 40
    assert mine["decode"].numbers == {"tokens": 6}
    assert sum(span.name == "decode step" for span in told.spans) >= 5
    assert all(before - 1 < span.start <= time.time() and span.seconds >= 0 for span in told.spans)
    assert mine["queue"].start + mine["queue"].seconds <= mine["decode"].start


def test_the_ring_keeps_the_latest() -> None:
    trace = Trace(capacity=3)
    for number in range(10):
        trace.step("step", number, number + 1.0, number=number)
    assert [span.numbers["number"] for span in trace.spans()] == [7, 8, 9]
