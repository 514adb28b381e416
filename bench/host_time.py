"""What does a decode step cost the host, and what does overlapping it with the device's work gain?

An engine in this process decodes `--running` requests together. Processor time of its thread is counted from one
decode step's dispatch to the next, first while XLA computes on all cores, in the caches that the thread needs too, and
then with a core for the thread alone, as on a server whose accelerators compute.

* schedule: messages taken, the role's look at its requests, the plan.
* dispatch: the step's arguments, and the call that gives them to the device.
* read: tokens brought to the host, without the wait for them.
* emit: tokens counted, ends found, frames for the frontend.
* detokenise: frames made text as the frontend does, in its own process, so it is not in the total of the engine.

Figures are medians over steps, in microseconds. The ratio is the speed of decoding with overlap over
that without, in turns.

    python bench/host_time.py [--json] [--running 32] [--tokens 64] [--rounds 3] [--model smollm2-135m-instruct]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import queue
import socket
import statistics
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pdjax.config import Config
from pdjax.engine.engine import Engine, Stop
from pdjax.engine.plan import DecodeStep, StepPlan
from pdjax.engine.runner import RunningStep, StepResult
from pdjax.engine.unified import Unified
from pdjax.kernels import native
from pdjax.launch.cache_folder import cache_root
from pdjax.launch.core import Core, keep_compiled_programs, load_core, make_engine
from pdjax.launch.fetch import fetch
from pdjax.server.detokenize import Detokenizer
from pdjax.server.vocabulary import Vocabulary
from pdjax.wire import Failed, Generate, SamplingParams, ToFrontend, Tokens, apart, encode

PARTS = ("schedule", "dispatch", "read", "emit")
PROMPT_TOKENS = 128


class Clock:
    """Splits this thread's processor time between decode steps of all rows into parts."""

    def __init__(self, engine: Engine, running: int) -> None:
        self.steps: list[dict[str, float]] = []
        self._running = running
        self._spent: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self._began: float | None = None
        dispatch, next_step, poll = engine.runner.dispatch, engine.scheduler.next_step, engine.role.poll
        engine.scheduler.next_step = self._timed("schedule", next_step)
        engine.role.poll = self._timed("schedule", poll)

        def counted(step: StepPlan) -> RunningStep:
            whole = isinstance(step, DecodeStep) and len(step.rows) == running
            now = time.thread_time()
            if self._began is not None:
                self.steps.append(self._spent | {"total": now - self._began})
            self._spent = dict.fromkeys(PARTS, 0.0)
            flying = dispatch(step)
            self._spent["dispatch"] += time.thread_time() - now
            self._began = now if whole else None
            flying.read = self._timed("read", flying.read)
            return flying

        engine.runner.dispatch = counted

    def _timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> StepResult:
            began = time.thread_time()
            try:
                return call(*args)
            finally:
                self._spent[part] += time.thread_time() - began

        return timed


def serve(config: Config, core: Core, overlap: bool, requests: list[Generate]) -> tuple[list[Tokens], Clock, float]:
    """Run requests until the first has ended: the frames, where the host's time went, and tokens a second of all."""
    inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
    said: list[tuple[float, tuple[ToFrontend, ...]]] = []

    near, far = socket.socketpair()
    frontend = subprocess.Popen(
        ["cat"], stdin=far.fileno(), stdout=subprocess.DEVNULL
    )  # a process of its own, as the real one
    far.close()

    def emit(*messages: ToFrontend) -> None:
        near.sendall(b"".join(map(encode, messages)))
        said.append((time.perf_counter(), messages))
        for message in messages:
            if isinstance(message, Failed):
                raise SystemExit(f"a request has failed: {message.message}")
        if any(isinstance(message, Tokens) and message.finish_reason for message in messages):
            inbox.put(Stop())

    config = dataclasses.replace(config, engine=dataclasses.replace(config.engine, overlap=overlap))
    engine = make_engine("unified", config, core, inbox=inbox, emit=emit, make_role=Unified)
    clock = Clock(engine, len(requests))
    for request in requests:
        inbox.put(request)
    try:
        engine.run()
    finally:
        del engine.runner.dispatch  # the runner's own is there again for the next engine
        near.close()
        frontend.wait()
    frames = [(when, frame) for when, messages in said for frame in apart(messages) if isinstance(frame, Tokens)]
    began = max({frame.rid: when for when, frame in reversed(frames)}.values())  # the last one's first token
    together = sum(when > began for when, _ in frames)
    return [frame for _, frame in frames], clock, together / (frames[-1][0] - began)


