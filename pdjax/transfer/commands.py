"""How a backend's thread is told what to do: commands queue up, and a file descriptor wakes it."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TypeVar

from pdjax.transfer.backend import TransferError

SET_UP_BOUND = 60.0  # seconds; touching many gigabytes of new memory takes a while

T = TypeVar("T")


class Commands:
    """`post` and `call` are anybody's, `run` and `rest` the thread's, which sleeps on `wake_fd`.

    Attributes:
        owner: the thread's name, in words for errors.
        dead: why the thread does not run any more; commands then run at once, find it and say so.
    """

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.dead: str | None = None
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._queue: deque[Callable[[], None]] = deque()

    def post(self, command: Callable[[], None]) -> None:
        """Have the thread run a command."""
        self._queue.append(command)
        os.eventfd_write(self.wake_fd, 1)
        if self.dead is not None:
            self.run()

    def call(self, work: Callable[[], T]) -> T:
        """Have the thread do some work, and wait for it. Raises what it raises, or `TransferError`."""
        future: Future[T] = Future()

        def command() -> None:
            try:
                if self.dead is not None:
                    raise TransferError(self.dead)
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 - it is raised to the caller
                future.set_exception(error)

        self.post(command)
        try:
            return future.result(SET_UP_BOUND)
        except FutureTimeout as error:
            raise TransferError(f"the {self.owner} thread has not answered for {SET_UP_BOUND:.0f} s") from error

    def run(self) -> bool:
        """Run what has queued up. Returns whether there was anything."""
        ran = False
        while True:
            try:
                command = self._queue.popleft()
            except IndexError:
                return ran
            command()
            ran = True

    def rest(self, reason: str) -> None:
        """The thread runs no more commands."""
        self.dead = reason
        self.run()
