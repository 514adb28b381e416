"""The sides that `bench/transfer.py` compares with: plain copies, and NIXL and Mooncake as their examples use them."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from bench.transfer_work import TokenMajor, Work

_TARGET_PAUSE = 100e-6  # seconds between two looks for the end, where the library's own threads receive


class Memcpy:
    """One process, one copy a piece."""

    def __init__(self, work: Work, role: str, options: list[str]) -> None:
        self._from, self._to = (_pool(work, seed) for seed in (1, 2))

    def describe(self) -> dict[str, Any]:
        return {}

    def connect(self, peer: dict[str, Any]) -> None:
        pieces = zip(self._from.pieces("source").tolist(), self._to.pieces("target").tolist())
        self._pieces, self._nbytes = list(pieces), self._from.piece_bytes

    def send(self) -> None:
        for here, there in self._pieces:
            ctypes.memmove(there, here, self._nbytes)

    def receive(self) -> None:
        """There is nothing to wait for."""

    def digest(self, role: str) -> str:
        return (self._from if role == "source" else self._to).digest(role)


class SharedPool:
    """The target's pool lies in shared memory, and the sender writes its pages there: one copy."""

    def __init__(self, work: Work, role: str, options: list[str]) -> None:
        self._work, self._role = work, role
        self._name = f"/dev/shm/pdjax-bench-{os.getpid()}"
        self._done = f"{self._name}.done"
        self._pool = _shared_pool(work, self._name) if role == "target" else _pool(work, 1)
        if role == "target":
            os.mkfifo(self._done)
            self._fifo = os.open(self._done, os.O_RDWR)

    def describe(self) -> dict[str, Any]:
        return {"name": self._name, "done": self._done}

    def connect(self, peer: dict[str, Any]) -> None:
        if self._role == "target":
            return
        there = _shared_pool(self._work, peer["name"])
        Path(peer["name"]).unlink()
        self._fifo = os.open(peer["done"], os.O_RDWR)
        Path(peer["done"]).unlink()
        self._pieces = list(zip(self._pool.pieces("source").tolist(), there.pieces("target").tolist()))

    def send(self) -> None:
        for here, there in self._pieces:
            ctypes.memmove(there, here, self._pool.piece_bytes)
        os.write(self._fifo, b"d")

    def receive(self) -> None:
        os.read(self._fifo, 1)

    def digest(self, role: str) -> str:
        return self._pool.digest(role)


class Nixl:
    """NIXL: a descriptor a piece, prepared once; a request posts them all, with a notification.

    Options: ``tuned`` is without the progress thread (and the environment has one rail).
    """

    def __init__(self, work: Work, role: str, options: list[str]) -> None:
        nixl = import_module("nixl_cu12._api")
        self._role, self._tuned = role, "tuned" in options
        self._pool = _pool(work, 1 if role == "source" else 2)
        self._agent = nixl.nixl_agent(
            role, nixl.nixl_agent_config(enable_prog_thread=not self._tuned, backends=["UCX"])
        )
        self._agent.register_memory([(self._pool.address, self._pool.nbytes, 0, "")], "DRAM")

    def describe(self) -> dict[str, Any]:
        pieces = self._pool.pieces("target") if self._role == "target" else np.zeros(0, int)
        return {"metadata": self._agent.get_agent_metadata().hex(), "pieces": pieces.tolist()}

    def connect(self, peer: dict[str, Any]) -> None:
        self._agent.add_remote_agent(bytes.fromhex(peer["metadata"]))
        if self._role == "target":
            return
        here = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", self._list(self._pool.pieces("source")), "DRAM")
        there = self._agent.prep_xfer_dlist("target", self._list(np.array(peer["pieces"])), "DRAM")
        index = np.arange(len(peer["pieces"]), dtype=np.int32)
        self._prepared = (here, index, there)

    def send(self) -> None:
        here, index, there = self._prepared
        handle = self._agent.make_prepped_xfer("WRITE", here, index, there, index, b"done")
        self._agent.transfer(handle)
        while (state := self._agent.check_xfer_state(handle)) != "DONE":
            if state == "ERR":
                raise RuntimeError("NIXL's transfer has failed")
        handle.release()

    def receive(self) -> None:
        while not self._agent.check_remote_xfer_done("source", b"done"):
            if not self._tuned:
                time.sleep(_TARGET_PAUSE)

    def digest(self, role: str) -> str:
        return self._pool.digest(role)

    def _list(self, addresses: np.ndarray) -> np.ndarray:
        rows = np.zeros((len(addresses), 3), np.uint64)
        rows[:, 0], rows[:, 1] = addresses, self._pool.piece_bytes
        return rows


class Mooncake:
    """Mooncake over tcp: batches of pieces, each waited for; the end is told by the harness, at no cost."""

    BATCH = 1024  # one batch takes 2,048 pieces at most

    def __init__(self, work: Work, role: str, options: list[str]) -> None:
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
        self._role = role
        self._pool = _pool(work, 1 if role == "source" else 2)
        self._engine = import_module("mooncake.engine").TransferEngine()
        if self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
            raise RuntimeError("Mooncake does not start")
        self._engine.register_memory(self._pool.address, self._pool.nbytes)
        self._done = f"/tmp/pdjax-bench-{os.getpid()}.done"
        if role == "target":
            os.mkfifo(self._done)
            self._fifo = os.open(self._done, os.O_RDWR)

    def describe(self) -> dict[str, Any]:
        pieces = self._pool.pieces("target") if self._role == "target" else np.zeros(0, int)
        return {"session": f"127.0.0.1:{self._engine.get_rpc_port()}", "pieces": pieces.tolist(), "done": self._done}

    def connect(self, peer: dict[str, Any]) -> None:
        if self._role == "target":
            return
        self._session, self._there = peer["session"], peer["pieces"]
        self._here = self._pool.pieces("source").tolist()
        self._fifo = os.open(peer["done"], os.O_RDWR)
        Path(peer["done"]).unlink()

    def send(self) -> None:
        for first in range(0, len(self._here), self.BATCH):
            here, there = self._here[first : first + self.BATCH], self._there[first : first + self.BATCH]
            lengths = [self._pool.piece_bytes] * len(here)
            if self._engine.batch_transfer_sync_write(self._session, here, there, lengths):
                raise RuntimeError("Mooncake's batch has failed")
        os.write(self._fifo, b"d")

    def receive(self) -> None:
        os.read(self._fifo, 1)

    def digest(self, role: str) -> str:
        return self._pool.digest(role)


_kept: list[mmap.mmap] = []


def _pool(work: Work, seed: int) -> TokenMajor:
    return _filled(work, mmap.mmap(-1, TokenMajor.nbytes_of(work)), seed)


def _shared_pool(work: Work, name: str) -> TokenMajor:
    fresh = not os.path.exists(name)
    file = os.open(name, os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(file, TokenMajor.nbytes_of(work))
    memory = mmap.mmap(file, TokenMajor.nbytes_of(work))
    os.close(file)
    return _filled(work, memory, 2 if fresh else None)


def _filled(work: Work, memory: mmap.mmap, seed: int | None) -> TokenMajor:
    _kept.append(memory)
    pool = TokenMajor(work, ctypes.addressof(ctypes.c_char.from_buffer(memory)))
    if seed is not None:
        pool.fill(seed)
    return pool
