"""How fast is the engine beside others? SmolLM2-135M, two threads, one machine.

Every system gets the same prompts (token ids), greedy, without stopping early, in turns; medians of several rounds.
pdjax is a unified instance asked over HTTP; the peers run offline, in environments that bench/peers.sh makes. A peer
that is not there, or does not run on this processor, leaves its rows out and its ratios null.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from pdjax.launch.cache_folder import cache_root
from pdjax.launch.ports import free_ports
from pdjax.launch.supervise import Child, end_all

START_SECONDS = 900.0
ANSWER_SECONDS = 600.0
SHARED_TOKENS = 1000
VOCABULARY = range(1000, 41000)
PEER_SCRIPTS = {"vllm": "vllm_peer.py", "transformers": "transformers_peer.py"}


class System(Protocol):
    """Answers prompts; `generate` returns the seconds until all of them have `new` tokens."""

    def generate(self, prompts: list[list[int]], new: int) -> float: ...

    def close(self) -> None: ...


class Pdjax:
    """A unified instance."""

    def __init__(self, config: Path, dtype: str) -> None:
        (port,) = free_ports(1)
        self._url = f"http://127.0.0.1:{port}"
        options = ["--config", str(config), f"--gin.Server.port={port}", f"--gin.Model.dtype='{dtype}'"]
        command = [sys.executable, "-m", "pdjax.launch", "unified", *options]
        self._child = Child("pdjax", command, lambda *_: None)
        deadline = time.monotonic() + START_SECONDS
        while not self._healthy():
            if self._child.exit_code is not None or time.monotonic() > deadline:
                lines = "\n".join(self._child.last_lines)
                self.close()
                raise SystemExit(f"the {dtype} instance did not start:\n{lines}")
            time.sleep(0.2)

    def generate(self, prompts: list[list[int]], new: int) -> float:
        sampling = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
        body = json.dumps({"input_ids": prompts, "sampling_params": sampling}).encode()
        request = urllib.request.Request(f"{self._url}/generate", body, {"Content-Type": "application/json"})
        started = time.perf_counter()
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as response:
            answers = json.load(response)
        seconds = time.perf_counter() - started
        counts = [answer["meta_info"]["completion_tokens"] for answer in answers]
        if counts != [new] * len(prompts):
            raise SystemExit(f"asked for {new} tokens of {len(prompts)} prompts, got {counts}")
        return seconds

    def close(self) -> None:
        end_all([self._child])

    def _healthy(self) -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self._url}/health", timeout=5) as response:
            return response.status == 200
        return False


class Peer:
    """A script in an environment of its own, asked over its standard input and output, a line each."""

    def __init__(self, name: str, python: Path, dtype: str) -> None:
        script = Path(__file__).absolute().parent / "peers" / PEER_SCRIPTS[name]
        environment = {
            **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},  # it has packages of its own
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": "0-1",
            "VLLM_NO_USAGE_STATS": "1",
            "OMP_NUM_THREADS": "2",
        }
        self._log = (cache_root() / "peers" / f"{name}-{dtype}.log").open("w")
        command = [str(python), str(script), str(cache_root() / "peers" / "hf"), dtype]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
            start_new_session=True,
            cwd=cache_root() / "peers",  # packages of this repository would be taken for some of theirs
        )
        try:
            self._read("ready", START_SECONDS)
        except BaseException:
            self.close()
            raise

    def generate(self, prompts: list[list[int]], new: int) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "new": new}) + "\n")
        self._process.stdin.flush()
        return self._read("seconds", ANSWER_SECONDS)

    def close(self) -> None:
        self._kill()
        self._process.wait()
        self._log.close()

    def _kill(self) -> None:
        """End it with the processes that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _read(self, field: str, seconds: float) -> Any:
        assert self._process.stdout is not None
        limit = threading.Timer(seconds, self._kill)
        limit.start()
        try:
            for line in self._process.stdout:  # peers log here too
                if line.startswith("{") and field in (answer := json.loads(line)):
                    return answer[field]
        finally:
            limit.cancel()
        raise PeerEnded(f"it ended, or took over {seconds:.0f} s; see {self._log.name}")


class PeerEnded(Exception):
    """A peer that does not run here."""


