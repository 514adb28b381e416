"""``GET /trace``: what the instance did lately, as Chrome trace events, which Perfetto and chrome://tracing open."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from pdjax.wire import Span

STEPS = 0  # the track of what belongs to no room or request


def trace(spans: Iterable[Span], *, process: str) -> dict[str, Any]:
    """Complete events (``ph`` X; microseconds since the epoch), a track a room, and the names of process and tracks.

    ``otherData.now`` is this machine's clock when the trace was made, in seconds since the epoch.
    """
    tracks: dict[str, int] = {"steps": STEPS}
    events: list[dict[str, Any]] = []
    for span in spans:
        track = "steps"
        if span.room is not None:
            track = f"room {span.room}"
        elif span.rid:
            track = f"request {span.rid}"
        numbers: dict[str, Any] = dict(span.numbers)
        if span.room is not None:
            numbers["room"] = str(span.room)  # 63 bits are more than a JavaScript number holds
        if span.rid:
            numbers["rid"] = span.rid
        events.append(
            {
                "name": span.name,
                "cat": "pdjax",
                "ph": "X",
                "ts": round(span.start * 1e6, 1),
                "dur": round(span.seconds * 1e6, 1),
                "pid": 1,
                "tid": tracks.setdefault(track, len(tracks)),
                "args": numbers,
            }
        )
    names = [_name("process_name", process, 1, 0)]
    names += [_name("thread_name", track, 1, tid) for track, tid in tracks.items()]
    return {"traceEvents": [*names, *events], "displayTimeUnit": "ms", "otherData": {"now": time.time()}}


def _name(kind: str, name: str, pid: int, tid: int) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
