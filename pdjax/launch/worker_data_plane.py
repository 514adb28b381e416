"""A worker's part of a prefill or decode instance's transfers: does as its leader says, and reports."""

from __future__ import annotations

import queue
import threading
import traceback
from collections.abc import Callable

from pdjax.config import Config
from pdjax.disagg import orders
from pdjax.engine.orders import Reachable, RoleReport, Trouble
from pdjax.engine.orders import encode as encode_report
from pdjax.launch.core import Core
from pdjax.launch.pair import make_part


class WorkerDataPlane:
    """Its backend's events are looked at on a thread of their own, beside the steps.

    Args:
        send: to the leader, from any thread.
    """

    def __init__(self, role: str, config: Config, core: Core, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._events: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.part = make_part(role, config, core, self._events.put)
        send(encode_report(Reachable(self.part.backend.describe())))
        threading.Thread(target=self._watch, name="pdjax-transfers", daemon=True).start()

    def carry_out(self, body: bytes) -> None:
        """An order of the leader's role."""
        self._report(self.part.carry_out(orders.decode_order(body)))

    def close(self) -> None:
        """Write nothing any more."""
        self.part.backend.close()

    def _watch(self) -> None:
        try:
            while True:
                self._report(self.part.on_event(self._events.get()))
        except Exception as error:  # noqa: BLE001 - whatever it was, nobody may wait for a report for ever
            traceback.print_exc()
            self._send(encode_report(Trouble(f"its transfers have failed: {type(error).__name__}: {error}")))

    def _report(self, report: orders.Report | None) -> None:
        if report is not None:
            self._send(encode_report(RoleReport(orders.encode(report))))
