"""Does prefill and decode apart cost anything on one machine? TTFT and tokens a second, unified against 1P1D.

Starts a unified instance and a 1P1D deployment, and asks both the same in turns. On one machine both share the same
cores, so 1P1D can win nothing here: the ratios say what the handshake, the transfer and the second process cost.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import statistics
import sys
import time
import urllib.request
from pathlib import Path

from pdjax.launch.ports import free_ports
from pdjax.launch.supervise import Child, end_all

START_SECONDS = 900.0
PROMPT_TOKENS, NEW_TOKENS = 128, 32


def main() -> None:
    """Run the benchmark and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=Path("configs/smollm2.gin"))
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds of each case (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    args = parser.parse_args()
    children, urls = _start(args.config)
    try:
        rows = _measure(urls, args.rounds)
    finally:
        end_all(children)
    report(rows, as_json=args.json)


def report(rows: list[dict], *, as_json: bool) -> None:
    """Print a table, or one JSON object."""
    by = {(row["system"], row["concurrent"]): row for row in rows}
    ratios = {
        # Both are speed over speed, at 8 concurrent requests.
        "ttft_1p1d_vs_unified": by["unified", 8]["ttft_ms"] / by["1p1d", 8]["ttft_ms"],
        "throughput_1p1d_vs_unified": by["1p1d", 8]["tokens_per_s"] / by["unified", 8]["tokens_per_s"],
        "ttft_1p1d_vs_unified_alone": by["unified", 1]["ttft_ms"] / by["1p1d", 1]["ttft_ms"],
        "throughput_1p1d_vs_unified_alone": by["1p1d", 1]["tokens_per_s"] / by["unified", 1]["tokens_per_s"],
    }
    if as_json:
        print(json.dumps({"bench": "quick", "rows": rows, "ratios": ratios}))
        return
    print(f"{PROMPT_TOKENS} prompt tokens, {NEW_TOKENS} new ones; medians, [quartiles]")
    print(f"{'system':<10}{'concurrent':>11}{'TTFT ms':>24}{'tokens/s':>24}")
    for row in rows:
        ttft = f"{row['ttft_ms']:.1f} [{row['ttft_quartiles_ms'][0]:.0f}, {row['ttft_quartiles_ms'][1]:.0f}]"
        rate = f"{row['tokens_per_s']:.1f} [{row['rate_quartiles'][0]:.0f}, {row['rate_quartiles'][1]:.0f}]"
        print(f"{row['system']:<10}{row['concurrent']:>11}{ttft:>24}{rate:>24}")
    for name, ratio in ratios.items():
        print(f"{name}: {ratio:.3f}")


def _start(config: Path) -> tuple[list[Child], dict[str, str]]:
    prefill, decode, router, unified, bootstrap = free_ports(5)
    files = ["--config", str(config)]
    bootstrap_option = f"--gin.Disagg.bootstrap_port={bootstrap}"
    commands = {
        "prefill": ["prefill", *files, f"--gin.Server.port={prefill}", bootstrap_option],
        "decode": ["decode", *files, f"--gin.Server.port={decode}"],
        "unified": ["unified", *files, f"--gin.Server.port={unified}"],
        "router": ["router", "--port", str(router), "--prefill", f"http://127.0.0.1:{prefill}", "--decode",
                   f"http://127.0.0.1:{decode}"],
    }  # fmt: skip
    children = [
        Child(name, [sys.executable, "-m", "pdjax.launch", *arguments], lambda *_: None)
        for name, arguments in commands.items()
    ]
    urls = {"unified": f"http://127.0.0.1:{unified}", "1p1d": f"http://127.0.0.1:{router}"}
    deadline = time.monotonic() + START_SECONDS
    try:
        for url in urls.values():
            while not _healthy(url):
                ended = [child for child in children if child.exit_code is not None]
                if ended or time.monotonic() > deadline:
                    lines = "\n".join(line for child in ended for line in child.last_lines)
                    raise SystemExit(f"the instances did not start:\n{lines}")
                time.sleep(0.2)
    except BaseException:
        end_all(children)
        raise
    return children, urls


def _measure(urls: dict[str, str], rounds: int) -> list[dict]:
    samples: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for number in range(rounds + 1):  # the first round warms caches and is thrown away
        for concurrent_requests in (1, 8):
            for system, url in urls.items():
                ttfts, rate = _round(url, concurrent_requests, seed=number)
                if number:
                    samples.setdefault((system, concurrent_requests), []).append((statistics.median(ttfts), rate))
    rows = []
    for (system, concurrent_requests), values in sorted(samples.items(), key=lambda item: (item[0][1], item[0][0])):
        ttfts, rates = [ttft * 1e3 for ttft, _ in values], [rate for _, rate in values]
        rows.append(
            {
                "system": system,
                "concurrent": concurrent_requests,
                "ttft_ms": statistics.median(ttfts),
                "ttft_quartiles_ms": _quartiles(ttfts),
                "tokens_per_s": statistics.median(rates),
                "rate_quartiles": _quartiles(rates),
            }
        )
    return rows


def _quartiles(values: list[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4)
    return low, high


def _round(url: str, concurrent_requests: int, *, seed: int) -> tuple[list[float], float]:
    """TTFT of each request in seconds, and output tokens a second of all together."""
    prompts = [
        [1000 + (seed * 977 + request * 131 + token * 7) % 40000 for token in range(PROMPT_TOKENS)]
        for request in range(concurrent_requests)
    ]
    started = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(concurrent_requests) as clients:
        ttfts = list(clients.map(lambda prompt: _ask(url, prompt), prompts))
    return ttfts, concurrent_requests * NEW_TOKENS / (time.monotonic() - started)


def _ask(url: str, input_ids: list[int]) -> float:
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    body = json.dumps({"input_ids": input_ids, "sampling_params": sampling, "stream": True}).encode()
    request = urllib.request.Request(f"{url}/generate", body, {"Content-Type": "application/json"})
    started, first = time.monotonic(), None
    with urllib.request.urlopen(request, timeout=300) as response:
        for line in response:
            if first is None and line.startswith(b"data: "):
                first = time.monotonic() - started
    assert first is not None, "a stream without an event"
    return first


def _healthy(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5) as response:
        return response.status == 200
    return False


if __name__ == "__main__":
    main()
