"""How fast do a request's KV pages move from one process to another on this host, and at what cost?

Rows are pdjax on its backends (gather, write, scatter: pages to pages), NIXL and Mooncake as their own examples use
them (a descriptor a page; for some of the heads, a slice a token), one memcpy a page, and a sender that copies pages
straight into a pool in shared memory. Each is verified. Milliseconds are from the sender's call until the receiver has
it, the median of the better half of the rounds; processor time is of both sides. The table has goals in brackets.

    python -m bench.transfer [--json] [--rounds 6] [--only NAME ...]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.transfer_work import WORKS
from pdjax.net.mpi import environment

_WARM_UPS = 2
_PATIENCE = 120.0


@dataclass(frozen=True)
class Row:
    """A contender over a medium: the class of its sides, their options, and the environment it needs."""

    name: str
    side: str
    options: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()
    needs: str | None = None
    works: tuple[str, ...] = ("page64", "page16", "heads")


_TCP, _ONE_RAIL = ("UCX_TLS", "tcp"), ("UCX_MAX_RMA_RAILS", "1")
ROWS = [
    Row("memcpy", "Memcpy"),
    Row("shared pool", "SharedPool"),
    Row("nixl default cma", "Nixl", (), (), "nixl_cu12"),
    Row("nixl tuned cma", "Nixl", ("tuned",), (_ONE_RAIL,), "nixl_cu12"),
    Row("nixl default tcp", "Nixl", (), (_TCP,), "nixl_cu12"),
    Row("nixl tuned tcp", "Nixl", ("tuned",), (_TCP, _ONE_RAIL), "nixl_cu12"),
    Row("mooncake tcp", "Mooncake", (), (), "mooncake"),
    Row("pdjax ucx mapped", "pdjax", ("ucx", "mapped")),
    Row("pdjax ucx tcp", "pdjax", ("ucx",)),
    Row("pdjax nixl cma", "pdjax", ("nixl",), (), "nixl_cu12"),
    Row("pdjax nixl tcp", "pdjax", ("nixl",), (_TCP,), "nixl_cu12"),
    Row("pdjax mooncake tcp", "pdjax", ("mooncake",), (), "mooncake"),
    Row("pdjax ucx mapped busy", "pdjax", ("ucx", "mapped", "busy"), works=("page64",)),
    Row("pdjax ucx tcp busy", "pdjax", ("ucx", "busy"), works=("page64",)),
]

# Ratios: the work, the row whose speed is above the line, and the one below it.
RATIOS = {
    "ucx_vs_tuned_nixl_tcp": ("page64", "pdjax ucx tcp", "nixl tuned tcp", 0.95),
    "ucx_vs_tuned_nixl_cma": ("page64", "pdjax ucx mapped", "nixl tuned cma", 0.95),
    "ucx_vs_default_nixl_tcp": ("page64", "pdjax ucx tcp", "nixl default tcp", 1.0),
    "ucx_vs_mooncake_tcp": ("page64", "pdjax ucx tcp", "mooncake tcp", 1.0),
    "mapped_ring_vs_shared_pool": ("page64", "pdjax ucx mapped", "shared pool", 0.85),
    "head_slices_vs_nixl_per_token": ("heads", "pdjax ucx tcp", "nixl tuned tcp", 10.0),
    "head_slices_vs_mooncake_per_token": ("heads", "pdjax ucx tcp", "mooncake tcp", 10.0),
    "busy_engine_slowdown": ("page64", "pdjax ucx mapped", "pdjax ucx mapped busy", 1.3),
}


@dataclass(frozen=True)
class Result:
    """`cpu_ms` is of sender and receiver. `ms` is None where it cannot be had, and `problem` says why."""

    row: str
    work: str
    ms: float | None
    gbps: float | None
    cpu_ms: tuple[float, float] | None
    best_ms: float | None = None
    first_transfer_s: float | None = None
    path: str | None = None
    problem: str | None = None


class Side:
    """A process of a row."""

    def __init__(self, row: Row, work: str, role: str, slot_mib: int) -> None:
        env = environment(dict(os.environ)) if row.side == "pdjax" else dict(os.environ)
        env |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(__file__).parents[1]), "NIXL_LOG_LEVEL": "WARN"}
        env |= dict(row.variables)
        command = [sys.executable, "-m", "bench.transfer_side", row.side, work, role, *row.options, f"slot={slot_mib}"]
        if row.side == "pdjax":
            command = [str(Path(sys.executable).with_name("mpiexec")), "-n", "1", *command]
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._words, text=True, env=env,
            start_new_session=True,
        )  # fmt: skip

    def tell(self, op: str, **arguments: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"op": op} | arguments) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """The next answer. Raises `RuntimeError` with the last words of a process that has ended."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        self._words.seek(0)
        raise RuntimeError(self._words.read().decode(errors="replace").strip()[-500:] or "it ended without a word")

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        self.tell(op, **arguments)
        return self.answer()

    def end(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=_PATIENCE)
        self._words.close()


