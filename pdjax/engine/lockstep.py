"""Both ends of an instance of several processes: the leader tells what it does, the workers do the same.

JAX takes different arguments from the processes of one program in silence, and hangs when their programs differ. So a
worker checks the number and the digests of every order before it acts on it, and on any difference the instance ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

import msgspec

from pdjax.engine import orders
from pdjax.engine.host_pages import HostPages
from pdjax.engine.orders import (
    Compiled,
    Disagreement,
    DropPages,
    Frame,
    Halt,
    Order,
    OtherTokens,
    Report,
    RestorePages,
    RoleOrder,
    SavePages,
    Trouble,
)
from pdjax.engine.plan import DecodeStep, PrefillStep
from pdjax.engine.runner import Runner, RunningStep

KEPT = 64  # the newest orders and steps' tokens that a leader can compare with a worker's
QUIET = 0.5  # seconds without an order after which a worker looks whether all is as it must be


class OutOfStep(Exception):
    """A worker must not go on: the report says what it found."""

    def __init__(self, report: Report) -> None:
        super().__init__(str(report))
        self.report = report


class Lead:
    """The leader's journal (see `pdjax.engine.runner.Journal`): tells workers of each order before it is carried out.

    Args:
        tell: sends a frame to every worker.
    """

    def __init__(self, tell: Callable[[bytes], None]) -> None:
        self._tell = tell
        self._number = 0
        self._digest = 0
        self._steps_read = 0
        self._tokens_digest = 0
        self._orders: deque[tuple[int, bytes]] = deque(maxlen=KEPT)
        self._tokens: deque[tuple[int, list[int]]] = deque(maxlen=KEPT)

    def ordered(self, order: Order) -> None:
        """Tell it to every worker."""
        body = orders.encode(order)
        self._digest = orders.chain(self._digest, body)
        self._orders.append((self._number, body))
        frame = Frame(self._number, self._digest, self._steps_read, self._tokens_digest, msgspec.Raw(body))
        self._number += 1
        self._tell(orders.encode(frame))

    def picked(self, token_ids: list[int]) -> None:
        """Note the tokens of a step; workers compare theirs when the next order comes."""
        self._tokens.append((self._steps_read, token_ids))
        self._tokens_digest = orders.chain_tokens(self._tokens_digest, token_ids)
        self._steps_read += 1

    def explain(self, report: Disagreement | OtherTokens | Trouble) -> str:
        """A worker's report against what this leader has ordered and read, in words behind the worker's name.

        For any thread.
        """
        match report:
            case Trouble():
                return f"can't go on: {report.reason}"
            case OtherTokens():
                for step, token_ids in list(self._tokens):
                    other = report.picked.get(step)
                    if other is not None and other != token_ids:
                        return f"is out of step: it picked the tokens {other} in step {step}, the leader {token_ids}"
                return f"is out of step: it picked other tokens in one of the steps {sorted(report.picked)}"
            case Disagreement():
                if report.number != report.expected:
                    return f"is out of step: it was told order {report.number} and expected {report.expected}"
                body = next((body for number, body in list(self._orders) if number == report.number), None)
                where = "which is too old to compare" if body is None else orders.difference(report.order, body)
                return f"is out of step: it disagrees about order {report.number}: {where}"


class Inbound(Protocol):
    """A worker's connection to its leader."""

    def receive(self, timeout: float | None) -> bytes | None:
        """The next frame; None if none came within `timeout` seconds."""
        ...

    def send(self, body: bytes) -> None:
        """A report."""
        ...


class Follower:
    """A worker's side: carries out orders in turn, each checked first.

    Args:
        on_role: takes what the leader's role says to this process's.
        check: called in quiet moments; raises RuntimeError if something has moved that must not.
    """

    def __init__(
        self,
        inbound: Inbound,
        runner: Runner,
        host: HostPages,
        on_role: Callable[[bytes], None],
        check: Callable[[], None],
    ) -> None:
        self._inbound = inbound
        self._runner = runner
        self._host = host
        self._on_role = on_role
        self._check_integrity = check
        self._number = 0
        self._digest = 0
        self._running: deque[RunningStep] = deque()
        self._steps_read = 0
        self._tokens_digest = 0
        self._unconfirmed: dict[int, list[int]] = {}
        self._compiles = 0

    def follow(self) -> None:
        """Until the leader says `Halt`.

        Raises:
            OutOfStep: this process and its leader disagree; the leader is yet to be told.
        """
        checked = True
        while True:
            body = self._inbound.receive(None if checked else QUIET)
            if body is None:
                self._check()
                checked = True
                continue
            checked = False
            order = self._verified(body)
            if isinstance(order, Halt):
                return
            self._carry_out(order)

    def _verified(self, body: bytes) -> Order:
        frame = orders.decode_frame(body)
        order = orders.decode_order(frame.order)
        # Of what will be carried out, not of the bytes that came.
        own = orders.encode(order)
        digest = orders.chain(self._digest, own)
        if frame.number != self._number or frame.digest != digest:
            raise OutOfStep(Disagreement(frame.number, self._number, own))
        self._number, self._digest = frame.number + 1, digest
        while self._steps_read < frame.steps_read:
            self._read()
        if self._tokens_digest != frame.tokens_digest:
            raise OutOfStep(OtherTokens(self._unconfirmed))
        self._unconfirmed = {}
        return order

    def _carry_out(self, order: Order) -> None:
        match order:
            case PrefillStep() | DecodeStep():
                self._running.append(self._runner.dispatch(order))
            case SavePages():
                self._host.keep(order.save, order.pages, order.dp_rank)
            case RestorePages():
                self._host.put_back(order.save, order.pages, first=order.first)
            case DropPages():
                self._host.forget(order.save)
            case RoleOrder():
                self._on_role(order.body)

    def _read(self) -> None:
        """Wait for the oldest step that was not read, if there is one, and note its tokens."""
        if not self._running:
            raise OutOfStep(Trouble(f"its leader has read {self._steps_read + 1} steps, it has run fewer"))
        token_ids = self._running.popleft().read().token_ids
        self._unconfirmed[self._steps_read] = token_ids
        self._tokens_digest = orders.chain_tokens(self._tokens_digest, token_ids)
        self._steps_read += 1

    def _check(self) -> None:
        """In a quiet moment: nothing may have moved or been compiled."""
        if self._runner.compiles_after_warm_up != self._compiles:
            self._compiles = self._runner.compiles_after_warm_up
            self._inbound.send(orders.encode(Compiled(self._compiles)))
        try:
            self._check_integrity()
        except RuntimeError as error:
            raise OutOfStep(Trouble(str(error))) from error
