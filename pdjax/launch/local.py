"""``local``: one prefill instance, one decode instance and a router on this machine, for a prompt or until stopped."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from pdjax import config as configuration
from pdjax.launch.instance import model_folder
from pdjax.launch.ports import free_ports
from pdjax.launch.supervise import Child, end_all

START_SECONDS = 900.0  # the first start compiles every step
ANSWER_SECONDS = 300.0  # the longest pause between two pieces of an answer


class PartEnded(Exception):
    """One of the parts has ended by itself."""

    def __init__(self, child: Child) -> None:
        tail = "\n".join(f"    {line}" for line in child.last_lines)
        super().__init__(f"{child.name} ended with code {child.exit_code}; its last lines were:\n{tail}")


class Stopped(Exception):
    """The user has asked for the end."""


def main(args: argparse.Namespace, overrides: list[str]) -> int:
    """Run all parts; returns the exit code."""
    model = model_folder(configuration.load(args.config, overrides).model.folder)
    parts = _Parts(args.config, overrides, model, args.port)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    try:
        parts.start()
        parts.wait_until_ready()
        if args.prompt is None:
            print(f"serving on {parts.url}: stop with Ctrl-C", flush=True)
            parts.watch()
        else:
            _answer(parts, args.prompt, args.max_tokens)
            _how_to_keep(args, parts.url)
        return 0
    except Stopped:
        return 0 if args.prompt is None else 130
    except (PartEnded, TimeoutError, RuntimeError) as error:
        print(f"\npdjax local: {error}", file=sys.stderr, flush=True)
        return 1
    finally:
        parts.end()


class _Parts:
    """The three processes, and what they say while they start."""

    def __init__(self, files: list[Path], overrides: list[str], model: Path, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.port = port
        self._children: list[Child] = []
        self._progress: dict[str, str] = {}
        self._ready = False
        self._printing = threading.Lock()
        self._files = [argument for file in files for argument in ("--config", str(file))]
        self._overrides = [f"--gin.{override}" for override in overrides] + [f"--gin.Model.folder={model}"]

    def start(self) -> None:
        """Start all parts."""
        prefill, decode, bootstrap = free_ports(3)
        ports = {
            "prefill": [f"--gin.Server.port={prefill}", f"--gin.Disagg.bootstrap_port={bootstrap}"],
            "decode": [f"--gin.Server.port={decode}"],
        }
        for role, options in ports.items():
            self._start(role, [role, *self._files, *self._overrides, *options])
        urls = ["--prefill", f"http://127.0.0.1:{prefill}", "--decode", f"http://127.0.0.1:{decode}"]
        self._start("router", ["router", *urls, "--port", str(self.port)])

    def wait_until_ready(self) -> None:
        """Wait for the router to have both instances.

        Raises:
            PartEnded, TimeoutError.
        """
        deadline = time.monotonic() + START_SECONDS
        while not self._healthy():
            self.check()
            if time.monotonic() > deadline:
                raise TimeoutError(f"the instances were not ready within {START_SECONDS:g} s")
            time.sleep(0.1)
        self._ready = True
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def check(self) -> None:
        """Raise `PartEnded` if a part has ended."""
        for child in self._children:
            if child.exit_code is not None:
                child.wait(0)
                raise PartEnded(child)

    def watch(self) -> None:
        """Block until a part ends or the user stops us."""
        while True:
            self.check()
            time.sleep(0.2)

    def end(self) -> None:
        """End every part."""
        end_all(self._children)

    def _start(self, name: str, arguments: list[str]) -> None:
        self._children.append(Child(name, [sys.executable, "-m", "pdjax.launch", *arguments], self._line))

    def _line(self, name: str, line: str) -> None:
        """Show what matters while starting: one redrawn line on a terminal, else a line each tenth."""
        found = re.search(r"compiling: +(\d+)%.*?(\d+/\d+)", line)
        with self._printing:
            if found is None:
                if self._ready or "rror" in line or line.startswith(f"pdjax {name}"):
                    print(f"{_clear()}{line}", file=sys.stderr, flush=True)
            elif sys.stderr.isatty():
                self._progress[name] = found[2]
                text = ", ".join(f"{part} {count}" for part, count in self._progress.items())
                print(
                    f"{_clear()}compiling steps (kept for the next start): {text}", end="", file=sys.stderr, flush=True
                )

    def _healthy(self) -> bool:
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=2)
            try:
                connection.request("GET", "/health")
                return connection.getresponse().status == 200
            finally:
                connection.close()
        return False


def _clear() -> str:
    return "\r\033[K" if sys.stderr.isatty() else ""


def _stop(*_: object) -> None:
    raise Stopped


def _answer(parts: _Parts, prompt: str, max_tokens: int) -> None:
    """Send the prompt to the router, print the answer as it comes, then the room's timeline."""
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = http.client.HTTPConnection("127.0.0.1", parts.port, timeout=ANSWER_SECONDS)
    started = time.monotonic()
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(f"the router answered {response.status}: {response.read().decode(errors='replace')}")
    print(f"\n> {prompt}\n", flush=True)
    first, last = None, {}
    while (line := response.readline()) and not line.startswith(b"data: [DONE]"):
        if not line.startswith(b"data: "):
            continue
        event = json.loads(line.removeprefix(b"data: "))
        if "error" in event:
            parts.check()
            raise RuntimeError(event["error"]["message"])
        last = event if "meta_info" in event else last
        for choice in event.get("choices", []):
            text = choice["delta"].get("content")
            if text:
                first = first or time.monotonic()
                print(text, end="", flush=True)
    print("\n", flush=True)
    print(_timeline(last.get("meta_info", {}).get("timeline", {}), last.get("usage"), started, first), flush=True)


def _timeline(timeline: dict[str, float], usage: dict[str, Any] | None, started: float, first: float | None) -> str:
    """The life of the room, a line a phase."""
    if not timeline or usage is None:
        return "(the decode instance sent no timeline)"
    tokens = usage["completion_tokens"]
    generating = timeline["total_s"] - timeline["first_token_s"]
    moved, seconds = timeline["transfer_bytes"], timeline["transfer_s"]
    rows = [
        ("queue", f"{_ms(timeline['queue_s'])} decode, {_ms(timeline['prefill_queue_s'])} prefill"),
        ("handshake", _ms(timeline["handshake_s"])),
        ("prefill", f"{_ms(timeline['prefill_s'])} for {usage['prompt_tokens']} tokens"),
        ("transfer", f"{_ms(seconds)} for {moved / 1e6:.1f} MB, {moved / max(seconds, 1e-9) / 1e9:.2f} GB/s"),
        ("first token", f"{_ms(timeline['first_token_s'])} after the request reached the decode instance"),
        ("per token", f"{_ms(generating / max(1, tokens - 1))}, {tokens} tokens"),
    ]
    if first is not None:
        rows.append(("first text", f"{_ms(first - started)} after it was sent to the router"))
    return "\n".join(f"  {name:<12} {text}" for name, text in rows)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _how_to_keep(args: argparse.Namespace, url: str) -> None:
    files = " ".join(f"--config {file}" for file in args.config)
    print(f"\nTo keep the servers running: python -m pdjax.launch local {files} --port {args.port}")
    print(f"then call {url}/v1/chat/completions with any OpenAI client.", flush=True)
