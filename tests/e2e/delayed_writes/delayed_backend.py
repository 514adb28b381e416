"""A transfer backend for tests: UCX, whose writes leave late while a file says so.

It is found by its entry point when this folder is on PYTHONPATH. The file that `PDJAX_TEST_DELAY` names holds seconds;
without it, or with nothing in it, writes leave at once.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

from pdjax.transfer.backend import EventSink, Write
from pdjax.transfer.registry import create


class DelayedBackend:
    """Everything but `write` is the UCX backend's."""

    name = "delayed"

    def __init__(self, inner: Any, file: Path) -> None:
        self._inner, self._file = inner, file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def write(self, write: Write) -> None:
        try:
            seconds = float(self._file.read_text() or 0)
        except FileNotFoundError:
            seconds = 0.0
        if not seconds:
            self._inner.write(write)
            return
        print(f"a write of {write.nbytes} bytes is held for {seconds:g} s", flush=True)
        timer = threading.Timer(seconds, self._inner.write, (write,))
        timer.daemon = True
        timer.start()


def create_delayed(on_event: EventSink, *options: Any, **more: Any) -> DelayedBackend:
    return DelayedBackend(create("ucx", on_event, *options, **more), Path(os.environ["PDJAX_TEST_DELAY"]))
