"""A lock between processes of one host, held as long as a file is open: a killed holder leaves none behind."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_POLL_SECONDS = 0.1


class LockTimeout(Exception):
    """The lock was not to be had in time; the sentence says what was waited for."""


@contextmanager
def file_lock(file: Path, *, seconds: float, what: str) -> Iterator[None]:
    """Hold the lock of `file`, which is made if need be and stays. Waits at most `seconds` for `what`.

    Raises:
        LockTimeout: it is still held then.
    """
    with file.open("a") as handle:
        deadline = time.monotonic() + seconds
        while not _try_lock(handle.fileno()):
            if time.monotonic() >= deadline:
                raise LockTimeout(f"waited {seconds:.0f} s for {what} (lock file {file}); is it stuck?")
            time.sleep(_POLL_SECONDS)
        yield


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
