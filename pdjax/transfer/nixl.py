"""The ``nixl`` backend: NIXL's UCX plug-in moves the bytes.

NIXL's own progress thread polls without a pause and takes a whole core, so it stays off; NIXL then moves only while
it is asked for something, which the courier does while a write is under way on either side. Two rails, its default,
cost a quarter to a half of the speed of pages over tcp, so there is one unless `UCX_MAX_RMA_RAILS` says otherwise.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import secrets
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec

from pdjax.net import mpi
from pdjax.transfer.backend import BackendOptions, EventSink, TransferError
from pdjax.transfer.courier import CourierBackend
from pdjax.transfer.ucx.devices import check

_PACKAGES = ("nixl_cu12", "nixl_cu13", "nixl")


def create(on_event: EventSink, options: BackendOptions) -> CourierBackend:
    """Start it. Raises `TransferError`: NIXL is not installed, or cannot start, or a device is not there."""
    check(options.devices)
    return CourierBackend(on_event, lambda: NixlMover(options.devices), host=options.host)


class NixlMover:
    """See `Mover`. A handle is NIXL's; every life of a process has an agent name of its own, as NIXL keeps by name
    what it knows of a peer."""

    name = "nixl"
    receives = True
    dry_s = 0.15

    def __init__(self, devices: tuple[str, ...] = ()) -> None:
        api = _load()
        self._agent: Any = None
        try:
            with _environment():
                config = api.nixl_agent_config(enable_prog_thread=False, backends=[])
                self._agent = api.nixl_agent(f"pdjax-{secrets.token_hex(8)}", config)
                self._agent.create_backend("UCX", {"ucx_devices": ",".join(devices)} if devices else {})
        except Exception as error:  # NIXL's exceptions have no common base
            raise TransferError(f"NIXL cannot start: {error!r}") from error
        self._agents: dict[str, str] = {}  # agent names by peer
        self._uses: Counter[str] = Counter()  # peers by agent name
        self._abandoned: list[Any] = []
        self._registered: list[Any] = []

    def register(self, address: int, nbytes: int) -> None:
        """Make memory known to NIXL. Raises `TransferError`."""
        with _in_words("register memory"):
            self._registered.append(self._agent.register_memory([(address, nbytes, 0, "")], "DRAM"))

    def describe(self) -> bytes:
        """The agent's metadata."""
        with _in_words("describe itself"):
            return msgspec.msgpack.encode((self._agent.name, self._agent.get_agent_metadata()))

    def connect(self, peer: str, description: bytes) -> None:
        """Load a peer's metadata. Raises `TransferError`."""
        try:
            stated, metadata = msgspec.msgpack.decode(description, type=tuple[str, bytes])
        except msgspec.DecodeError as error:
            raise TransferError(f"the peer's NIXL description does not parse: {error}") from error
        with _in_words("load the peer's metadata"):
            agent = self._agent.add_remote_agent(metadata)
        agent = agent.decode() if isinstance(agent, bytes) else agent
        if agent != stated:
            raise TransferError(f"the peer's NIXL metadata is of {agent!r}, not of {stated!r}")
        self._agents[peer] = agent
        self._uses[agent] += 1

    def disconnect(self, peer: str) -> None:
        """Forget a peer's metadata, which closes NIXL's connection."""
        agent = self._agents.pop(peer, None)
        if agent is None:
            return
        self._uses[agent] -= 1
        if not self._uses[agent]:
            del self._uses[agent]
            with contextlib.suppress(Exception):  # after the peer's death it may have forgotten it itself
                self._agent.remove_remote_agent(agent)
        self._release_abandoned()

    def move(self, peer: str, source: int, destination: int, nbytes: int) -> Any:
        """Post a write of one piece. Over cma, NIXL copies before it returns."""
        with _in_words("write"):
            here = self._agent.get_xfer_descs([(source, nbytes, 0)], "DRAM")
            there = self._agent.get_xfer_descs([(destination, nbytes, 0)], "DRAM")
            handle = self._agent.initialize_xfer("WRITE", here, there, self._agents[peer])
            self._agent.transfer(handle)
        return handle

    def outcome(self, handle: Any) -> str | None:
        """Ask, which also lets NIXL progress."""
        try:
            state = self._agent.check_xfer_state(handle)
        except Exception as error:  # noqa: BLE001 - NIXL's exceptions have no common base
            self.abandon(handle)
            return f"NIXL says: {error!r}"
        if state == "PROC":
            return None
        if state != "DONE":
            self.abandon(handle)
            return "NIXL says: the transfer has failed"
        handle.release()
        return ""

    def abandon(self, handle: Any) -> None:
        """Release a handle; one that NIXL does not give up yet is tried again later."""
        self._abandoned.append(handle)
        self._release_abandoned()

    def progress(self) -> None:
        """Asking for notifications is what lets NIXL receive."""
        with contextlib.suppress(Exception):  # a peer's death, which its connection tells
            self._agent.get_new_notifs()

    def path(self) -> str:
        """NIXL does not tell which transports it took."""
        return "nixl, UCX plug-in"

    def close(self) -> None:
        """Release memory and the agent."""
        for peer in list(self._agents):
            self.disconnect(peer)
        self._release_abandoned()
        self._abandoned.clear()
        for registered in self._registered:
            with contextlib.suppress(Exception):
                self._agent.deregister_memory(registered)
        self._agent = None

    def _release_abandoned(self) -> None:
        for handle in list(self._abandoned):
            with contextlib.suppress(Exception):  # not yet
                handle.release()
                self._abandoned.remove(handle)


def _load() -> Any:
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    for package in _PACKAGES:
        try:
            return importlib.import_module(f"{package}._api")
        except ModuleNotFoundError as error:
            if error.name is None or not error.name.startswith(package):
                raise TransferError(f"{package} cannot be loaded: {error}") from error
        except ImportError as error:
            raise TransferError(f"{package} cannot be loaded: {error}") from error
    raise TransferError("the backend nixl needs NIXL: pip install --no-deps nixl-cu12")


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """What NIXL's own UCX reads while it starts: not what stands there for MPI's."""
    changes: dict[str, str | None] = {}
    if os.environ.get("UCX_TLS") == mpi.environment({})["UCX_TLS"]:
        changes["UCX_TLS"] = None
    if "UCX_MAX_RMA_RAILS" not in os.environ:
        changes["UCX_MAX_RMA_RAILS"] = "1"
    before = {name: os.environ.get(name) for name in changes}
    _set(changes)
    try:
        yield
    finally:
        _set(before)


def _set(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextlib.contextmanager
def _in_words(doing: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # NIXL's exceptions have no common base
        raise TransferError(f"NIXL could not {doing}: {error!r}") from error
