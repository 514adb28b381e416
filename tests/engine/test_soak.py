"""Thousands of requests of every kind, in any order: each ends once, and every page comes home."""

from __future__ import annotations

import random
import threading
import time

import pytest
from small_engine import SmallEngine, TinyModel

from pdjax.engine.engine import Stop
from pdjax.wire import Failed, Tokens


@pytest.mark.parametrize("count", [200, pytest.param(2000, marks=[pytest.mark.soak, pytest.mark.timeout(1200)])])
def test_after_a_mixed_crowd_the_pools_are_as_at_the_start(tiny: TinyModel, count: int) -> None:
    """The loop runs in its thread, as it does in an instance, and clients come and go from another."""
    small = SmallEngine(tiny, pages=25, queued=60)
    stops: list[Stop] = []
    thread = threading.Thread(target=lambda: stops.append(small.engine.run()))
    thread.start()
    draw = random.Random(20)
    texts = [[draw.randrange(256) for _ in range(120)] for _ in range(4)]
    aborted = set()
    for number in range(count):
        rid = str(number)
        kind = draw.choice(["tiny", "shared", "shared", "long", "over-long", "empty", "expired", "urgent", "flush"])
        ids = draw.choice(texts)[: draw.randrange(1, 60)]
        ids = [*ids, draw.randrange(256)]
        match kind:
            case "tiny":
                small.send(rid, ids[:1], 1)
            case "shared":
                small.send(rid, ids, draw.randrange(1, 30), temperature=draw.choice([0.0, 1.0]), ignore_eos=False)
            case "long":
                small.send(rid, ids[:30], 60)
            case "over-long":
                small.send(rid, ids * 10, 500)
            case "empty":
                small.send(rid, [], 5)
            case "expired":
                small.send(rid, ids, 30, deadline_s=draw.choice([1e-6, 0.01, 0.1]))
            case "urgent":
                small.send(rid, ids, 10, priority=draw.randrange(1, 4), prompt_logprobs=False)
            case "flush":
                small.send(rid, ids, 3, seed=number)
                small.flush_soon()
        if draw.random() < 0.2:
            aborted.add(rid)
            small.abort(rid)
        if draw.random() < 0.1:  # a client that leaves later
            gone = str(draw.randrange(number + 1))
            aborted.add(gone)
            small.abort(gone)
        # What is still in the inbox is not live yet: without waiting for both, nearly all would be refused with 429.
        while thread.is_alive() and (len(small.engine.requests) > 50 or not small.inbox.empty()):
            time.sleep(0.001)
    deadline = time.monotonic() + 120
    while (small.engine.requests or not small.inbox.empty()) and time.monotonic() < deadline and thread.is_alive():
        time.sleep(0.01)
    small.inbox.put(Stop())
    thread.join(60)
    assert [stop.problem for stop in stops] == [None]
    small.engine.check_integrity()
    ends, stats = small.ends(), small.engine.stats()
    assert not small.engine.requests and set(map(str, range(count))) - set(ends) <= aborted
    statuses = {end.status for end in ends.values() if isinstance(end, Failed)}
    assert statuses <= {400, 429, 504} and {400, 504} <= statuses
    assert sum(isinstance(end, Tokens) for end in ends.values()) > count / 4
    assert stats["retractions_total"] > count / 40 and stats["cached_tokens_total"] > count
    assert stats["free_pages"] == stats["pages"] == 24
    small.flush_soon()
    small.turn()
    assert small.engine.prefix.allocators[0].free_pages == 24 and small.engine.prefix.allocators[0].owners == 0
