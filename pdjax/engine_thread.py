"""An engine in a thread of this process, for offline use: no HTTP, no MPI, no other process."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

from pdjax.config import Config
from pdjax.engine.engine import Stop
from pdjax.engine.unified import Unified
from pdjax.kernels import native
from pdjax.launch.cache_folder import cache_root
from pdjax.launch.core import keep_compiled_programs, load_core, make_engine
from pdjax.launch.devices import emulated_devices
from pdjax.wire import Abort, Failed, Generate, ToFrontend, Tokens, apart

START_SECONDS = 1800.0  # to load a model and compile its steps
STOP_SECONDS = 30.0  # for the step in progress
SILENCE_SECONDS = 600.0  # the longest pause in what it says while requests are open
_LOOK_SECONDS = 1.0  # how often a waiting caller looks whether the thread still lives


class EngineError(RuntimeError):
    """The engine could not start, or has ended, or can't take a request now; the sentence says why."""


class EngineThread:
    """Loads a model and runs its engine. All JAX calls happen on its one thread.

    Attributes:
        info: what the instance is, as ``/server_info`` shows it.

    Raises:
        EngineError: it can't start.
    """

    def __init__(self, config: Config, folder: Path) -> None:
        self.info: dict[str, Any] = {}
        self._inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._replies: dict[str, queue.SimpleQueue[Tokens | Failed]] = {}
        self._started = threading.Event()
        self._problem: str | None = None
        _prepare_jax(config)
        self._thread = threading.Thread(target=self._run, args=(config, folder), name="pdjax-engine", daemon=True)
        self._thread.start()
        if not self._started.wait(START_SECONDS):
            raise EngineError(f"the engine has not started within {START_SECONDS:g} s")
        if self._problem is not None:
            raise EngineError(self._problem)

    def submit(self, requests: Iterable[Generate], replies: queue.SimpleQueue[Tokens | Failed]) -> None:
        """Have requests run; what the engine says of them is put into `replies`."""
        for request in requests:
            self._replies[request.rid] = replies
            self._inbox.put(request)

    def forget(self, rid: str, *, abort: bool) -> None:
        """Want nothing more of a request; `abort` if the engine does not know."""
        if self._replies.pop(rid, None) is not None and abort:
            self._inbox.put(Abort(rid, "the caller wants no more"))

    def next(self, replies: queue.SimpleQueue[Tokens | Failed]) -> Tokens | Failed:
        """Wait for what the engine says next.

        Raises:
            EngineError: it has ended, or says nothing for `SILENCE_SECONDS`.
        """
        for _ in range(int(SILENCE_SECONDS / _LOOK_SECONDS)):
            try:
                return replies.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                self.check()
        raise EngineError(f"the engine has made no token for {SILENCE_SECONDS:g} s")

    def check(self) -> None:
        """Raise `EngineError` if it has ended."""
        if not self._thread.is_alive():
            raise EngineError(self._problem or "the engine has been shut down")

    def stop(self) -> None:
        """End the engine; waits for the step in progress."""
        self._inbox.put(Stop())
        self._thread.join(STOP_SECONDS)

    def _run(self, config: Config, folder: Path) -> None:
        try:
            native.load(cache_root() / "native")
            core = load_core("unified", config, folder)
            engine = make_engine(
                "unified", config, core, inbox=self._inbox, emit=self._emit, make_role=Unified
            )  # fmt: skip
            if config.engine.warmup:
                core.runner.warm_up(core.warm_up_steps("unified"))
            self.info = core.info
            self._started.set()
            stop = engine.run()
            self._problem = stop.problem
        except Exception as error:  # noqa: BLE001 - whatever it was, the one who waits is told
            self._problem = f"the engine has ended: {type(error).__name__}: {error}"
        finally:
            self._started.set()

    def _emit(self, *messages: ToFrontend) -> None:
        for message in apart(messages):
            if isinstance(message, Tokens | Failed):
                replies = self._replies.get(message.rid)
                if replies is not None:
                    replies.put(message)


def _prepare_jax(config: Config) -> None:
    """JAX may be in use in this process already; what it has started with then stays."""
    keep_compiled_programs()
    if config.instance.platform:
        jax.config.update("jax_platforms", config.instance.platform)
    devices = emulated_devices(config.instance, processes=1)
    if devices and config.instance.platform == "cpu":
        with contextlib.suppress(RuntimeError):  # too late; whether there are enough is seen when the mesh is made
            jax.config.update("jax_num_cpu_devices", devices)