def detokenise(vocabulary: Vocabulary, frames: list[Tokens], running: int) -> float:
    """Seconds of processor time to turn the tokens of one step into text."""
    rids = {frame.rid for frame in frames}
    texts = {rid: Detokenizer(lambda ids: vocabulary.decode(ids, skip_special=True)) for rid in rids}
    began = time.thread_time()
    for frame in frames:
        texts[frame.rid].add(frame.token_ids)
    return (time.thread_time() - began) / len(frames) * running


def main() -> None:
    """Run the benchmark and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, default=32, help="requests that decode together (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="output tokens of each (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds (default: %(default)s)")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="folder or name (default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", help="(default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    args = parser.parse_args()
    keep_compiled_programs()
    native.load(cache_root() / "native")
    folder = Path(args.model) if Path(args.model).is_dir() else fetch(args.model)
    config = Config()
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, folder=str(folder), dtype=args.dtype),
        cache=dataclasses.replace(config.cache, prefix=False),
        engine=dataclasses.replace(config.engine, max_running_requests=args.running, max_context=1024),
    )
    core = load_core("unified", config, folder)
    core.runner.warm_up(core.warm_up_steps("unified"))
    rows, ratios = [], {}
    for name in ("shared cores", "own core"):
        if name == "own core":
            take_a_core()
        found, speedup = measure(config, core, args)
        report(name, found, speedup)
        rows += [{"case": name} | row for row in found]
        if name == "shared cores":
            ratios["overlap_speedup"] = speedup
    if args.json:
        print(json.dumps({"bench": "host_time", "rows": rows, "ratios": ratios}))


def take_a_core() -> None:
    """Leave this thread alone on one core, and all others of this process on the rest."""
    mine, *rest = sorted(os.sched_getaffinity(0))
    if not rest:
        raise SystemExit("there is one core only")
    for thread in map(int, os.listdir("/proc/self/task")):
        os.sched_setaffinity(thread, {mine} if thread == threading.get_native_id() else rest)


def measure(config: Config, core: Core, args: argparse.Namespace) -> tuple[list[dict[str, Any]], float]:
    """A row for each part, and the speed with overlap over that without."""
    vocabulary = Vocabulary.load(Path(core.info["model_path"]))
    steps: list[dict[str, float]] = []
    speeds: dict[bool, list[float]] = {True: [], False: []}
    for number in range(args.rounds):
        for overlap in speeds:
            requests = [_request(f"{number}-{overlap}-{index}", index, args.tokens) for index in range(args.running)]
            frames, clock, speed = serve(config, core, overlap, requests)
            speeds[overlap].append(speed)
            if overlap:
                text = detokenise(vocabulary, frames, args.running)
                steps += [step | {"detokenise": text} for step in clock.steps[2:]]
    found = [step | {"emit": step["total"] - sum(step[part] for part in PARTS[:-1])} for step in steps]
    rows = []
    for part in (*PARTS, "total", "detokenise"):
        values = sorted(1e6 * step[part] for step in found)
        quarter = len(values) // 4
        rows.append(
            {"part": part, "us": statistics.median(values), "low": values[quarter], "high": values[-quarter - 1]}
        )
    return rows, statistics.median(speeds[True]) / statistics.median(speeds[False])


def report(name: str, rows: list[dict[str, Any]], speedup: float) -> None:
    """A table."""
    print(f"{name:<24}{'us':>8}  quartiles")
    for row in rows:
        print(f"  {row['part']:<22}{row['us']:>8.0f}  {row['low']:.0f} to {row['high']:.0f}")
    print(f"  speed with overlap over that without: {speedup:.2f}", flush=True)


def _request(rid: str, seed: int, tokens: int) -> Generate:
    ids = [(7 * seed + 13 * place) % 250 for place in range(PROMPT_TOKENS)]
    sampling = SamplingParams(temperature=0.0, max_new_tokens=tokens, ignore_eos=True)
    return Generate(rid, ids, sampling)


if __name__ == "__main__":
    main()
