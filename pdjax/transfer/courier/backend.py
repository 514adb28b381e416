"""`CourierBackend`: one thread owns the mover and the connections, and sleeps on its sockets while nothing moves."""

from __future__ import annotations

import mmap
import os
import selectors
import socket
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import AbstractContextManager, nullcontext
from ctypes import addressof, c_char
from dataclasses import dataclass

from pdjax.transfer.backend import (
    Drained,
    EventSink,
    Notice,
    PeerLost,
    TransferError,
    Write,
    WriteDone,
    WriteFailed,
)
from pdjax.transfer.checks import check_region, problem_with
from pdjax.transfer.commands import SET_UP_BOUND, Commands
from pdjax.transfer.courier import channel
from pdjax.transfer.courier.channel import BEGUN, NOTICE, Described, Incoming, Open, Outgoing
from pdjax.transfer.courier.mover import Mover

_CLOSE_BOUND = 4.0
_MAX_OPEN = 8  # writes to a peer that are under way at a time
_EAGER_ROUNDS = 200  # rounds without an event in which the thread asks again at once, while bytes move
_PAUSES = ((2000, 50e-6), (20000, 500e-6))  # then it sleeps so long, up to so many rounds; then:
_LONG_PAUSE = 5e-3
_DRAIN_PAUSE = 0.025


@dataclass(frozen=True)
class _Drain:
    id: int
    until: float


