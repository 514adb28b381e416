"""Child processes of a launcher: each in a process group of its own, ended together, their last lines remembered."""

from __future__ import annotations

import collections
import ctypes
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable

from pdjax.launch.mpiexec import alone_here

PR_SET_PDEATHSIG = 1


class Child:
    """A running part. Its output is read line by line; a progress bar's redraws count as lines.

    Args:
        on_line: called on a reading thread with (name, line).
    """

    def __init__(self, name: str, command: list[str], on_line: Callable[[str, str], None]) -> None:
        self.name = name
        self.last_lines: collections.deque[str] = collections.deque(maxlen=12)
        self._on_line = on_line
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=alone_here(dict(os.environ)),
            preexec_fn=_die_with_parent,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Of the process itself."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def end(self, number: int) -> None:
        """Send a signal to the whole group."""
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return

    def wait(self, timeout: float) -> bool:
        """Whether it has ended within `timeout` seconds."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        self._reader.join(1.0)
        return True

    def _read(self) -> None:
        stream = self._process.stdout
        assert stream is not None, "output is piped"
        pending = b""
        while data := os.read(stream.fileno(), 1 << 14):
            *lines, pending = re.split(rb"[\r\n]+", pending + data)
            for line in lines:
                text = line.decode(errors="replace").rstrip()
                if text:
                    self.last_lines.append(text)
                    self._on_line(self.name, text)


def end_all(children: list[Child], grace: float = 10.0) -> None:
    """Ask all to end, wait, then make them."""
    for child in children:
        child.end(signal.SIGTERM)
    deadline = time.monotonic() + grace
    for child in children:
        if not child.wait(max(0.0, deadline - time.monotonic())):
            child.end(signal.SIGKILL)
            child.wait(5.0)
        # What a part has started itself and left behind goes too.
        child.end(signal.SIGKILL)


def _die_with_parent() -> None:
    """The child is told to end when its launcher dies, even by SIGKILL."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
