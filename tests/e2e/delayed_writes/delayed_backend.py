"""A transfer backend for tests: UCX, whose writes leave late, damaged, or not at all, while a file says so.

While the file says anything, the instance's steps are slow, too, and "slow" does nothing else: what it decodes then has
not come to its end before the test has done what it means to do in the midst of it, however fast the machine is.

It is found by its entry point when this folder is on PYTHONPATH. The file that `PDJAX_TEST_DELAY` names holds seconds;
without it, or with nothing in it, writes leave at once. Messages that test the path are not held. "drop" in it loses
every write and tells nobody; "damage" and the number of a process cuts that one's next write short, and "lose tests"
and its number loses the messages with which that one tests its paths.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from pdjax.engine.engine import Engine
from pdjax.transfer.backend import EventSink, Write, WriteDone
from pdjax.transfer.path_test import PATH_REGION
from pdjax.transfer.registry import create

STEP_SECONDS = 5e-3


class DelayedBackend:
    """Everything but `mapped` and `write` is the UCX backend's."""

    name = "delayed"

    def __init__(self, inner: Any, file: Path, on_event: EventSink) -> None:
        self._inner, self._file, self._on_event = inner, file, on_event

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def mapped(self, *where: Any) -> AbstractContextManager[int | None]:
        """While the file says anything of writes, all bytes go with them."""
        return self._inner.mapped(*where) if said(self._file) in ("", "slow") else nullcontext()

    def write(self, write: Write) -> None:
        order = said(self._file)
        rank = os.environ["PMI_RANK"]
        if order == "drop" or (write.region == PATH_REGION and order == f"lose tests {rank}"):
            self._on_event(WriteDone(write.id))
            return
        if write.region != PATH_REGION and order == f"damage {rank}":
            self._file.write_text("")
            print(f"a write of {write.nbytes} bytes is cut short", flush=True)
            self._inner.write(dataclasses.replace(write, nbytes=write.nbytes // 2))
            return
        seconds = 0.0 if order.startswith(("damage", "lose tests", "slow")) else float(order or 0)
        if not seconds or write.region == PATH_REGION:
            self._inner.write(write)
            return
        print(f"a write of {write.nbytes} bytes is held for {seconds:g} s", flush=True)
        timer = threading.Timer(seconds, self._inner.write, (write,))
        timer.daemon = True
        timer.start()


def said(file: Path) -> str:
    return file.read_text() if file.exists() else ""


def slow_steps(file: Path) -> None:
    step = Engine.step

    @functools.wraps(step)
    def slow(engine: Engine) -> bool:
        began = time.monotonic()
        stepped = step(engine)
        if stepped and said(file):
            time.sleep(max(0.0, began + STEP_SECONDS - time.monotonic()))
        return stepped

    Engine.step = slow  # pyright: ignore[reportAttributeAccessIssue]


def create_delayed(on_event: EventSink, *options: Any, **more: Any) -> DelayedBackend:
    inner = create("ucx", on_event, *options, **more)
    file = Path(os.environ["PDJAX_TEST_DELAY"])
    slow_steps(file)
    return DelayedBackend(inner, file, on_event)
