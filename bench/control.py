"""What does the control plane cost? Ours (MPI links) beside PyZMQ and HTTP as SGLang uses them, in turns, in one run.

Everything is between two processes on the loopback interface, at rest but for the one thing measured.

* handshake: a decode leader claims a room, and the prefill leader's first answer is in the decode leader's queue.
  - pdjax: `claim` to `slot_request`, over a standing link.
  - zmq: SGLang's metadata message (9 frames, PUSH to PULL) to its status message (3 frames). Over standing sockets.
  - zmq+http: the same, after the query of the room's data-parallel rank at the bootstrap server (`requests.post`, a
    connection each, as SGLang has it), which it makes for each room unless the rank follows from the room's number.
  - zmq+http kept: the same with one HTTP connection kept open, which SGLang does not do.
* link: from nothing to the first answered room. pdjax: connect, authenticate, join, exchange registrations, handshake.
  zmq: two HTTP GETs (topology, a rank's address), a socket, a registration (not authenticated), handshake without HTTP.
* rooms/s: all that is said about a room, 64 rooms at a time. pdjax: five messages (claim, slot_request, slot_grant,
  handoff, complete), of which slots and hand-over have no counterpart in SGLang's early policy. zmq: two messages.
  zmq+http asks for the ranks of all rooms that start together in one query.
* idle: processor time of all processes of a system, linked and at rest, in percent of a core.

Speeds are divided by speeds: `handshake_p50_speedup_vs_zmq_http` is the p50 of zmq+http over that of pdjax.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from pdjax.net.mpi import environment

SIDES = Path(__file__).with_name("control_sides.py")
WINDOW = 64
IDLE_SECONDS = 3.0
CASES = (("pdjax", "pdjax", ""), ("zmq", "zmq", ""), ("zmq+http", "zmq", "http"), ("zmq+http kept", "zmq", "kept"))


class Side:
    """A process of bench/control_sides.py. What it prints first is its `info`."""

    def __init__(self, kind: str, *ports: int) -> None:
        under = [str(Path(sys.executable).with_name("mpiexec")), "-n", "1"] if kind.startswith("pdjax") else []
        self._process = subprocess.Popen(
            [*under, sys.executable, str(SIDES), kind, *map(str, ports)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(dict(os.environ)),
        )  # fmt: skip
        self.info = self._read()

    def ask(self, op: str, **arguments: Any) -> Any:
        """Run a command there and return its result."""
        assert self._process.stdin is not None, "stdin is piped"
        self._process.stdin.write(json.dumps({"op": op} | arguments) + "\n")
        self._process.stdin.flush()
        return self._read()["result"]

    def end(self) -> None:
        """End the process, and mpiexec with it."""
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None, "stdout is piped"
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a side has ended with {self._process.wait(10)}")
        return json.loads(line)


def main() -> None:
    """Run the benchmark and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds of each case (default: %(default)s)")
    parser.add_argument("--handshakes", type=int, default=300, help="handshakes a round (default: %(default)s)")
    parser.add_argument("--rooms", type=int, default=1000, help="rooms a round (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    args = parser.parse_args()
    sides: dict[str, list[Side]] = {"pdjax": []}
    missing = [name for name in ("zmq", "requests") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"control: no peer: {' and '.join(missing)} not installed (pip install pdjax[bench])", file=sys.stderr)
    else:
        sides["zmq"] = []
    try:
        for system in sides:
            sides[system].append(Side(f"{system}-prefill"))
        if "zmq" in sides:
            sides["zmq"].append(Side("bootstrap"))
        for system in sides:
            sides[system].append(Side(f"{system}-decode", *(side.info["port"] for side in sides[system])))
        rows = measure(sides, args)
    finally:
        for side in [side for both in sides.values() for side in both]:
            side.end()
    report(rows, as_json=args.json)


def measure(sides: dict[str, list[Side]], args: argparse.Namespace) -> list[dict[str, Any]]:
    """All cases in turns; the first round warms up and is thrown away. p50 and p99 are medians of the rounds' own."""
    cases = [case for case in CASES if case[1] in sides]
    samples: dict[str, dict[str, list[float]]] = {name: {} for name, _, _ in cases}
    for number in range(args.rounds + 1):
        for name, system, mode in cases:
            decode = sides[system][-1]
            times = sorted(decode.ask("handshakes", count=args.handshakes, mode=mode))
            rooms = decode.ask("rooms", count=args.rooms, window=WINDOW, mode=mode)
            figures = {
                "handshake_p50_ms": 1e3 * times[len(times) // 2],
                "handshake_p99_ms": 1e3 * times[len(times) * 99 // 100],
                "rooms_per_s": args.rooms / rooms,
            }
            if name in sides:
                figures["link_ms"] = 1e3 * statistics.median(decode.ask("links", count=3))
            if number:
                for figure, value in figures.items():
                    samples[name].setdefault(figure, []).append(value)
    rows = []
    for name, _, _ in cases:
        row: dict[str, Any] = {"system": name}
        row |= {figure: statistics.median(values) for figure, values in samples[name].items()}
        rows.append(row)
    for system in sides:
        row = next(row for row in rows if row["system"] == system)
        row["idle_percent_of_a_core"] = _idle(sides[system])
    return rows


def _idle(sides: list[Side]) -> float:
    time.sleep(0.5)
    before = [side.ask("cpu") for side in sides]
    time.sleep(IDLE_SECONDS)
    after = [side.ask("cpu") for side in sides]
    return 100 * (sum(after) - sum(before)) / IDLE_SECONDS


def report(rows: list[dict[str, Any]], *, as_json: bool) -> None:
    """Print a table, or one JSON object."""
    by = {row["system"]: row for row in rows}

    def speedup(peer: str, figure: str) -> float | None:
        """By how much ours is better; None without the peer."""
        if peer not in by:
            return None
        ours, theirs = by["pdjax"][figure], by[peer][figure]
        return ours / theirs if figure == "rooms_per_s" else theirs / ours

    ratios = {
        "handshake_p50_speedup_vs_zmq_http": speedup("zmq+http", "handshake_p50_ms"),
        "handshake_p50_speedup_vs_zmq_http_kept": speedup("zmq+http kept", "handshake_p50_ms"),
        "handshake_p50_speedup_vs_zmq": speedup("zmq", "handshake_p50_ms"),
        "link_speedup_vs_zmq_http": speedup("zmq", "link_ms"),
        "rooms_per_s_vs_zmq_http": speedup("zmq+http", "rooms_per_s"),
        "rooms_per_s_vs_zmq": speedup("zmq", "rooms_per_s"),
    }
    if as_json:
        print(json.dumps({"bench": "control", "rows": rows, "ratios": ratios}))
        return
    columns = ("handshake_p50_ms", "handshake_p99_ms", "link_ms", "rooms_per_s", "idle_percent_of_a_core")
    print(f"{'system':<15}" + "".join(f"{column:>24}" for column in columns))
    for row in rows:
        print(f"{row['system']:<15}" + "".join(f"{row[c]:>24.3f}" if c in row else " " * 24 for c in columns))
    for name, ratio in ratios.items():
        print(f"{name}: {'-' if ratio is None else f'{ratio:.2f}'}")


if __name__ == "__main__":
    main()
