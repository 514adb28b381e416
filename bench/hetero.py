"""How long does a request's KV take from one layout to another: per-token head slices, our staging, equal layouts?

2,048 tokens of 32 layers, 8 heads of 128 in bfloat16 (268 MB) move from TP 4 to TP 1, from TP 1 to TP 4, and between
equal layouts, in chunks of 512 tokens. Every rank is a process with its own UCX backend and staging. A time runs from
the word go until every destination rank has it all in its pages.

* `staging`: each source rank gathers a chunk, writes each piece of the transfer plan, and the destination scatters.
* `tokens`: see `bench/hetero_tokens.py`; no gather or scatter. (It is written in Python, at 1 to 3 us a slice; in C it
  would be faster by that.)

Rounds take turns over everything (slices in one of three); figures are medians. `staging_vs_per_token_slices` is how
many times faster staging is, `staging_vs_equal_tp` the time between equal layouts over that of staging: each the worse
of both directions. Equal is TP 1 to TP 1, because the side that is one process bounds both; `staging_vs_equal_tp4` is
TP 4 to TP 4, where twice four processes share the work.

    python bench/hetero.py [--json] [--path put|mapped] [--rounds 9]
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from pdjax.net.mpi import environment

ROUTES = ((4, 1), (1, 4), (4, 4), (1, 1))
UNEQUAL = ROUTES[:2]
MEGABYTES = 268.4
_SLOW_EVERY = 3  # rounds; per-token slices take seconds, and are slower by far more than rounds differ
START_SECONDS, PATIENCE = 300.0, 90.0
_REPOSITORY = Path(__file__).parents[1]


class Rank:
    """One process; its lines can be waited for."""

    def __init__(self, side: str, tp: int, rank: int, path: str) -> None:
        command = [Path(sys.executable).with_name("mpiexec"), "-n", "1", sys.executable]
        command += [str(Path(__file__).with_name("hetero_rank.py")), side, str(tp), str(rank), path]
        self.name = f"{tp}.{rank}"
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(dict(os.environ)) | {"PYTHONPATH": str(_REPOSITORY)},
            start_new_session=True,
        )
        self._lines: queue.Queue[dict[str, Any]] = queue.Queue()
        self.used = self._cpu = 0.0  # processor seconds between the last two lines, and until the last
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for text in self._process.stdout:
            if text.startswith("{"):
                self._lines.put(json.loads(text))

    def do(self, **command: Any) -> None:
        """Send a command."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def wait(self, seconds: float = PATIENCE) -> dict[str, Any]:
        """The next line."""
        try:
            line = self._lines.get(timeout=seconds)
            self.used, self._cpu = line["cpu"] - self._cpu, line["cpu"]
            return line
        except queue.Empty:
            raise SystemExit(f"rank {self.name} says nothing for {seconds:.0f} s") from None

    def end(self) -> None:
        """Let it close, and see that nothing is left of it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(20)


class Fleet:
    """Sources and destinations of TP 1 and TP 4, each source connected to each destination."""

    def __init__(self, path: str) -> None:
        self.ranks: dict[tuple[str, int], list[Rank]] = {}
        try:
            descriptions = {}
            for tp in (1, 4):
                for side in ("destination", "source"):
                    ranks = [Rank(side, tp, rank, path) for rank in range(tp)]
                    self.ranks[side, tp] = ranks
                    for rank in ranks:  # few at a time: each compiles
                        described = rank.wait(START_SECONDS)
                        if side == "destination":
                            descriptions[rank.name] = described
            self.path = ""
            for source in self.ranks["source", 1] + self.ranks["source", 4]:
                source.do(op="connect", peers=descriptions)
                self.path = source.wait()["path"]
        except BaseException:
            self.close()
            raise

    def move(self, route: tuple[int, int], mode: str) -> tuple[float, float]:
        """Seconds until all destination ranks have everything, and processor seconds of all ranks."""
        sources, destinations = self.ranks["source", route[0]], self.ranks["destination", route[1]]
        start = time.perf_counter()
        for source in sources:
            source.do(op="send", mode=mode, route=list(route))
        for destination in destinations:
            destination.wait()
        taken = time.perf_counter() - start
        for source in sources:
            source.wait()
        return taken, sum(rank.used for rank in (*sources, *destinations))

    def check(self, route: tuple[int, int]) -> None:
        """Every destination rank compares its pages with what belongs there."""
        for destination in self.ranks["destination", route[1]]:
            destination.do(op="check")
        for destination in self.ranks["destination", route[1]]:
            if not destination.wait()["right"]:
                raise SystemExit(f"rank {destination.name} has wrong pages after TP {route[0]} to TP {route[1]}")

    def close(self) -> None:
        """End all processes."""
        for ranks in self.ranks.values():
            for rank in ranks:
                rank.end()


def run(path: str, rounds: int) -> tuple[str, dict[str, list[tuple[float, float]]]]:
    """The path in words, and seconds and processor seconds of each case's rounds, by its name."""
    fleet = Fleet(path)
    try:
        cases = [(route, "staging") for route in ROUTES] + [(route, "tokens") for route in UNEQUAL]
        for route in ROUTES:
            fleet.move(route, "staging")  # untimed: connections are made on first use
            fleet.check(route)
        taken: dict[str, list[tuple[float, float]]] = {_name(*case): [] for case in cases}
        for number in range(rounds):
            for route, mode in cases:
                if mode == "staging" or number % _SLOW_EVERY == 0:
                    taken[_name(route, mode)].append(fleet.move(route, mode))
        return fleet.path, taken
    finally:
        fleet.close()


def ratios(medians: dict[str, float]) -> dict[str, float]:
    """See the module's docstring."""
    ours = {route: medians[_name(route, "staging")] for route in UNEQUAL}
    slices = min(medians[_name(route, "tokens")] / ours[route] for route in UNEQUAL)
    equal = {tp: medians[_name((tp, tp), "staging")] / max(ours.values()) for tp in (1, 4)}
    return {
        "staging_vs_per_token_slices": round(slices, 2),
        "staging_vs_equal_tp": round(equal[1], 3),
        "staging_vs_equal_tp4": round(equal[4], 3),
    }


def _name(route: tuple[int, int], mode: str) -> str:
    return f"tp{route[0]}_tp{route[1]}_{mode}"


def main() -> None:
    """Print a table, or with --json one line that other programs read."""
    parser = argparse.ArgumentParser(description="Transfers between unequal layouts.")
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead of the table")
    parser.add_argument(
        "--path", choices=["put", "mapped"], default="put", help="over the network (default), or memory"
    )
    parser.add_argument("--rounds", type=int, default=9, help="timed turns of each case (default 9)")
    options = parser.parse_args()
    path, taken = run(options.path, options.rounds)
    medians = {name: statistics.median(seconds for seconds, _ in each) for name, each in taken.items()}
    processor = {name: statistics.median(cpu for _, cpu in each) for name, each in taken.items()}
    found = ratios(medians)
    if options.json:
        rows = [
            {"case": name, "seconds": round(seconds, 4), "processor_s": round(processor[name], 4)}
            for name, seconds in medians.items()
        ]
        print(json.dumps({"bench": "hetero", "path": path, "rows": rows, "ratios": found}))
        return
    print(f"path: {path}; {MEGABYTES} MB")
    for name, seconds in medians.items():
        cpu = f"processor {processor[name] * 1000:.0f} ms"
        print(f"{name:18} {seconds * 1000:9.1f} ms  {MEGABYTES / 1000 / seconds:6.2f} GB/s  {cpu}")
    print(", ".join(f"{name} {value}" for name, value in found.items()))


if __name__ == "__main__":
    main()
