"""`UcxBackend`: one thread owns the UCX worker, and sleeps on its file descriptor while nothing moves."""

from __future__ import annotations

import ctypes
import os
import re
import select
import threading
import time
import traceback
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass

from pdjax.net.addresses import own_addresses
from pdjax.transfer import cuda
from pdjax.transfer.backend import BackendOptions, Drained, EventSink, Notice, TransferError, Write, WriteFailed
from pdjax.transfer.checks import check_region
from pdjax.transfer.commands import SET_UP_BOUND, Commands
from pdjax.transfer.ucx import binding, description, sockets
from pdjax.transfer.ucx.description import Description, Region
from pdjax.transfer.ucx.devices import choose, networks, problem_with_gpus, seen, transports
from pdjax.transfer.ucx.paths import Paths
from pdjax.transfer.ucx.worker import Memory, UcxWorker, library_path

_CLOSE_BOUND = 3.0
_OPEN_PAUSE = 0.05  # seconds; the longest sleep while anything is under way
_REST_PAUSE = 5.0  # seconds; at rest nothing should be missed, and if it were, this is what it would cost
_DRY_LOOKS, _DRY_PAUSE = 4, 0.025  # how often, and seconds apart, nothing may be left to receive

_LOOK_EVERY = 5.0  # seconds between looks at who is connected
# Transports whose bytes come over a connection that this side can close, or never come from another machine.
_TAKEN_BACK = re.compile(r"tcp|posix|sysv|self|cma|knem|xpmem|sm|shm|mm|cuda\w*")

_DEFAULTS = BackendOptions()


@dataclass
class _Drain:
    """A drain that has seen nothing left to receive `looks` times, the last time at `looked`."""

    id: int
    looks: int = 0
    looked: float = 0.0


def create(on_event: EventSink, options: BackendOptions) -> UcxBackend:
    """Start it. Raises `TransferError`."""
    return UcxBackend(on_event, options)