class CourierBackend:
    """See `TransferBackend`. Notices of writes to one peer may overtake each other.

    Args:
        on_event: called on the backend's thread; must only hand on.
        make_mover: called on the backend's thread, once.
        host: the address that peers' notices are taken at, which must be one that peers can reach.

    Raises:
        TransferError: the mover cannot start, or nothing can listen at `host`.
    """

    device_memory = False

    def __init__(self, on_event: EventSink, make_mover: Callable[[], Mover], *, host: str = "127.0.0.1") -> None:
        self._on_event = on_event
        self._host = host
        self._regions: dict[int, tuple[int, int]] = {}  # address and bytes
        self._memory: dict[int, mmap.mmap] = {}
        self._peers: dict[str, Outgoing] = {}
        self._incoming: dict[socket.socket, Incoming] = {}
        self._drains: list[_Drain] = []
        self._commands = Commands("courier")
        self._closing = False
        self._quiet = 0  # rounds without an event
        self._token = channel.new_token()
        try:
            self._listener = socket.create_server((host, 0), backlog=128)
        except OSError as error:
            raise TransferError(f"no notices can be taken at {host}: {error}") from error
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._commands.wake_fd, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._mover: Mover  # made by the thread
        started: Future[Mover] = Future()
        self._thread = threading.Thread(target=self._run, args=(make_mover, started), name="pdjax-courier", daemon=True)
        self._thread.start()
        try:
            self._mover = started.result(SET_UP_BOUND)
        except FutureTimeout as error:
            raise TransferError(f"the backend has not started within {SET_UP_BOUND:.0f} s") from error
        self.name = self._commands.owner = self._mover.name
        self.summary = f"{self._mover.path()}, notices over tcp at {host}; host memory"

    def register(self, region: int, address: int, nbytes: int) -> None:
        """Make memory a source of writes. Raises `TransferError`."""
        self._commands.call(lambda: self._register(region, address, nbytes))

    def register_device_memory(self, region: int, address: int, nbytes: int, *, writable: bool = False) -> None:
        """See `TransferBackend`."""
        raise TransferError(f"{self.name} moves the host's memory only")

    def allocate(self, region: int, nbytes: int) -> int:
        """Allocate zeroed memory that peers may write into. Returns its address. Raises `TransferError`."""
        check_region(region, nbytes, region in self._regions)
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
        address = addressof(c_char.from_buffer(memory))
        self._commands.call(lambda: self._register(region, address, nbytes))
        self._memory[region] = memory
        return address

    def describe(self) -> bytes:
        """What a peer needs to `connect`. Raises `TransferError`."""
        regions = {region: self._regions[region] for region in self._memory}
        mover, port = self._commands.call(self._mover.describe), self._listener.getsockname()[1]
        return channel.encode(Described(channel.VERSION, self.name, self._host, port, self._token, regions, mover))

    def connect(self, peer: str, description: bytes) -> None:
        """Open the path to a described peer. Raises `TransferError`."""
        described = channel.decode(description, self.name)
        connection = channel.call_on(described)
        try:
            self._commands.call(lambda: self._welcome(Outgoing(peer, connection, described.regions), described.mover))
        except TransferError:
            connection.close()
            raise

    def disconnect(self, peer: str) -> None:
        """Close the path; its open writes fail. An unknown peer is ignored."""
        self._commands.post(lambda: self._end(peer, "the peer was disconnected"))

    def write(self, write: Write) -> None:
        """Start a write; its end is an event."""
        self._commands.post(lambda: self._start(write))

    def mapped(self, peer: str, region: int, offset: int, nbytes: int) -> AbstractContextManager[int | None]:
        """Nowhere: see `TransferBackend`."""
        return nullcontext()

    def drain(self, id: int) -> None:
        """Report `Drained` once nothing of peers that are gone can land any more."""
        self._commands.post(lambda: self._start_drain(id))

    def cut_off(self, descriptions: Sequence[bytes]) -> None:
        """Not possible: whose the library's connections are is not known here."""
        if descriptions:
            raise TransferError(f"{self.name} cannot refuse what a peer sends that is out of reach")

    def path(self, peer: str) -> str:
        """In words."""
        return self._mover.path() if peer in self._peers else "not connected"

    def close(self) -> None:
        """Fail what is open, close everything. What was allocated stays until the backend is gone. Idempotent."""
        self._closing = True
        self._commands.post(lambda: None)
        self._thread.join(_CLOSE_BOUND)

    # Everything below runs on the thread

    def _run(self, make_mover: Callable[[], Mover], started: Future[Mover]) -> None:
        try:
            self._mover = make_mover()
        except BaseException as error:  # noqa: BLE001 - it is raised to whoever made the backend
            self._listener.close()
            started.set_exception(error)
            return
        started.set_result(self._mover)
        reason = f"the {self._mover.name} backend is closed"
        try:
            while not self._closing:
                self._turn()
        except Exception as error:  # noqa: BLE001 - whatever it is, nobody may wait for a write for ever
            traceback.print_exc()
            reason = f"the {self._mover.name} thread has failed: {error!r}"
        self._commands.rest(reason)
        for name in list(self._peers):
            self._end(name, reason)
        for connection in self._incoming:
            connection.close()
        self._listener.close()
        self._selector.close()
        self._mover.close()

    def _turn(self) -> None:
        """One round over everything, and a pause if nothing happened."""
        happened = self._commands.run()
        now = time.monotonic()
        for peer in list(self._peers.values()):
            if peer.open or peer.waiting:
                happened |= self._serve(peer, now)
        for drain in [drain for drain in self._drains if now >= drain.until]:
            self._drains.remove(drain)
            self._on_event(Drained(drain.id))
        if self._drains or any(incoming.begun for incoming in self._incoming.values()):
            self._mover.progress()
        self._quiet = 0 if happened else self._quiet + 1
        for key, mask in self._selector.select(0.0 if happened else self._pause(now)):
            self._quiet = 0
            if key.fileobj == self._commands.wake_fd:
                os.eventfd_read(self._commands.wake_fd)
            elif key.fileobj is self._listener:
                self._accept()
            elif isinstance(key.data, str):
                self._attend(key.data, mask)
            elif isinstance(key.fileobj, socket.socket):
                self._receive(key.fileobj)

    def _pause(self, now: float) -> float | None:
        """Seconds to sleep in the selector; None at rest. While bytes move, this asks for them, ever less often."""
        moving = any(item.leaves_at is None for peer in self._peers.values() for item in peer.open)
        if moving or any(incoming.begun for incoming in self._incoming.values()):
            if self._quiet > _EAGER_ROUNDS:  # a selector's own pauses are no shorter than a millisecond
                time.sleep(next((pause for rounds, pause in _PAUSES if self._quiet < rounds), _LONG_PAUSE))
            return 0.0
        if self._drains:
            return _DRAIN_PAUSE
        deadlines = [write.deadline for peer in self._peers.values() for write in peer.writes]
        return max(min(deadlines) - now, 0.001) if deadlines else None

    def _register(self, region: int, address: int, nbytes: int) -> None:
        check_region(region, nbytes, region in self._regions)
        self._mover.register(address, nbytes)
        self._regions[region] = (address, nbytes)

    def _welcome(self, peer: Outgoing, description: bytes) -> None:
        if peer.name in self._peers:
            raise TransferError(f"a peer named {peer.name!r} is connected already")
        self._mover.connect(peer.name, description)
        self._peers[peer.name] = peer
        self._selector.register(peer.connection, selectors.EVENT_READ, peer.name)

    def _start_drain(self, id: int) -> None:
        if self._commands.dead is not None:
            self._on_event(Drained(id))  # nothing lands any more
        else:
            self._drains.append(_Drain(id, time.monotonic() + self._mover.dry_s))

    def _start(self, write: Write) -> None:
        peer = self._peers.get(write.peer)
        if self._commands.dead is not None:
            problem = self._commands.dead
        elif peer is None:
            problem = f"no peer named {write.peer!r} is connected"
        else:
            _, source = self._regions.get(write.region, (0, None))
            _, target = peer.regions.get(write.peer_region, (0, None))
            problem = problem_with(write, source, target)
            if problem is None:
                peer.waiting.append(write)
                return
        self._on_event(WriteFailed(write.id, problem))

    def _serve(self, peer: Outgoing, now: float) -> bool:
        """Take a peer's writes one step further. Returns whether anything happened."""
        late = next((write for write in peer.writes if now > write.deadline), None)
        if late is not None:
            self._lose(peer, f"write {late.id} of {late.nbytes} bytes was not done by its deadline")
            return True
        happened = False
        try:
            while peer.waiting and len(peer.open) < _MAX_OPEN:
                peer.open.append(Open(peer.waiting.popleft()))
                self._move(peer, peer.open[-1])
                happened = True
            for item in peer.open:
                if item.leaves_at is None and self._has_landed(item):
                    item.leaves_at = peer.queue(NOTICE, item.write.notice)
                    happened = True
            sent = peer.send()
        except (OSError, TransferError) as error:
            self._lose(peer, str(error))
            return True
        for item in [item for item in peer.open if item.leaves_at is not None and item.leaves_at <= sent]:
            peer.open.remove(item)
            self._on_event(WriteDone(item.write.id))
            happened = True
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.full else 0)
        if self._selector.get_key(peer.connection).events != events:
            self._selector.modify(peer.connection, events, peer.name)
        return happened

    def _move(self, peer: Outgoing, item: Open) -> None:
        write = item.write
        if self._mover.receives:
            peer.queue(BEGUN)
            peer.send()  # before the mover moves: it may block while it copies
        if not write.nbytes:
            return
        source, target = self._regions[write.region][0], peer.regions[write.peer_region][0]
        item.handle = self._mover.move(peer.name, source + write.offset, target + write.peer_offset, write.nbytes)

    def _has_landed(self, item: Open) -> bool:
        if item.handle is None:
            return True
        outcome = self._mover.outcome(item.handle)
        if outcome is None:
            return False
        item.handle = None
        if outcome:
            raise TransferError(outcome)
        return True

    def _attend(self, name: str, mask: int) -> None:
        """Send what waits, and notice the end of a peer."""
        peer = self._peers.get(name)
        if peer is None:
            return
        try:
            if mask & selectors.EVENT_READ:
                peer.check_end()
        except OSError as error:
            self._lose(peer, str(error))

    def _lose(self, peer: Outgoing, cause: str) -> None:
        self._end(peer.name, cause)
        self._on_event(PeerLost(peer.name, cause))

    def _end(self, name: str, cause: str) -> None:
        peer = self._peers.pop(name, None)
        if peer is None:
            return
        self._selector.unregister(peer.connection)
        peer.connection.close()
        for item in peer.open:
            if item.handle is not None:
                self._mover.abandon(item.handle)
        self._mover.disconnect(name)
        for write in peer.writes:
            self._on_event(WriteFailed(write.id, cause))

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return  # it has gone again before we looked
        connection.setblocking(False)
        self._incoming[connection] = Incoming()
        self._selector.register(connection, selectors.EVENT_READ)

    def _receive(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        notices = self._incoming[connection].take(data, self._token) if data else None
        if notices is None:
            del self._incoming[connection]
            self._selector.unregister(connection)
            connection.close()
            return
        for payload in notices:
            self._on_event(Notice(payload))
