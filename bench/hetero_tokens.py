"""Per-token head slices for bench/hetero.py: each token's heads of each layer by themselves, on a bare UCX worker.

Both sides hold the tokens one after the other, [layer, K|V, token, head, head_dim]. A source puts slice after slice, as
fast as UCX takes them, then flushes and sends one notice. On one host, `mapped`, a slice is a copy.
"""

from __future__ import annotations

import ctypes
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from pdjax.transfer.ucx import binding
from pdjax.transfer.ucx.devices import seen, transports
from pdjax.transfer.ucx.worker import UcxWorker, library_path

_OPEN = 1024  # slices that are under way at a time
_PATIENCE = 60.0  # seconds


@dataclass(frozen=True)
class Slices:
    """What one source has for one target: `rows` of (layer, K|V, token), bytes of each, and where the first begins and
    how far the next one is, at both ends."""

    rows: int
    nbytes: int
    source_offset: int
    source_stride: int
    target_offset: int
    target_stride: int


@dataclass(frozen=True)
class _Target:
    endpoint: int
    base: int
    rkey: int
    mapped: int | None


class TokenTarget:
    """Memory that slices land in. `on_notice` is called on a thread of its own."""

    def __init__(self, nbytes: int, on_notice: Callable[[bytes], None]) -> None:
        self._worker = _worker(on_notice)
        self._memory = self._worker.allocate(nbytes)
        threading.Thread(target=self._serve, daemon=True).start()
        self.description = {
            "worker": self._worker.address().hex(),
            "base": self._memory.address,
            "key": self._worker.key(self._memory).hex(),
        }

    def _serve(self) -> None:
        poller = select.poll()
        poller.register(self._worker.fd, select.POLLIN)
        while True:
            if not self._worker.progress() and self._worker.arm():
                poller.poll(1000)


class TokenSource:
    """Memory that slices are sent from."""

    def __init__(self, nbytes: int) -> None:
        self._worker = _worker(lambda _: None)
        self._tokens = np.ones(nbytes, np.uint8)
        self._memory = self._worker.register(self._tokens.ctypes.data, nbytes)
        self._targets: dict[str, _Target] = {}

    def connect(self, name: str, description: dict[str, Any], *, mapped: bool) -> None:
        """Reach a described target."""
        endpoint = self._worker.open(bytes.fromhex(description["worker"]))
        base, rkey = description["base"], self._worker.unpack(endpoint, bytes.fromhex(description["key"]))
        self._targets[name] = _Target(endpoint, base, rkey, self._worker.pointer(rkey, base) if mapped else None)

    def send(self, name: str, slices: Slices, notice: bytes) -> None:
        """Put all slices and the notice; returns when they have left."""
        worker, target, memory = self._worker, self._targets[name], self._memory
        here, there = slices.source_offset, slices.target_offset
        under_way: deque[int] = deque()
        for _ in range(slices.rows):
            if target.mapped is not None:
                ctypes.memmove(target.mapped + there, memory.address + here, slices.nbytes)
            else:
                request = worker.put(target.endpoint, memory, here, slices.nbytes, target.base + there, target.rkey)
                if request:
                    under_way.append(request)
                    self._wait(under_way, _OPEN)
            here, there = here + slices.source_stride, there + slices.target_stride
        under_way.append(worker.flush(target.endpoint))
        self._wait(under_way, 0)
        self._wait(deque([worker.notify(target.endpoint, notice)]), 0)

    def _wait(self, requests: deque[int], most: int) -> None:
        """Until at most so many are under way, oldest first."""
        until = time.monotonic() + _PATIENCE
        while len(requests) > most:
            outcome = self._worker.outcome(requests[0])
            if outcome:
                raise RuntimeError(outcome)
            if outcome is not None:
                requests.popleft()
            elif not self._worker.progress() and time.monotonic() > until:
                raise RuntimeError(f"{len(requests)} requests have not ended within {_PATIENCE:.0f} s")


def _worker(on_notice: Callable[[bytes], None]) -> UcxWorker:
    ucp = binding.load(library_path(None))
    kinds = transports(seen(ucp), [], gpu=False)
    return UcxWorker(ucp, transports=kinds, devices=[], on_notice=on_notice, on_error=lambda *_: None)
