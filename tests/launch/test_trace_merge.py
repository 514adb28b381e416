"""Traces of several instances go into one, on one clock."""

from __future__ import annotations

from pdjax.launch.trace import merge
from pdjax.server.trace import trace
from pdjax.wire import Span


def test_clocks_that_differ_are_brought_together_and_processes_named() -> None:
    # Decode's clock is 5 s ahead: what it calls 1005.2 was 1000.2 on prefill's.
    prefill = trace([Span("write", 1000.0, 0.1, "p", 7, {})], process="prefill")
    decode = trace([Span("scatter", 1005.2, 0.1, "d", 7, {})], process="decode")
    merged = merge([("prefill a", prefill, 0.0), ("decode b", decode, 5.0)])
    spans = {event["name"]: event for event in merged["traceEvents"] if event["ph"] == "X"}
    assert spans["write"]["ts"] == 0.0 and abs(spans["scatter"]["ts"] - 0.2e6) < 1
    assert spans["write"]["pid"] != spans["scatter"]["pid"]
    names = {e["pid"]: e["args"]["name"] for e in merged["traceEvents"] if e["name"] == "process_name"}
    assert names == {spans["write"]["pid"]: "prefill a", spans["scatter"]["pid"]: "decode b"}
    assert merged["otherData"]["clock_s"] == {"prefill a": 0.0, "decode b": 5.0}


def test_every_event_has_what_a_viewer_needs() -> None:
    one = trace([Span("queue", 1000.0, 0.1, "", None, {})], process="unified")
    for event in merge([("unified", one, 0.0)])["traceEvents"]:
        assert {"name", "ph", "pid", "tid"} <= event.keys()
        assert event["ph"] in "XM" and (event["ph"] == "M" or {"ts", "dur"} <= event.keys())