def main() -> None:
    """Run the benchmark and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=Path("configs/smollm2.gin"))
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds of each case (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    # One dtype at a time: all systems of both would not fit a small machine's memory.
    for dtype, peers in (("bfloat16", ("vllm", "transformers")), ("float32", ("vllm",))):
        with _systems(args.config, dtype, peers) as systems:
            rows += _measure(systems, dtype, args.rounds)
    rows += _llama_cpp(args.rounds)
    _report(rows, as_json=args.json)


@contextlib.contextmanager
def _systems(config: Path, dtype: str, peers: tuple[str, ...]) -> Iterator[dict[str, System]]:
    systems: dict[str, System] = {}
    try:
        systems["pdjax"] = Pdjax(config, dtype)
        for name in peers:
            python = cache_root() / "peers" / name / "bin" / "python"
            if not python.exists():
                print(f"no {name}: bench/peers.sh installs it", file=sys.stderr)
                continue
            try:
                systems[name] = Peer(name, python, dtype)
            except PeerEnded as problem:
                print(f"no {name} in {dtype}: {problem}", file=sys.stderr)
        yield systems
    finally:
        for system in systems.values():
            system.close()


def _measure(systems: dict[str, System], dtype: str, rounds: int) -> list[dict[str, Any]]:
    samples: dict[tuple[str, str], list[float]] = {}
    for number in range(rounds + 1):  # the first round warms up and is thrown away
        for name, system in systems.items():
            values = _round(name, system, number, dtype)
            if number:
                for case, value in values.items():
                    samples.setdefault((name, case), []).append(value)
    return [
        {"system": name, "dtype": dtype, "case": case, "unit": "s" if case.startswith("ttft") else "tokens/s",
         "median": statistics.median(values), "least": min(values), "most": max(values)}
        for (name, case), values in samples.items()
    ]  # fmt: skip


def _round(name: str, system: System, number: int, dtype: str) -> dict[str, float]:
    """One value of each case."""
    first = system.generate(_prompts(8, 128, seed=4 * number), 1)
    both = system.generate(_prompts(8, 128, seed=4 * number + 1), 65)
    values = {"decode_b8": 8 * 64 / (both - first)}
    if name == "transformers":  # no continuous batching: only this is compared
        return values
    values["prefill_512"] = 512 / system.generate(_prompts(1, 512, seed=4 * number + 2), 1)
    if dtype == "bfloat16":
        values["serve32"] = 32 * 64 / system.generate(_prompts(32, 128, seed=4 * number + 3), 64)
    elif name == "pdjax":
        shared = _prompts(1, SHARED_TOKENS, seed=-1 - number)[0]
        ttfts = [system.generate([shared + tail], 1) for tail in _prompts(8, 16, seed=-1 - number)]
        values["ttft_miss"], values["ttft_hit"] = ttfts[0], statistics.median(ttfts[1:])
    return values


def _prompts(rows: int, tokens: int, *, seed: int) -> list[list[int]]:
    """Prompts that share no prefix with any other."""
    size = len(VOCABULARY)
    return [
        [VOCABULARY[(seed * 7919 + rows * 104729 + tokens * 331 + row * 131 + at * at * 7 + at) % size]
         for at in range(tokens)]
        for row in range(rows)
    ]  # fmt: skip


def _llama_cpp(rounds: int) -> list[dict[str, Any]]:
    program, model = cache_root() / "peers/llama.cpp/llama-batched-bench", cache_root() / "peers/smollm2-f32.gguf"
    if not (program.exists() and model.exists()):
        print("no llama.cpp: bench/peers.sh --llama-cpp builds it", file=sys.stderr)
        return []
    command = [str(program), "-m", str(model), "-c", "2048", "-t", "2", "-ctk", "f32", "-ctv", "f32"]
    command += ["-npp", "128", "-ntg", "64", "-npl", "8", "--output-format", "jsonl"]
    speeds = []
    for _ in range(rounds):
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_SECONDS, check=True)
        results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        speeds.append(float(results[-1]["speed_tg"]))
    return [{"system": "llama.cpp", "dtype": "float32", "case": "decode_b8", "unit": "tokens/s",
             "median": statistics.median(speeds), "least": min(speeds), "most": max(speeds)}]  # fmt: skip


def _report(rows: list[dict[str, Any]], *, as_json: bool) -> None:
    by = {(row["system"], row["dtype"], row["case"]): row["median"] for row in rows}

    def over(case: str, peer: str, dtype: str) -> float | None:
        other = by.get((peer, dtype, case))
        return None if other is None else by["pdjax", dtype, case] / other

    ratios = {  # speed over speed; the last is time over time
        "decode_b8_vs_vllm_bf16": over("decode_b8", "vllm", "bfloat16"),
        "serve32_vs_vllm_bf16": over("serve32", "vllm", "bfloat16"),
        "prefill_512_vs_vllm_bf16": over("prefill_512", "vllm", "bfloat16"),
        "decode_b8_vs_vllm_f32": over("decode_b8", "vllm", "float32"),
        "decode_b8_vs_llamacpp_f32": over("decode_b8", "llama.cpp", "float32"),
        "decode_b8_vs_transformers_bf16": over("decode_b8", "transformers", "bfloat16"),
        "prefix_ttft_hit_vs_miss": by["pdjax", "float32", "ttft_hit"] / by["pdjax", "float32", "ttft_miss"],
    }
    if as_json:
        print(json.dumps({"bench": "engine", "rows": rows, "ratios": ratios}))
        return
    print(f"{'case':<14}{'dtype':<10}{'system':<14}{'median':>10}{'least':>10}{'most':>10}  unit")
    for row in sorted(rows, key=lambda row: (row["case"], row["dtype"], row["system"])):
        numbers = "".join(f"{row[field]:>10.3g}" for field in ("median", "least", "most"))
        print(f"{row['case']:<14}{row['dtype']:<10}{row['system']:<14}{numbers}  {row['unit']}")
    for name, ratio in ratios.items():
        print(f"{name}: {'null' if ratio is None else f'{ratio:.3f}'}")


if __name__ == "__main__":
    main()
