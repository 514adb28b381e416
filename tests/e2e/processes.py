"""Real instances and routers as processes, for tests: started, watched, killed."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

CONFIG = Path(__file__).parent / "small.gin"
_ports = itertools.count(random.SystemRandom().randrange(12_000))
START_SECONDS = 600.0  # the first start on a machine compiles every step


def free_port() -> int:
    """One that was not given before, below those that connections take for their own ends: it must stay free until the
    instance listens."""
    while True:
        port = 20_000 + next(_ports) % 12_000
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


class Part:
    """One ``python -m pdjax.launch ...`` with its HTTP port and its log. `before` is what puts a command on `host`."""

    def __init__(
        self,
        folder: Path,
        name: str,
        arguments: list[str],
        port: int,
        env: dict[str, str] | None = None,
        host: str = "127.0.0.1",
        before: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.host = host
        self.port = port
        self.arguments = arguments
        self.url = f"http://{host}:{port}"
        self.log = folder / f"{name}-{port}-{time.monotonic_ns()}.log"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [*before, sys.executable, "-m", "pdjax.launch", *arguments],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                env=dict(os.environ) | (env or {}),
            )  # fmt: skip

    def wait_ready(self, seconds: float = START_SECONDS) -> Part:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise AssertionError(f"{self.name} ended with {self._process.returncode}:\n{self.tail()}")
            if self.healthy():
                return self
            time.sleep(0.1)
        raise AssertionError(f"{self.name} was not ready within {seconds} s:\n{self.tail()}")

    def healthy(self) -> bool:
        with contextlib.suppress(OSError):
            return get(f"{self.url}/health", timeout=10)[0] == 200
        return False

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]

    def processes(self) -> list[psutil.Process]:
        """The part's processes: itself and all below it."""
        try:
            root = psutil.Process(self._process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def leader(self) -> psutil.Process:
        """The MPI rank of an instance: the one that holds the model."""
        return max(self.processes(), key=lambda process: process.memory_info().rss)

    def kill(self) -> None:
        """SIGKILL to every process of the part at once."""
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait(10)

    def terminate(self, seconds: float = 20.0) -> int:
        """SIGTERM to the part's group, as a terminal's Ctrl-C or a scheduler would; returns the exit code."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        try:
            return self._process.wait(seconds)
        finally:
            self.kill()

    def metrics(self) -> dict[str, float]:
        """``/metrics`` without labels."""
        status, body = get(f"{self.url}/metrics")
        assert status == 200, body
        lines = [line for line in body.decode().splitlines() if line and not line.startswith("#") and "{" not in line]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


@dataclass(frozen=True)
class Deployment:
    """One prefill and one decode instance behind a router."""

    prefill: Part
    decode: Part
    router: Part

    @property
    def parts(self) -> list[Part]:
        return [self.prefill, self.decode, self.router]


def instance(
    folder: Path,
    role: str,
    *,
    config: Path = CONFIG,
    env: dict[str, str] | None = None,
    host: str = "127.0.0.1",
    before: Sequence[str] = (),
    **options: Any,
) -> Part:
    """Start an instance; options are gin bindings with ``__`` for the dot."""
    port = options.pop("Server__port", None) or free_port()
    bindings = {f"--gin.{name.replace('__', '.')}={value}" for name, value in options.items()}
    bindings |= {f"--gin.Server.port={port}", f"--gin.Server.host={host}"}
    return Part(folder, role, [role, "--config", str(config), *sorted(bindings)], port, env, host, before)


def wait_all_ready(parts: Sequence[Part], seconds: float) -> None:
    """Until all are ready. If one fails, all are ended."""
    try:
        for part in parts:
            part.wait_ready(seconds)
    except BaseException:
        for part in parts:
            part.kill()
        raise


def router(folder: Path, prefill: list[Part], decode: list[Part], *options: str) -> Part:
    port = free_port()
    arguments = ["router", "--port", str(port), *options]
    arguments += ["--prefill", *(part.url for part in prefill), "--decode", *(part.url for part in decode)]
    return Part(folder, "router", arguments, port)


def get(url: str, timeout: float = 30.0) -> tuple[int, bytes]:
    return _open(urllib.request.Request(url), timeout)


def post(url: str, body: Any, timeout: float = 120.0) -> tuple[int, Any]:
    """POST JSON (bytes are sent as they are); returns status and parsed body."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    status, answer = _open(request, timeout)
    return status, json.loads(answer)


def stream(url: str, body: Any, timeout: float = 120.0):
    """POST JSON and yield the parsed SSE events as they come, without the closing [DONE]."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as response:
        for line in response:
            if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                yield json.loads(line.removeprefix(b"data: "))


def _open(request: urllib.request.Request, timeout: float) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
