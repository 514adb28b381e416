"""``/trace`` is what Chrome's trace viewer and Perfetto read."""

from __future__ import annotations

import json
import time
from pathlib import Path

from scripted_leader import FrontendProcess

from pdjax.wire import Span

ROOM = (1 << 62) + 3
SPANS = [
    Span("queue", 1000.0, 0.25, "r1", ROOM, {}),
    Span("prefill chunk", 1000.25, 0.5, "r1", ROOM, {"tokens": 128.0}),
    Span("decode step", 1001.0, 0.01, "", None, {"rows": 2.0}),
]


def test_spans_become_complete_events_on_a_named_track_a_room(tmp_path: Path) -> None:
    frontend = FrontendProcess(tmp_path, "decode")
    try:
        frontend.leader.spans = SPANS
        status, body = frontend.get("/trace")
        assert status == 200
        told = json.loads(body)
        events = [event for event in told["traceEvents"] if event["ph"] == "X"]
        assert [(event["name"], event["ts"], event["dur"]) for event in events] == [
            ("queue", 1000.0e6, 0.25e6),
            ("prefill chunk", 1000.25e6, 0.5e6),
            ("decode step", 1001.0e6, 0.01e6),
        ]
        assert events[1]["args"] == {"tokens": 128.0, "rid": "r1", "room": str(ROOM)}
        names = {(event["name"], event["tid"]): event["args"]["name"] for event in told["traceEvents"][:-3]}
        assert names["process_name", 0] == "decode tiny"
        assert names["thread_name", events[0]["tid"]] == f"room {ROOM}"
        assert names["thread_name", events[2]["tid"]] == "steps"
        assert abs(told["otherData"]["now"] - time.time()) < 60

        status, body = frontend.get("/trace?spans=0")
        assert status == 200 and not [event for event in json.loads(body)["traceEvents"] if event["ph"] == "X"]
    finally:
        frontend.close()
