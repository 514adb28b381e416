"""How fast do a request's KV pages move from one process to another on this host, and at what cost?

Rows are pdjax on its backends (gather, write, scatter: pages to pages), NIXL and Mooncake as their own examples use
them (a descriptor a page; for some of the heads, a slice a token), one memcpy a page, and a sender that copies pages
straight into a pool in shared memory. Each is verified. Rows that are compared take turns, round by round; who has no
turn is stopped. Milliseconds are from the sender's call until the receiver has it, the median of the better half of the
rounds; processor time is of both sides. A row whose rounds are long gets fewer. The table has goals in brackets. All
of it takes some minutes; rows are told on stderr as they come, and --work and --only choose parts.

    python bench/transfer.py [--json] [--rounds 6] [--work NAME ...] [--only NAME ...]
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import queue
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pdjax.net.mpi import environment

sys.path.insert(0, str(Path(__file__).parents[1]))  # a script's own path begins with its folder
from bench.transfer_work import WORKS

_WARM_UPS = 2
_PATIENCE = 120.0  # seconds for one answer
_LONG = 15.0  # seconds of rounds, after which a row gets no more of them
_LONG_WARM_UP = 2.0  # seconds


@dataclass(frozen=True)
class Row:
    """A contender over a medium: the class of its sides, their options, and the environment it needs. Rows of a group
    are compared with each other."""

    name: str
    group: str
    side: str
    options: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()
    needs: str | None = None
    works: tuple[str, ...] = ("page64", "page16", "heads")


_TCP, _ONE_RAIL = ("UCX_TLS", "tcp"), ("UCX_MAX_RMA_RAILS", "1")
ROWS = [
    Row("memcpy", "memory", "Memcpy"),
    Row("shared pool", "memory", "SharedPool"),
    Row("nixl default cma", "memory", "Nixl", (), (), "nixl_cu12"),
    Row("nixl tuned cma", "memory", "Nixl", ("tuned",), (_ONE_RAIL,), "nixl_cu12"),
    Row("nixl default tcp", "network", "Nixl", (), (_TCP,), "nixl_cu12"),
    Row("nixl tuned tcp", "network", "Nixl", ("tuned",), (_TCP, _ONE_RAIL), "nixl_cu12"),
    Row("mooncake tcp", "network", "Mooncake", (), (), "mooncake"),
    Row("pdjax ucx mapped", "memory", "pdjax", ("ucx", "mapped")),
    Row("pdjax ucx tcp", "network", "pdjax", ("ucx",)),
    Row("pdjax nixl cma", "others", "pdjax", ("nixl",), (), "nixl_cu12"),
    Row("pdjax nixl tcp", "others", "pdjax", ("nixl",), (_TCP,), "nixl_cu12"),
    Row("pdjax mooncake tcp", "others", "pdjax", ("mooncake",), (), "mooncake"),
    Row("pdjax jax tcp", "others", "pdjax", ("jax",), works=("page64",)),
    Row("pdjax ucx mapped busy", "memory", "pdjax", ("ucx", "mapped", "busy"), works=("page64",)),
    Row("pdjax ucx tcp busy", "network", "pdjax", ("ucx", "busy"), works=("page64",)),
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

    def __init__(self, row: Row, work: str, role: str, step_tokens: int) -> None:
        env = environment(dict(os.environ)) if row.side == "pdjax" else dict(os.environ)
        env |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(__file__).parents[1]), "NIXL_LOG_LEVEL": "WARN"}
        env |= dict(row.variables)
        command = [
            sys.executable,
            "-m",
            "bench.transfer_side",
            row.side,
            work,
            role,
            *row.options,
            f"step={step_tokens}",
        ]
        if row.side == "pdjax":
            command = [str(Path(sys.executable).with_name("mpiexec")), "-n", "1", *command]
        self.pid = 0
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._words, text=True, env=env,
            start_new_session=True,
        )  # fmt: skip
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                self._lines.put(line)
        self._lines.put("")

    def tell(self, op: str, **arguments: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"op": op} | arguments) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """The next answer. Raises `RuntimeError`: a process has ended, with its last words, or does not answer."""
        try:
            line = self._lines.get(timeout=_PATIENCE)
        except queue.Empty:
            raise RuntimeError(f"no answer within {_PATIENCE:.0f} s") from None
        if line:
            return json.loads(line)
        self._words.seek(0)
        raise RuntimeError(self._words.read().decode(errors="replace").strip()[-500:] or "it ended without a word")

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        self.tell(op, **arguments)
        return self.answer()

    def signal(self, number: signal.Signals) -> None:
        """To the process itself, not to what started it."""
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def end(self) -> None:
        self.signal(signal.SIGKILL)
        self._process.kill()
        self._process.wait(_PATIENCE)
        self._words.close()


class Cell:
    """Both sides of a row, in fresh processes. A failure is noted as `problem`, and then nothing more is done."""

    def __init__(self, row: Row, work: str, step_tokens: int) -> None:
        self.row, self.work = row, work
        self.problem: str | None = None
        self._sides: list[Side] = []
        self._facts: dict[str, Any] = {}
        self._took: list[tuple[float, float, float]] = []  # ms, and processor ms of sender and receiver
        if row.needs is not None and importlib.util.find_spec(row.needs) is None:
            self.problem = f"{row.needs} is not installed"
            return
        with self._noted():
            self._sides = [Side(row, work, role, step_tokens) for role in ("target", "source")]
            target, source = self._sides
            for side in self._sides:
                side.pid = side.answer()["pid"]
            told = {"source": target.ask("describe"), "target": source.ask("describe")}
            target.tell("connect", peer=told["target"])
            self._facts = source.ask("connect", peer=told["source"])
            target.answer()
            for _ in range(_WARM_UPS):
                if self._round()[0] > 1e3 * _LONG_WARM_UP:
                    break
            self._signal(signal.SIGSTOP)

    def turn(self) -> None:
        """One timed round."""
        if self.problem is not None or sum(ms for ms, _, _ in self._took) > 1e3 * _LONG:
            return
        with self._noted():
            self._signal(signal.SIGCONT)
            self._took.append(self._round())
            self._signal(signal.SIGSTOP)

    def result(self) -> Result:
        """What was measured, if the bytes that arrived are those sent."""
        with self._noted():
            if self.problem is not None:
                raise RuntimeError(self.problem)
            self._signal(signal.SIGCONT)
            target, source = self._sides
            arrived = (source if self.row.side == "Memcpy" else target).ask("digest", of="target")
            if arrived != source.ask("digest", of="source"):
                raise RuntimeError("the bytes that arrived are not those sent")
        if self.problem is not None:
            return Result(self.row.name, self.work, None, None, None, problem=self.problem)
        better = sorted(self._took)[: max(len(self._took) // 2, 1)]
        ms, sender, receiver = (statistics.median(column) for column in zip(*better))
        first = self._facts["first_transfer_s"]
        return Result(
            self.row.name, self.work, round(ms, 2), round(WORKS[self.work].nbytes / ms / 1e6, 3),
            (round(sender, 1), round(receiver, 1)), round(better[0][0], 2), first and round(first, 3),
            self._facts["path"],
        )  # fmt: skip

    def end(self) -> None:
        """Kill both processes."""
        for side in self._sides:
            side.end()

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, BrokenPipeError) as error:
            self.problem = str(error)

    def _signal(self, number: signal.Signals) -> None:
        for side in self._sides:
            side.signal(number)

    def _round(self) -> tuple[float, float, float]:
        target, source = self._sides
        target.tell("run")
        target.answer()
        sent = source.ask("run")
        received = target.answer()
        ended = sent["ended"] if self.row.side == "Memcpy" else received["ended"]
        return 1e3 * (ended - sent["began"]), sent["cpu_ms"], received["cpu_ms"]


def measure(rows: list[Row], work: str, rounds: int, step_tokens: int) -> list[Result]:
    """Rows of a group, in turns."""
    cells: list[Cell] = []
    try:
        for row in rows:
            cells.append(Cell(row, work, step_tokens))  # noqa: PERF401 - those made before one that raises are ended
        for _ in range(rounds):
            for cell in cells:
                cell.turn()
        return [cell.result() for cell in cells]
    finally:
        for cell in cells:
            cell.end()


def ratios(results: list[Result]) -> dict[str, float | None]:
    """Speeds over speeds; None where one of the two is missing."""
    times = {(result.work, result.row): result.ms for result in results}
    found: dict[str, float | None] = {}
    for name, (work, above, below, _) in RATIOS.items():
        upper, lower = times.get((work, above)), times.get((work, below))
        found[name] = round(lower / upper, 2) if upper and lower else None
    return found


def _line(result: Result) -> str:
    if result.ms is None:
        return f"{result.work:8} {result.row:24} -  {result.problem}"
    assert result.cpu_ms is not None
    first = f"  first transfer after {result.first_transfer_s} s" if result.first_transfer_s else ""
    return (
        f"{result.work:8} {result.row:24} {result.ms:8.1f} ms {result.gbps:6.2f} GB/s  "
        f"best {result.best_ms:.1f}  processor {result.cpu_ms[0]:.0f} + {result.cpu_ms[1]:.0f} ms{first}"
    )


def _print(results: list[Result]) -> None:
    for result in results:
        print(_line(result))
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
    parser.add_argument(
        "--step-tokens",
        type=int,
        default=512,
        help="of a prefill step, which is what a slot holds (default: %(default)s)",
    )
    parser.add_argument("--work", nargs="+", choices=list(WORKS), default=list(WORKS), help="what is moved")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    results = []
    for work in args.work:
        rows = [
            row
            for row in ROWS
            if work in row.works and (not args.only or any(_means(name, row.name) for name in args.only))
        ]
        for group in dict.fromkeys(row.group for row in ROWS):
            measured = measure([row for row in rows if row.group == group], work, args.rounds, args.step_tokens)
            for result in measured:
                print(_line(result), file=sys.stderr, flush=True)
            results += measured
    if args.json:
        rows = [asdict(result) for result in results]
        print(json.dumps({"bench": "transfer", "load": load, "rows": rows, "ratios": ratios(results)}))
        return
    print(f"load before: {load:.2f} on {os.cpu_count()} processors")
    _print(results)


if __name__ == "__main__":
    main()
