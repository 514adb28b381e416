"""``trace``: what several instances did lately, in one file and on one clock, for Perfetto (ui.perfetto.dev)."""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import time
import urllib.parse
from pathlib import Path
from typing import Any

_PROBES = 7
_TIMEOUT = 30.0
ROLES = ("prefill", "decode", "unified")


class TraceError(Exception):
    """An instance that gives no trace; the sentence says which and why."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command line."""
    for role in ROLES:
        parser.add_argument(f"--{role}", action="append", default=[], metavar="URL", help=f"a {role} instance")
    parser.add_argument("-o", "--output", type=Path, default=Path("trace.json"), help="file (default: %(default)s)")


def main(args: argparse.Namespace) -> int:
    """Fetch, merge, write; returns the exit code."""
    urls = [(role, url) for role in ROLES for url in getattr(args, role)]
    if not urls:
        print("pdjax trace: name at least one instance: --prefill URL, --decode URL or --unified URL", file=sys.stderr)
        return 2
    try:
        traces = [(f"{role} {url}", *fetch(url)) for role, url in urls]
    except TraceError as error:
        print(f"pdjax trace: {error}", file=sys.stderr)
        return 1
    merged = merge(traces)
    args.output.write_text(json.dumps(merged))
    rooms = {event["args"]["room"] for event in merged["traceEvents"] if "room" in event.get("args", {})}
    print(f"{args.output}: {len(merged['traceEvents'])} events, {len(rooms)} rooms. Open it at https://ui.perfetto.dev")
    return 0


def fetch(url: str) -> tuple[dict[str, Any], float]:
    """An instance's trace, and by how many seconds its clock is ahead of this machine's.

    Raises:
        TraceError: it does not answer, or not with a trace.
    """
    where = urllib.parse.urlsplit(url if "//" in url else f"http://{url}")
    connection = http.client.HTTPConnection(where.hostname or "", where.port or 80, timeout=_TIMEOUT)
    best = (float("inf"), 0.0)
    try:
        for _ in range(_PROBES):  # of the round trips, the shortest knows best
            before = time.time()
            now = float(_get(connection, "/trace?spans=0")["otherData"]["now"])
            after = time.time()
            best = min(best, (after - before, now - (before + after) / 2))
        return _get(connection, "/trace"), best[1]
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
        raise TraceError(f"{url} gives no trace: {error}") from error
    finally:
        connection.close()


def _get(connection: http.client.HTTPConnection, path: str) -> dict[str, Any]:
    connection.request("GET", path)
    response = connection.getresponse()
    body = response.read()
    if response.status != 200:
        raise ValueError(f"{path} answers with status {response.status}: {body[:200].decode(errors='replace')}")
    return json.loads(body)


def merge(traces: list[tuple[str, dict[str, Any], float]]) -> dict[str, Any]:
    """One trace of several: (name, trace, seconds that its clock is ahead). Each becomes a process of that name.

    Times count from the first event, so that a viewer keeps their microseconds.
    """
    events: list[dict[str, Any]] = []
    for number, (name, trace, ahead) in enumerate(traces, start=1):
        for event in trace["traceEvents"]:
            event = event | {"pid": number}
            if event["name"] == "process_name":
                event["args"] = {"name": name}
            if "ts" in event:
                event["ts"] -= 1e6 * ahead
            events.append(event)
        order = {"sort_index": number}
        events.append({"name": "process_sort_index", "ph": "M", "pid": number, "tid": 0, "args": order})
    start = min((event["ts"] for event in events if "ts" in event), default=0.0)
    for event in events:
        if "ts" in event:
            event["ts"] = round(event["ts"] - start, 1)
    offsets = {name: ahead for name, _, ahead in traces}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"start": start / 1e6, "clock_s": offsets}}
