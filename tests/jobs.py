"""Real processes for tests: each is an mpiexec job of one rank that takes JSON lines and prints JSON lines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pdjax.launch.mpiexec import find_mpiexec
from pdjax.net.mpi import environment

REPOSITORY = Path(__file__).parents[1]
PATIENCE = 30.0  # seconds; generous, for a machine that is busy with other things


class Job:
    """A process under mpiexec. What it prints is kept, in order, and can be waited for."""

    def __init__(self, script: Path, *arguments: str, started: Callable[[Job], None]) -> None:
        whole = environment(dict(os.environ)) | {"PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            [find_mpiexec(), "-n", "1", sys.executable, str(script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=whole,
            text=True,
            start_new_session=True,
        )
        started(self)  # from here on, whoever ends it knows of it
        self._lines: list[dict[str, Any]] = []
        self._noise: list[str] = []
        self._seen = 0
        self._changed = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()
        self.pid: int = self.wait(lambda line: "pid" in line)["pid"]

    def _read(self) -> None:
        assert self._process.stdout is not None
        for text in self._process.stdout:
            with self._changed:
                if text.startswith("{"):
                    self._lines.append(json.loads(text))
                else:
                    self._noise.append(text)
                self._changed.notify_all()

    def do(self, op: str, **arguments: Any) -> None:
        """Send a command."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"op": op} | arguments) + "\n")
        self._process.stdin.flush()

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        """Send a command and wait for its answer: the next line with an ``answer`` key."""
        self.do(op, **arguments)
        return self.wait(lambda line: line.get("answer") == op)

    def event(self, kind: str, timeout: float = PATIENCE, **fields: Any) -> dict[str, Any]:
        """Wait for an event that was not waited for yet. Those before it stay to be waited for."""
        wanted = {"event": kind} | fields
        return self.wait(lambda line: wanted.items() <= line.items(), timeout)

    def wait(self, matches: Callable[[dict[str, Any]], bool], timeout: float = PATIENCE) -> dict[str, Any]:
        """Wait for a line and take it out."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while True:
                for line in self._lines:
                    if matches(line):
                        self._lines.remove(line)
                        return line
                left = deadline - time.monotonic()
                if left <= 0:
                    raise AssertionError(f"nothing came within {timeout} s; there is {self._lines} {self._noise[-40:]}")
                self._changed.wait(left)

    def has(self, kind: str) -> bool:
        """Whether such an event has come and was not waited for."""
        with self._changed:
            return any(line.get("event") == kind for line in self._lines)

    def noise(self) -> str:
        """What libraries have printed so far."""
        with self._changed:
            return "".join(self._noise)

    def kill(self) -> None:
        """kill -9 the rank itself, as the kernel would when memory is short."""
        os.kill(self.pid, signal.SIGKILL)

    def exit_code(self) -> int:
        """Wait for the job to end by itself."""
        code = self._process.wait(PATIENCE)
        if code:
            print(f"ended with {code}:\n{self.noise()}")  # for whoever reads why a test has failed
        return code

    def end(self) -> None:
        """Make sure that nothing of the job is left."""
        for pid in (self.pid if hasattr(self, "pid") else None, -self._process.pid):
            if pid is not None:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        self._process.wait(PATIENCE)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                try:
                    stream.close()
                except BrokenPipeError:
                    continue
