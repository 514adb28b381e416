"""The ``mooncake`` backend: Mooncake's transfer engine moves the bytes, over tcp, or over RDMA if devices are named.

Its threads work by themselves, and sleep while nothing moves. It cannot take a write back, nor tell that one of a
dead peer is over; what it knows of a dead peer it finds out by its own time limits, the courier by its connection.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import msgspec

from pdjax.transfer.backend import BackendOptions, EventSink, TransferError
from pdjax.transfer.courier import CourierBackend
from pdjax.transfer.ucx.devices import check

_DONE, _PENDING = 1, 0  # of transfer_check_status; what is below has failed


def create(on_event: EventSink, options: BackendOptions) -> CourierBackend:
    """Start it. Raises `TransferError`: Mooncake is not installed, or cannot start, or a device is not there."""
    check(options.devices)
    return CourierBackend(on_event, lambda: MooncakeMover(options.host, options.devices), host=options.host)


class MooncakeMover:
    """See `Mover`. A handle is Mooncake's number of a batch of one."""

    name = "mooncake"
    receives = False
    dry_s = 0.5

    def __init__(self, host: str, devices: tuple[str, ...] = ()) -> None:
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
        try:
            module = importlib.import_module("mooncake.engine")
        except ModuleNotFoundError as error:
            raise TransferError(
                "the backend mooncake needs Mooncake: pip install --no-deps mooncake-transfer-engine-non-cuda"
            ) from error
        except ImportError as error:
            raise TransferError(f"Mooncake cannot be loaded: {error} (it needs libibverbs1 and libnuma1)") from error
        self._engine: Any = module.TransferEngine()
        self._protocol = "rdma" if devices else "tcp"
        code = self._engine.initialize(host, "P2PHANDSHAKE", self._protocol, ",".join(devices))
        if code:
            raise TransferError(f"Mooncake cannot start over {self._protocol} at {host}: code {code}")
        self._session = f"{host}:{self._engine.get_rpc_port()}"
        self._sessions: dict[str, str] = {}  # by peer
        self._registered: list[int] = []

    def register(self, address: int, nbytes: int) -> None:
        """Make memory known to Mooncake. Raises `TransferError`."""
        code = self._engine.register_memory(address, nbytes)
        if code:
            raise TransferError(f"Mooncake could not register {nbytes} bytes at {address:#x}: code {code}")
        self._registered.append(address)

    def describe(self) -> bytes:
        """The session's name, which peers look its memory up by."""
        return msgspec.msgpack.encode(self._session)

    def connect(self, peer: str, description: bytes) -> None:
        """Look a peer's memory up now: on a first write, that would hold up the writes to all others."""
        try:
            session = msgspec.msgpack.decode(description, type=str)
        except msgspec.DecodeError as error:
            raise TransferError(f"the peer's Mooncake description does not parse: {error}") from error
        if self._engine.send_probe(session):
            raise TransferError(f"the peer's Mooncake engine at {session} does not answer")
        self._engine.get_first_buffer_address(session)
        self._sessions[peer] = session

    def disconnect(self, peer: str) -> None:
        """Forget a peer's session."""
        self._sessions.pop(peer, None)

    def move(self, peer: str, source: int, destination: int, nbytes: int) -> int:
        """Submit a write of one piece."""
        batch = self._engine.transfer_submit_write(self._sessions[peer], source, destination, nbytes)
        if batch < 0:
            raise TransferError(f"Mooncake did not take a write of {nbytes} bytes: code {batch}")
        return batch

    def outcome(self, handle: int) -> str | None:
        """Ask."""
        status = self._engine.transfer_check_status(handle)
        if status == _PENDING:
            return None
        return "" if status == _DONE else f"Mooncake says: the transfer has failed, code {status}"

    def abandon(self, handle: int) -> None:
        """Mooncake has no way to give a write up: its batch is never asked for again."""

    def progress(self) -> None:
        """Its threads do that."""

    def path(self) -> str:
        """In words."""
        return f"mooncake, {self._protocol}"

    def close(self) -> None:
        """Let go of memory and the engine."""
        for address in self._registered:
            self._engine.unregister_memory(address)
        self._engine = None
