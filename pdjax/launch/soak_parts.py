"""The processes of a soak: instances that are killed, stopped and started again, a router, and an oracle beside."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from pdjax.launch.ports import free_ports
from pdjax.launch.supervise import Child, end_all

START_SECONDS = 900.0  # the first start compiles every step
REST_SECONDS = 60.0  # until everything is home again after the last request
_POLL_SECONDS = 0.25
# What no log may say: a failure inside the program, or a request that waits for a compiler.
_CRASHES = ("Traceback (most recent call last)", "Fatal Python error", "AssertionError", "compiled after warm-up")
HOME = ("staging_slots_free", "free_pages")
BUSY = ("live_requests", "rooms")


class Instance:
    """One instance over its lives. Start it on a thread that outlives it."""

    def __init__(self, name: str, role: str, options: list[str], on_line: Any) -> None:
        self.name, self.role = name, role
        self.lives = 0
        self._options, self._on_line = options, on_line
        self.port, self._bootstrap = free_ports(2)
        self._child: Child
        self.start()

    @property
    def url(self) -> str:
        """Of its HTTP surface, the same in each life."""
        return f"http://127.0.0.1:{self.port}"

    def start(self, *, move: bool = False) -> None:
        """Start a life; `move`: with another bootstrap port."""
        if move:
            (self._bootstrap,) = free_ports(1)
        self.lives += 1
        ports = [f"--gin.Server.port={self.port}", f"--gin.Disagg.bootstrap_port={self._bootstrap}"]
        command = [sys.executable, "-m", "pdjax.launch", self.role, *self._options, *ports]
        self._child = Child(self.name, command, self._on_line)

    def kill(self, *, leader_only: bool) -> None:
        """SIGKILL, and wait until nothing of it is left."""
        if leader_only:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.leader(), signal.SIGKILL)
            self._child.wait(10.0)
        below = descendants(self._child.pid)
        self._child.end(signal.SIGKILL)
        for pid in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._child.wait(10.0)

    def leader(self) -> int:
        """The process that holds the model: the largest. Raises `ProcessLookupError`."""
        below = descendants(self._child.pid)
        if not below:
            raise ProcessLookupError(f"{self.name} has no processes")
        return max(below, key=_resident_pages)

    def wait_ready(self) -> None:
        """Raises `RuntimeError`: it has ended, or takes too long."""
        deadline = time.monotonic() + START_SECONDS
        while get(self.port, "/health")[0] != 200:
            if self._child.exit_code is not None or time.monotonic() > deadline:
                lines = "\n".join(f"    {line}" for line in self._child.last_lines)
                raise RuntimeError(f"{self.name} did not start; its last lines were:\n{lines}")
            time.sleep(_POLL_SECONDS)

    def metrics(self) -> dict[str, float]:
        """The scheduler's values by name, without the prefix; empty if it does not answer."""
        return metrics_of(self.port)

    def end(self) -> None:
        """End it, asked first."""
        end_all([self._child])


def metrics_of(port: int) -> dict[str, float]:
    """Metrics without labels by name, without the prefix; empty if nobody answers there."""
    status, body = get(port, "/metrics")
    if status != 200:
        return {}
    lines = [line for line in body.decode().splitlines() if line.startswith("pdjax_") and "{" not in line]
    return {name.removeprefix("pdjax_"): float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


class Parts:
    """`prefill` x `decode` instances and a router, and a unified instance that nobody breaks.

    Attributes:
        crashes: lines of any log that speak of a failure inside the program.
    """

    def __init__(self, options: list[str], *, prefill: int, decode: int) -> None:
        self.crashes: list[str] = []
        self.instances: list[Instance] = []
        self._children: list[Child] = []
        self._oracle: Instance | None = None
        self._options, self._counts = options, {"prefill": prefill, "decode": decode}
        self._home: dict[str, dict[str, float]] = {}
        (self.port,) = free_ports(1)

    @property
    def oracle(self) -> Instance:
        """The unified instance."""
        assert self._oracle is not None, "start comes first"
        return self._oracle

    def start(self) -> None:
        """Start everything and wait for it. Raises `RuntimeError`."""
        for role, count in self._counts.items():
            self.instances += [Instance(f"{role} {i}", role, self._options, self._watch) for i in range(count)]
        self._oracle = Instance("unified", "unified", self._options, self._watch)
        for instance in [*self.instances, self._oracle]:
            instance.wait_ready()
        for instance in self.instances:
            self._home[instance.name] = _only(instance.metrics(), HOME)
        urls = {role: [i.url for i in self.instances if i.role == role] for role in self._counts}
        command = [sys.executable, "-m", "pdjax.launch", "router", "--port", str(self.port)]
        for role, each in urls.items():
            command += [f"--{role}", *each]
        self._children.append(Child("router", command, self._watch))
        deadline = time.monotonic() + START_SECONDS
        while get(self.port, "/health")[0] != 200:
            if time.monotonic() > deadline:
                raise RuntimeError("the router did not find its instances")
            time.sleep(_POLL_SECONDS)

    def leaks(self) -> list[str]:
        """What is not home once no request is live, an instance and a name each; empty when all is well."""
        found: list[str] = []
        for instance in [*self.instances, self.oracle]:
            home = self._home.get(instance.name) or {"free_pages": instance.metrics().get("pages", -1.0)}
            deadline = time.monotonic() + REST_SECONDS
            while True:
                metrics = instance.metrics()
                wrong = {name: metrics.get(name) for name, value in home.items() if metrics.get(name) != value}
                wrong |= {name: metrics[name] for name in BUSY if metrics.get(name)}
                if not wrong or time.monotonic() > deadline:
                    break
                time.sleep(_POLL_SECONDS)
            found += [
                f"{instance.name}: {name} is {value}, {home.get(name, 0)} at rest" for name, value in wrong.items()
            ]
        return found

    def end(self) -> None:
        """End everything."""
        end_all(self._children)
        for instance in [*self.instances, *([self._oracle] if self._oracle is not None else [])]:
            instance.end()

    def _watch(self, name: str, line: str) -> None:
        if any(word in line for word in _CRASHES):
            self.crashes.append(f"{name}: {line}")


def get(port: int, path: str, timeout: float = 10.0) -> tuple[int, bytes]:
    """GET from this machine; status 0 if nobody answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, http.client.HTTPException):
        return 0, b""
    finally:
        connection.close()


def post(port: int, path: str, body: dict[str, Any], timeout: float) -> tuple[int, Any]:
    """POST JSON; status 0 if the connection fails, with the reason."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    except (OSError, http.client.HTTPException, ValueError) as error:
        return 0, {"error": {"message": repr(error)}}
    finally:
        connection.close()


def descendants(pid: int) -> list[int]:
    """All processes below one, as the kernel knows them now."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = entry.read_text().rpartition(")")[2].split()
            parents[int(entry.parent.name)] = int(fields[1])
    found, last = [], [pid]
    while last:
        last = [child for child, parent in parents.items() if parent in last]
        found += last
    return found


def _resident_pages(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def _only(values: dict[str, float], names: tuple[str, ...]) -> dict[str, float]:
    return {name: values[name] for name in names if name in values}