class UcxBackend:
    """See `TransferBackend`. What it allocates goes with `close`, which must come after its last use.

    Args:
        on_event: called on the backend's thread; must only hand on.
        options: with `mapped`, bytes go straight into the memory of peers on this host; else by the network path.
        library: the libucp to use; None is the one that MPI has loaded.

    Raises:
        TransferError: UCX cannot start, sees no device of the names that it was told, or is to move a GPU's memory and
            cannot.
    """

    name = "ucx"

    def __init__(
        self,
        on_event: EventSink,
        options: BackendOptions = _DEFAULTS,
        *,
        library: str | None = None,
    ) -> None:
        self._on_event = on_event
        self._ucp = binding.load(library_path(library))
        self._commands = Commands("UCX")
        self._memory: dict[int, Memory] = {}  # by region
        self._writable: set[int] = set()
        self._drains: list[_Drain] = []
        self._heard_from: set[str] = set()  # IP addresses of peers, seen when notices came
        self._looked_at = 0.0
        self._errors: deque[tuple[int, str]] = deque()  # endpoints that UCX has given up, and why
        self._closing = False
        self._worker: UcxWorker  # both are made by the thread
        self._paths: Paths
        started: Future[None] = Future()
        there = seen(self._ucp)
        devices = choose(options.devices, there)
        self.device_memory = options.gpu is not None
        if self.device_memory and (problem := problem_with_gpus(there, devices, over_tcp=options.gpu_over_tcp)):
            raise TransferError(problem)
        kinds = options.transports or transports(there, devices, gpu=self.device_memory)
        self._kinds = kinds.split(",")
        self.summary = _summary(self._ucp, kinds, devices or list(networks(there)), self.device_memory)
        arguments = (kinds, devices, options, started)
        self._thread = threading.Thread(target=self._run, args=arguments, name="pdjax-ucx", daemon=True)
        self._thread.start()
        started.result(SET_UP_BOUND)

    def register(self, region: int, address: int, nbytes: int) -> None:
        """Make memory a source of writes. Raises `TransferError`."""
        self._commands.call(lambda: self._register(region, address, nbytes))

    def register_device_memory(self, region: int, address: int, nbytes: int, *, writable: bool = False) -> None:
        """Make a GPU's memory a source of writes, and what peers may write into. Raises `TransferError`."""
        self._commands.call(lambda: self._register_device_memory(region, address, nbytes, writable))

    def allocate(self, region: int, nbytes: int) -> int:
        """Allocate zeroed memory that peers may write into. Returns its address. Raises `TransferError`."""
        return self._commands.call(lambda: self._allocate(region, nbytes))

    def describe(self) -> bytes:
        """What a peer needs to `connect`, for the registration record. Raises `TransferError`."""
        return self._commands.call(self._describe)

    def connect(self, peer: str, description: bytes) -> None:
        """Open the path to a described peer. Raises `TransferError`."""
        self._commands.call(lambda: self._paths.connect(peer, description))

    def disconnect(self, peer: str) -> None:
        """Close the path; its open writes fail. An unknown peer is ignored."""
        self._commands.post(lambda: self._paths.disconnect(peer))

    def write(self, write: Write) -> None:
        """Start a write; its end is an event."""
        self._commands.post(lambda: self._start(write))

    def mapped(self, peer: str, region: int, offset: int, nbytes: int) -> AbstractContextManager[int | None]:
        """Where a range of a peer's region lies in this process, within the context: see `TransferBackend`."""
        return self._paths.mapped(peer, region, offset, nbytes)

    def drain(self, id: int) -> None:
        """Report `Drained` once nothing is left to receive from peers that are gone."""
        self._commands.post(lambda: self._start_drain(id))

    def cut_off(self, descriptions: Sequence[bytes]) -> None:
        """Close all TCP connections of this process with the hosts of these peers. Raises `TransferError`: some may
        write by other ways than TCP, or by connections that cannot be told from others."""
        if not descriptions:
            return
        others = [kind for kind in self._kinds if not _TAKEN_BACK.fullmatch(kind)]
        if others:
            raise TransferError(f"what UCX sends by {', '.join(others)} cannot be refused once it is under way")
        peers = [description.decode(each) for each in descriptions]
        if any(description.may_share_memory(peer.process) for peer in peers):
            raise TransferError("the peer runs on this machine, and may write into its memory without a network")
        # Addresses that both hosts have are of bridges within them.
        addresses = {address for peer in peers for address in peer.addresses} - own_addresses()
        if not addresses & (self._heard_from | sockets.remote_addresses()):
            raise TransferError(f"no connection with {', '.join(sorted(addresses))} has been seen here")
        sockets.shut_down(addresses)

    def path(self, peer: str) -> str:
        """``mapped`` or UCX's transports, in words."""
        return self._paths.path(peer)

    def close(self) -> None:
        """Fail what is open, release everything, end the thread. Idempotent."""
        self._closing = True
        self._commands.post(lambda: None)
        self._thread.join(_CLOSE_BOUND + 1)

    # Everything below runs on the thread

    def _run(self, transports: str, devices: list[str], options: BackendOptions, started: Future[None]) -> None:
        try:
            if options.gpu is not None:
                cuda.make_current(options.gpu)
            self._worker = UcxWorker(
                self._ucp,
                transports=transports,
                devices=devices,
                on_notice=self._on_notice,
                on_error=lambda endpoint, cause: self._errors.append((endpoint, cause)),
            )
            self._paths = Paths(
                self._worker,
                self._memory,
                self._on_event,
                allow_mapped=options.mapped,
                device_memory=self.device_memory,
            )
        except BaseException as error:  # noqa: BLE001 - it is raised to whoever made the backend
            started.set_exception(error)
            return
        started.set_result(None)
        reason = "the UCX backend is closed"
        try:
            self._loop()
        except Exception as error:  # noqa: BLE001 - whatever it is, nobody may wait for a write for ever
            traceback.print_exc()
            reason = f"the UCX thread has failed: {error!r}"
        self._commands.rest(reason)
        self._paths.close()
        self._release()

    def _on_notice(self, payload: bytes) -> None:
        self._on_event(Notice(payload))
        now = time.monotonic()
        if now - self._looked_at > _LOOK_EVERY:
            self._looked_at = now
            self._heard_from |= sockets.remote_addresses()

    def _loop(self) -> None:
        poller = select.poll()
        poller.register(self._worker.fd, select.POLLIN)
        poller.register(self._commands.wake_fd, select.POLLIN)
        while not self._closing:
            if self._turn() or not self._worker.arm():
                continue
            for fd, _ in poller.poll(1000 * self._pause()):
                if fd == self._commands.wake_fd:
                    os.eventfd_read(self._commands.wake_fd)

    def _turn(self) -> bool:
        """One round over everything. Returns whether anything moved."""
        received = self._worker.progress()
        moved = self._commands.run() or received
        while self._errors:
            self._paths.failed(*self._errors.popleft())
            moved = True
        now = time.monotonic()
        moved |= self._paths.advance(now)
        if self._drains and not received:
            self._look_for_rest(now)
        return moved

    def _pause(self) -> float:
        """Seconds to sleep at most."""
        if self._drains:
            return _DRY_PAUSE
        if self._paths.leaving:
            return _OPEN_PAUSE
        deadline = self._paths.next_deadline()
        return _REST_PAUSE if deadline is None else max(min(deadline - time.monotonic(), _OPEN_PAUSE), 0.001)

    def _register(self, region: int, address: int, nbytes: int) -> None:
        check_region(region, nbytes, region in self._memory)
        self._memory[region] = self._worker.register(address, nbytes)

    def _register_device_memory(self, region: int, address: int, nbytes: int, writable: bool) -> None:
        if not self.device_memory:
            raise TransferError("this UCX, as it was started, moves the host's memory only")
        self._register(region, address, nbytes)
        if not self._memory[region].on_device:
            raise TransferError(
                f"UCX takes the GPU's memory at {address:#x} for the host's (is UCX_MEMTYPE_CACHE=n set?)"
            )
        if writable:
            self._writable.add(region)

    def _allocate(self, region: int, nbytes: int) -> int:
        check_region(region, nbytes, region in self._memory)
        memory = self._worker.allocate(nbytes)
        if memory.address % os.sysconf("SC_PAGE_SIZE"):
            self._worker.unmap(memory)
            raise TransferError(f"UCX allocated memory at {memory.address:#x}, which is not aligned to a memory page")
        ctypes.memset(memory.address, 0, nbytes)
        self._memory[region] = memory
        self._writable.add(region)
        return memory.address

    def _describe(self) -> bytes:
        regions = []
        for region in sorted(self._writable):
            memory = self._memory[region]
            key = self._worker.key(memory)
            regions.append(Region(region, memory.address, memory.nbytes, key, memory.on_device))
        whole = Description(
            version=description.VERSION,
            ucx=self._ucp.version(),
            worker=self._worker.address(),
            process=description.own_process(),
            regions=regions,
            addresses=sorted(own_addresses()),
        )
        return description.encode(whole)

    def _start(self, write: Write) -> None:
        if self._commands.dead is not None:
            self._on_event(WriteFailed(write.id, self._commands.dead))
        else:
            self._paths.start(write)

    def _start_drain(self, id: int) -> None:
        if self._commands.dead is not None:
            self._on_event(Drained(id))  # nothing lands any more
        else:
            self._drains.append(_Drain(id))

    def _look_for_rest(self, now: float) -> None:
        """Nothing was left to receive just now: that, a few times in a row, is dry. What a dead process had sent is
        in this host's socket buffers already, and whoever was copying into our memory has stopped."""
        for drain in list(self._drains):
            if now - drain.looked < _DRY_PAUSE:
                continue
            drain.looks, drain.looked = drain.looks + 1, now
            if drain.looks == _DRY_LOOKS:
                self._drains.remove(drain)
                self._on_event(Drained(drain.id))

    def _release(self) -> None:
        """Let go of everything, in the order that UCX asks for; not at all if a path does not end in time."""
        until = time.monotonic() + _CLOSE_BOUND
        while self._paths.leaving and time.monotonic() < until:
            if not self._worker.progress() and not self._paths.advance(time.monotonic()):
                time.sleep(0.001)
        if self._paths.leaving:
            return
        for memory in self._memory.values():
            self._worker.unmap(memory)
        self._worker.destroy()


def _summary(ucp: binding.Ucp, kinds: str, devices: list[str], gpu: bool) -> str:
    """One line for the start of an instance."""
    version = ".".join(map(str, ucp.version()))
    memory = "host and GPU memory" if gpu else "host memory only"
    return f"UCX {version} over {kinds} ({', '.join(devices) or 'no network device'}), {memory}"
