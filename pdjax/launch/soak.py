"""``soak``: mixed requests against instances that are killed, stopped and started again all the while.

Every answer is compared with that of a unified instance that nobody breaks. What must not happen: a wrong token, a
request that ends without an answer or a reason, one that takes longer than the bound, a page or slot that does not
come home, a failure inside the program or a compilation after warm-up in any log. Without faults, no request may fail
either.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pdjax.launch.soak_clients import Client, Tally, World
from pdjax.launch.soak_parts import Instance, Parts, get, metrics_of

CLIENTS = 8
TINY = {
    "Model.dtype": "float32", "Cache.pages": 401, "Engine.max_context": 512, "Engine.max_running_requests": 8,
    "Engine.prefill_tokens": 64, "Disagg.bootstrap_timeout": 10.0, "Disagg.waiting_timeout": 20.0,
    "Disagg.transfer_timeout": 10.0,
}  # fmt: skip
_PAUSE = (1.0, 5.0)  # seconds between two faults
_STOP = (0.5, 4.0)  # seconds that an instance is stopped
_WRITE_TINY = (
    "import sys, pathlib; from pdjax.models.random import tiny_config, write_random_model;"
    "write_random_model(pathlib.Path(sys.argv[1]), tiny_config(), seed=1)"
)
_SHOWN = 5  # sentences of each kind
# What the router has done so that a client need not hear of a loss.
_MADE_GOOD = {"rooms computed anew": "recomputed_rooms", "streams that went on elsewhere": "router_resumed_streams"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command line."""
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=10**9, help="stop after so many requests")
    parser.add_argument("--prefill", type=int, default=1, help="prefill instances (default: %(default)s)")
    parser.add_argument("--decode", type=int, default=1, help="decode instances (default: %(default)s)")
    parser.add_argument("--no-faults", action="store_true", help="break nothing")
    parser.add_argument("--bound", type=float, default=60.0, help="seconds that a request may take (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of requests and faults (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument(
        "--config", type=Path, action="append", default=[], metavar="FILE.gin",
        help="configuration of all instances; without one, a tiny random model is used",
    )  # fmt: skip


def main(args: argparse.Namespace) -> int:
    """Run; returns 0 if nothing happened that must not."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="pdjax-soak-") as folder:
        parts = Parts(_options(args.config, Path(folder)), prefill=args.prefill, decode=args.decode)
        try:
            parts.start()
            result = _run(parts, args)
        except RuntimeError as error:
            print(f"pdjax soak: {error}", file=sys.stderr)
            return 2
        finally:
            parts.end()
    _report(result, as_json=args.json)
    return 0 if result["ok"] else 1


def _options(files: list[Path], folder: Path) -> list[str]:
    if files:
        return [argument for file in files for argument in ("--config", str(file))]
    # In a process of its own: it imports JAX, and a process with JAX's threads should not fork.
    subprocess.run([sys.executable, "-c", _WRITE_TINY, str(folder / "tiny")], check=True)
    return [f"--gin.{name}={value}" for name, value in (TINY | {"Model.folder": folder / "tiny"}).items()]


def _run(parts: Parts, args: argparse.Namespace) -> dict[str, Any]:
    info = json.loads(get(parts.oracle.port, "/server_info")[1])
    started = time.monotonic()
    world = World(
        router=parts.port,
        oracle=parts.oracle.port,
        max_context=info["max_context"],
        vocabulary=min(info["vocab_size"], 250),
        bound=args.bound,
        requests=args.requests,
        until=started + 60 * args.minutes,
        seed=args.seed,
    )
    tally, stop = Tally(), threading.Event()
    clients = [Client(number, world, tally, stop) for number in range(CLIENTS)]
    faults = Faults(parts.instances, args.seed, lambda: any(client.is_alive() for client in clients))
    for client in clients:
        client.start()
    try:
        if not args.no_faults:
            faults.run()
        for client in clients:
            client.join()
    finally:
        stop.set()
    seconds = time.monotonic() - started
    router, leaks = metrics_of(parts.port), parts.leaks()
    bad = {
        "wrong": tally.wrong,
        "untold": tally.untold,
        "late": tally.late,
        "leaks": leaks,
        "crashes": parts.crashes,
        "broken faults": faults.problems,
    }
    if args.no_faults:
        bad["failed"] = [f"{count} requests failed with {status}" for status, count in tally.told.items()]
    return {
        "soak": {"minutes": seconds / 60, "prefill": args.prefill, "decode": args.decode, "seed": args.seed},
        "requests": tally.total,
        "kinds": dict(tally.requests),
        "answered": tally.answered,
        "failed_with_a_reason": dict(tally.told),
        "made_good": {name: router.get(f"{metric}_total") for name, metric in _MADE_GOOD.items()},
        "faults": dict(faults.counts),
        "slowest_repair_s": faults.slowest_s,
        "worst_s": tally.worst_s,
        **{name.replace(" ", "_"): len(sentences) for name, sentences in bad.items()},
        "sentences": [f"{name}: {text[:600]}" for name, texts in bad.items() for text in texts[:_SHOWN]],
        "ok": tally.answered > 0 and not any(bad.values()),
    }


class Faults:
    """Breaks one instance after the other, and makes each whole again before the next.

    It runs on the main thread: a child is told of the death of the thread that started it, not of the process.
    """

    def __init__(self, instances: list[Instance], seed: int, busy: Callable[[], bool]) -> None:
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.slowest_s = 0.0  # from a fault to an instance that is well again
        self._instances = instances
        self._random = random.Random(f"faults {seed}")
        self._busy = busy

    def run(self) -> None:
        """Go on as long as anybody asks for anything."""
        while self._wait(self._random.uniform(*_PAUSE)):
            instance = self._random.choice(self._instances)
            fault = self._random.choice(("kill all", "kill leader", "stop", "stop", "restart", "move"))
            began = time.monotonic()
            try:
                self._break(instance, fault)
            except Exception as error:  # noqa: BLE001 - whatever it is, the soak has found or made something broken
                self.problems.append(f"{fault} of {instance.name}: {error!r}")
                return
            finally:
                self.slowest_s = max(self.slowest_s, time.monotonic() - began)

    def _break(self, instance: Instance, fault: str) -> None:
        self.counts[f"{fault} {instance.role}"] += 1
        match fault:
            case "stop":
                leader = instance.leader()
                os.kill(leader, signal.SIGSTOP)
                time.sleep(self._random.uniform(*_STOP))
                os.kill(leader, signal.SIGCONT)
                return
            case "restart":
                instance.end()
            case _:
                instance.kill(leader_only=fault == "kill leader")
        instance.start(move=fault == "move")
        instance.wait_ready()

    def _wait(self, seconds: float) -> bool:
        """Whether somebody still asks after so long."""
        deadline = time.monotonic() + seconds
        while self._busy() and time.monotonic() < deadline:
            time.sleep(0.1)
        return self._busy()


def _report(result: dict[str, Any], *, as_json: bool) -> None:
    for sentence in result["sentences"]:
        print(sentence, file=sys.stderr)
    if as_json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        if name not in ("sentences", "soak"):
            text = ", ".join(f"{key}: {count}" for key, count in value.items()) if isinstance(value, dict) else value
            print(f"{name.replace('_', ' '):<22}{text if not isinstance(text, float) else f'{text:.2f}'}")