def measure(row: Row, work: str, rounds: int, slot_mib: int) -> Result:
    """Run one cell, in fresh processes."""
    if row.needs is not None and importlib.util.find_spec(row.needs) is None:
        return Result(row.name, work, None, None, None, problem=f"{row.needs} is not installed")
    sides = [Side(row, work, role, slot_mib) for role in ("target", "source")]
    target, source = sides
    try:
        for side in sides:
            side.answer()
        told = {"source": target.ask("describe"), "target": source.ask("describe")}
        target.tell("connect", peer=told["target"])
        facts = source.ask("connect", peer=told["source"])
        target.answer()
        took = [_round(source, target, row) for _ in range(_WARM_UPS + rounds)][_WARM_UPS:]
        here, there = (
            source.ask("digest", of="source"),
            (source if row.side == "Memcpy" else target).ask("digest", of="target"),
        )
        if here != there:
            return Result(row.name, work, None, None, None, problem="the bytes that arrived are not those sent")
    except (RuntimeError, BrokenPipeError) as error:
        return Result(row.name, work, None, None, None, problem=str(error))
    finally:
        for side in sides:
            side.end()
    better = sorted(took)[: max(len(took) // 2, 1)]
    ms, sender, receiver = (statistics.median(column) for column in zip(*better))
    return Result(
        row.name, work, round(ms, 2), round(WORKS[work].nbytes / ms / 1e6, 2), (round(sender, 1), round(receiver, 1)),
        round(better[0][0], 2), facts["first_transfer_s"] and round(facts["first_transfer_s"], 3), facts["path"],
    )  # fmt: skip


def _round(source: Side, target: Side, row: Row) -> tuple[float, float, float]:
    target.tell("run")
    target.answer()
    sent = source.ask("run")
    received = target.answer()
    ended = sent["ended"] if row.side == "Memcpy" else received["ended"]
    return 1e3 * (ended - sent["began"]), sent["cpu_ms"], received["cpu_ms"]


def ratios(results: list[Result]) -> dict[str, float | None]:
    """Speeds over speeds; None where one of the two is missing."""
    speeds = {(result.work, result.row): result.gbps for result in results}
    found: dict[str, float | None] = {}
    for name, (work, above, below, _) in RATIOS.items():
        upper, lower = speeds.get((work, above)), speeds.get((work, below))
        found[name] = round(upper / lower, 2) if upper and lower else None
    return found


def _print(results: list[Result]) -> None:
    for result in results:
        if result.ms is None:
            print(f"{result.work:8} {result.row:24} -  {result.problem}")
            continue
        assert result.cpu_ms is not None
        first = f"  first transfer after {result.first_transfer_s} s" if result.first_transfer_s else ""
        print(
            f"{result.work:8} {result.row:24} {result.ms:8.1f} ms {result.gbps:6.2f} GB/s  "
            f"best {result.best_ms:.1f}  processor {result.cpu_ms[0]:.0f} + {result.cpu_ms[1]:.0f} ms{first}"
        )
    for name, ratio in ratios(results).items():
        print(f"{name:36} {'null' if ratio is None else ratio:>6}  ({RATIOS[name][3]})")


def _means(wanted: str, name: str) -> bool:
    """Whole names are meant exactly, others are parts of names."""
    return wanted == name or (wanted in name and wanted not in {row.name for row in ROWS})


def main() -> None:
    """Measure, then print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.add_argument("--rounds", type=int, default=6, help="timed rounds a cell (default: %(default)s)")
    parser.add_argument("--only", nargs="+", default=[], help="rows of these names, or whose names contain one")
    parser.add_argument("--slot-mib", type=int, default=8, help="pdjax's staging slots, in MiB (default: %(default)s)")
    parser.add_argument("--work", nargs="+", choices=list(WORKS), default=list(WORKS), help="what is moved")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    results = [
        measure(row, work, args.rounds, args.slot_mib)
        for work in args.work
        for row in ROWS
        if work in row.works and (not args.only or any(_means(name, row.name) for name in args.only))
    ]
    if args.json:
        print(json.dumps({"load": load, "rows": [asdict(result) for result in results], "ratios": ratios(results)}))
        return
    print(f"load before: {load:.2f} on {os.cpu_count()} processors")
    _print(results)


if __name__ == "__main__":
    main()
