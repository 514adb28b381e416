"""The leader's end of the Unix socket to its frontend process, and that process itself.

The frontend tokenises, detokenises and speaks HTTP in a process of its own, so that 64 streams of JSON do not hold the
interpreter lock that the device thread needs.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from pdjax.wire import FrameReader, Ready, ToFrontend, ToLeader, WireError, decode_to_leader, encode

CONNECT_SECONDS = 60.0  # a frontend imports its libraries and loads a tokenizer before it connects
SEND_SECONDS = 30.0  # a frontend that takes nothing for this long is stuck


class FrontendError(Exception):
    """The frontend process is gone; in words."""


class Frontend:
    """Starts the frontend process and carries frames to and from it.

    Args:
        arguments: command line of ``python -m pdjax.server`` but for ``--socket``.
        on_message: called on the reading thread with each message.
        on_end: called once, on the reading thread, with a sentence, when the frontend is gone.
    """

    def __init__(
        self, arguments: list[str], *, on_message: Callable[[ToLeader], None], on_end: Callable[[str], None]
    ) -> None:
        self._on_message = on_message
        self._on_end = on_end
        self._folder = tempfile.TemporaryDirectory(prefix="pdjax-")  # mode 0700: only this user may connect
        path = Path(self._folder.name) / "leader.sock"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(1)
        self._listener.settimeout(CONNECT_SECONDS)
        self._socket: socket.socket | None = None
        self._sending = threading.Lock()
        self._stopping = False
        self._ended: str | None = None
        self._connected = threading.Event()
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("PMI", "HYDI", "MPI"))}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pdjax.server", "--socket", str(path), *arguments],
            stdin=subprocess.DEVNULL,
            env=environment,
        )
        threading.Thread(target=self._read, name="frontend", daemon=True).start()

    def check(self) -> None:
        """Raise `FrontendError` if the frontend has ended: before the instance is ready nobody reads messages."""
        if self._ended is not None:
            raise FrontendError(self._ended)

    def ready(self, info: dict, timeout: float = CONNECT_SECONDS) -> None:
        """Tell the frontend that the instance serves; waits until it has connected.

        Raises:
            TimeoutError: it has not.
        """
        if not self._connected.wait(timeout):
            raise TimeoutError(f"the frontend process did not connect within {timeout:g} s")
        self.send(Ready(info))

    def send(self, *messages: ToFrontend) -> None:
        """Send messages. What can no longer be delivered is dropped: the frontend is gone, `on_end` says so."""
        if self._socket is None or not messages:
            return
        with self._sending, contextlib.suppress(OSError):
            self._socket.sendall(b"".join(map(encode, messages)))

    def stop(self, timeout: float = 5.0) -> None:
        """End the frontend process: by asking, then by force."""
        self._stopping = True
        self._process.terminate()
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._listener.close()
        if self._socket is not None:
            self._socket.close()
        self._folder.cleanup()

    def _read(self) -> None:
        end = "the frontend process has ended"
        try:
            self._socket, _ = self._listener.accept()
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(SEND_SECONDS))
            self._connected.set()
            frames = FrameReader()
            while data := self._socket.recv(1 << 16):
                for body in frames.feed(data):
                    self._on_message(decode_to_leader(body))
        except (OSError, WireError) as error:
            end = f"the connection to the frontend process failed: {error}"
        if not self._stopping:
            self._ended = end
            self._on_end(end)


def _timeval(seconds: float) -> bytes:
    return struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
