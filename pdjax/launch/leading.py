"""The leader's end of an instance of several processes: its workers' reports, and how the instance ends as a whole."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import msgspec

from pdjax.engine import orders
from pdjax.engine.lockstep import Lead
from pdjax.engine.orders import AskedToStop, Compiled, Halt, Reachable, RoleReport
from pdjax.engine.runner import Runner
from pdjax.launch.join import GRACE_SECONDS
from pdjax.net.crew import Crew


class Leading:
    """Listens to the workers from the start, and leads them from `begin` on.

    Args:
        crew: the connections to the workers.
        post: takes what a worker's role says, on another thread.
        stop: called, on another thread, when the instance is to stop: with None if it was asked to, else with why.
        say: takes a line for whoever watches the instance.
        bury: called on another thread before the process is ended by force, with why.
    """

    def __init__(
        self,
        crew: Crew,
        *,
        post: Callable[[object], None],
        stop: Callable[[str | None], None],
        say: Callable[[str], None],
        bury: Callable[[str], None],
    ) -> None:
        self._crew = crew
        self._post = post
        self._stop = stop
        self._say = say
        self._bury = bury
        self._lead = Lead(crew.tell)
        self._runner: Runner | None = None
        self._lock = threading.Lock()
        self._broken = threading.Event()
        self._problem = ""
        self._compiles: dict[int, int] = {}
        self._descriptions: dict[int, bytes] = {}
        self._all_reachable = threading.Event()
        crew.watch(on_frame=self._on_frame, on_lost=self._on_lost)

    def descriptions(self, own: bytes, timeout: float) -> list[bytes] | None:
        """How each process's memory is reached, by rank, once all have said so; None if some have not in time."""
        if not self._all_reachable.wait(timeout):
            return None
        return [own, *(self._descriptions[rank] for rank in sorted(self._descriptions))]

    def begin(self, runner: Runner) -> None:
        """From now on whatever this process does to its devices, the workers do too."""
        self._runner = runner
        runner.journal = self._lead

    def end(self) -> None:
        """Have the workers end; that they do is no loss."""
        self._crew.forgive()
        self._lead.ordered(Halt())

    def why(self) -> str | None:
        """After something has failed here: which worker was the cause, if one was."""
        return self._problem if self._broken.wait(GRACE_SECONDS / 2) else None

    def _on_frame(self, rank: int, body: bytes) -> None:
        try:
            report = orders.decode_report(body)
        except msgspec.DecodeError as error:
            self._break(f"{self._crew.names[rank]} has sent a report that can't be read: {error}")
            return
        match report:
            case AskedToStop():
                self._stop(None)
            case Compiled():
                if self._runner is not None:
                    self._runner.compiles_after_warm_up += report.count - self._compiles.get(rank, 0)
                self._compiles[rank] = report.count
            case RoleReport():
                self._post(report)
            case Reachable(transfer):
                self._descriptions[rank] = transfer
                if len(self._descriptions) == len(self._crew.names) - 1:
                    self._all_reachable.set()
            case _:
                self._break(f"{self._crew.names[rank]} {self._lead.explain(report)}")

    def _on_lost(self, rank: int, reason: str) -> None:
        self._break(reason)

    def _break(self, problem: str) -> None:
        """End the instance: decently if the device thread can, by force if it waits for a worker for ever."""
        with self._lock:
            if self._broken.is_set():
                return
            self._problem = problem
            self._broken.set()
        self._say(f"stopping: {problem}")
        self._stop(problem)
        timer = threading.Timer(GRACE_SECONDS, self._end_by_force)
        timer.daemon = True
        timer.start()

    def _end_by_force(self) -> None:
        self._bury(self._problem)
        os._exit(1)
