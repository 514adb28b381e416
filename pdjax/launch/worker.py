"""A process of an instance that is not its leader: it holds its shards, and does to them what the leader orders."""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pdjax.config import Config, ConfigError
from pdjax.launch.join import GRACE_SECONDS, join, say
from pdjax.models.errors import ModelError
from pdjax.net.crew import Gone, Worker
from pdjax.net.world import World

if TYPE_CHECKING:
    from pdjax.launch.worker_data_plane import WorkerDataPlane


def run(role: str, config: Config, folder: Path) -> int:
    """Follow the leader until it says that all is over. Returns the exit code.

    Raises:
        WorldError, MPIError: it is no part of an instance.
    """
    stopping = threading.Event()
    data_plane: list[WorkerDataPlane] = []  # the one, once there is one
    asked = _PassStopOn()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, asked)
    world = join(config, folder)
    assert world.worker is not None, "a worker has a leader"
    name = f"{role} rank {world.rank}"

    def leader_gone() -> None:
        if not stopping.is_set():
            say(name, "its leader is gone, so this process ends too")
            for each in data_plane:  # peers take what the leader had under way for ended as soon as it is gone itself
                threading.Thread(target=each.close, daemon=True).start()
            # The device thread may be inside a collective that nobody else will enter any more.
            time.sleep(GRACE_SECONDS)
            os._exit(1)

    world.worker.watch(leader_gone)
    asked.connect(world.worker)
    try:
        _follow(role, config, folder, world, stopping, data_plane)
    except Gone:
        return 1
    except Exception as error:  # noqa: BLE001 - the leader must hear of it, whatever it was
        _report(name, error, world.worker)
        return 1
    return 0


def _follow(
    role: str,
    config: Config,
    folder: Path,
    world: World,
    stopping: threading.Event,
    data_plane: list[WorkerDataPlane],
) -> None:
    import jax

    from pdjax.engine.host_pages import HostPages
    from pdjax.engine.lockstep import Follower
    from pdjax.launch.core import freeze_heap, load_core, meet, start_jax

    assert world.worker is not None, "a worker has a leader"
    start_jax(world, config.instance)
    core = load_core(role, config, folder)
    host = HostPages(core.runner)
    on_role: Callable[[bytes], None] = _no_role
    if role != "unified":
        from pdjax.launch.worker_data_plane import WorkerDataPlane

        data_plane.append(WorkerDataPlane(role, config, core, world.worker.send))
        on_role = data_plane[0].carry_out
    if config.engine.warmup:
        core.runner.warm_up(core.warm_up_steps(role), meet=lambda: meet("compiled"))
        for each in data_plane:
            each.part.warm_up()
    meet("warm")
    core.runner.expect_no_compile()
    freeze_heap()

    def check() -> None:
        core.runner.check_integrity()
        for each in data_plane:
            each.part.check_integrity()

    with jax.thread_guard(True):
        Follower(world.worker, core.runner, host, on_role, check).follow()
    stopping.set()
    for each in data_plane:
        each.close()


def _no_role(body: bytes) -> None:
    raise AssertionError("a unified instance has nothing to send to others")


def _report(name: str, error: Exception, leader: Worker) -> None:
    """Tell the leader why this worker can't go on, and give it the time to say so and end the instance."""
    from pdjax.engine import orders
    from pdjax.engine.lockstep import OutOfStep

    if isinstance(error, OutOfStep):
        report = error.report
        text = report.reason if isinstance(report, orders.Trouble) else "it is out of step with its leader"
    elif isinstance(error, ConfigError | ModelError):
        text = str(error)
        report = orders.Trouble(text)
    else:
        traceback.print_exc()
        text = f"it has failed: {type(error).__name__}: {error}"
        report = orders.Trouble(text)
    say(name, f"stops: {text}")
    leader.send(orders.encode(report))
    time.sleep(GRACE_SECONDS)


class _PassStopOn:
    """The signal handler of a worker: whoever asks it to stop asks the instance, which is for the leader to hear."""

    def __init__(self) -> None:
        self._asked = False
        self._leader: Worker | None = None

    def __call__(self, *_: object) -> None:
        self._asked = True
        self._tell()

    def connect(self, leader: Worker) -> None:
        """From now on there is a leader, who is told what has come before."""
        self._leader = leader
        self._tell()

    def _tell(self) -> None:
        if self._asked and self._leader is not None:
            from pdjax.engine import orders

            # In a thread: what a signal interrupts may be sending.
            body = orders.encode(orders.AskedToStop())
            threading.Thread(target=self._leader.send, args=(body,), daemon=True).start()
