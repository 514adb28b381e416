"""Links to other instances' leaders, made and ended while everything runs.

All MPI calls happen on the network's one thread, which sleeps on its sockets. Handshakes and name look-ups, which
wait for others, have short-lived threads of their own; those hand a connection over when both sides are at the join.
"""

from __future__ import annotations

import errno
import os
import secrets
import selectors
import socket
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from pdjax.net import handshake, mpi
from pdjax.net.events import Frame, LinkDown, LinkFailed, LinkUp, NetEvent
from pdjax.net.handshake import NotAPeer, Peer, Refused, Wire
from pdjax.net.link import MAX_BODY, Link, LinkBroken
from pdjax.net.plain_link import PlainLink
from pdjax.net.tcp import prepare_tcp

_HANDSHAKE_BOUND = 5.0  # seconds for a stranger to show who it is
_MAX_PATIENCE = 30.0  # seconds that an accepted peer may wait for its turn
_JOIN_BOUND = 15.0  # seconds for MPI's join, which takes 2 to 30 ms; twice that, and MPI is given up
_MAX_HANDSHAKES = 64
_STOP_BOUND = 5.0
_SILENT_SECONDS = 1.0  # a host that has not taken a connection for so long is out of reach, or all but
_NO_HOST = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ETIMEDOUT)
# MPICH 5.0 over UCX's tcp crashes at about the 125th join of the same two processes.
_MAX_JOINS_OF_A_PAIR = 100


@dataclass
class _Join:
    """A connection whose two sides have agreed to join."""

    link: str
    peer: Peer
    connection: socket.socket
    plain: bool  # without MPI
    incoming: bool
    owner: object
    done: threading.Event = field(default_factory=threading.Event)
    error: str | None = None


class Network:
    """`on_event` is called on the network's thread, or on a handshake's, and must only hand the event on.

    After `close(link)` no event of that link is handed on any more, and its name may be used again; those that wait
    somewhere to be looked at look like the next link's then. Methods may be called from any thread and return at once,
    but for `stop`. Create it after everything else that uses MPI at start.
    """

    def __init__(self, on_event: Callable[[NetEvent], None], *, secret: bytes | None) -> None:
        self._mpi = mpi.load()
        self._on_event = on_event
        self._secret = secret
        self._id = secrets.token_bytes(16)
        self._hello = b""
        self._lock = threading.Lock()
        self._owners: dict[str, object] = {}  # who may speak for a link's name: an attempt, then its Link
        self._joins: Counter[bytes] = Counter()
        self._without_mpi: set[bytes] = set()  # ids of processes with which links are not to use MPI any more
        self._peer_of: dict[str, bytes] = {}  # the process that was last reached, by link
        self._handshakes = 0
        self._incoming = 0
        self._turn = threading.Lock()  # held while this process is set aside for one join
        self._links: list[Link] = []
        self._by_name: dict[str, Link] = {}
        self._commands: deque[Callable[[], None]] = deque()
        self._listener: socket.socket | None = None
        self._stopping_until: float | None = None
        self.failure: str | None = None  # why no link works any more
        self._woken = False  # a wake-up is on its way: what is posted now will be seen
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_fd, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._run, name="pdjax-network", daemon=True)
        self._thread.start()

    def set_hello(self, hello: bytes) -> None:
        """What every peer is told first: set it before links are made."""
        self._hello = hello

    def listen(self, host: str, port: int) -> int:
        """Take links at this address; port 0 picks one. Returns the port. Raises `OSError`."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=512)
        listener.setblocking(False)
        actual = listener.getsockname()[1]
        self._post(lambda: self._start_listening(listener))
        return actual

    def connect(self, link: str, host: str, port: int, timeout: float) -> None:
        """Open a link under a name of the caller's: ends in `LinkUp` or `LinkFailed` within `timeout` seconds or so.

        Raises:
            ValueError: a link of that name exists.
        """
        owner = object()
        with self._lock:
            if link in self._owners:
                raise ValueError(f"a link named {link!r} exists already")
            self._owners[link] = owner
        deadline = time.monotonic() + timeout
        self._spawn(lambda: self._reach(link, owner, host, port, deadline))

    def send(self, link: str, body: bytes) -> None:
        """Send a message, at most `MAX_BODY` bytes. Messages of a link that is not up are dropped: an event says so.

        Raises:
            ValueError: the message is too long.
        """
        if len(body) > MAX_BODY:
            raise ValueError(f"a message of {len(body)} bytes is over the limit of {MAX_BODY}")
        self._post(lambda: self._send(link, body))

    def close(self, link: str) -> None:
        """End a link, or an attempt at one, after what was sent has left. Unknown names are ignored."""
        with self._lock:
            if self._owners.pop(link, None) is None:
                return
        self._post(lambda: self._close(link))

    def stop(self) -> None:
        """Close all links and end the thread, within a few seconds. Idempotent."""
        with self._lock:
            self._owners.clear()
        self._post(self._start_stopping)
        self._thread.join(_STOP_BOUND)

    # Handshakes, each in a thread of its own

    def _spawn(self, work: Callable[[], None]) -> None:
        threading.Thread(target=work, name="pdjax-handshake", daemon=True).start()

    def _reach(self, link: str, owner: object, host: str, port: int, deadline: float) -> None:
        connection, gone, unreachable = None, False, False
        began = time.monotonic()
        try:
            connection = socket.create_connection((host, port), timeout=max(deadline - time.monotonic(), 0.01))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else two words in a row cost 40 ms
            wire = Wire(connection, deadline)
            peer = handshake.introduce(wire, self._id, self._secret, deadline - time.monotonic())
            plain = self._take_turns(wire, peer.id)
            with self._lock:
                self._peer_of[link] = peer.id
            reason = self._join_and_watch(_Join(link, peer, connection, plain, incoming=False, owner=owner))
        except Refused as refusal:
            reason = f"it refused: {refusal}"
        except NotAPeer as stranger:
            reason = f"what listens there is no instance: {stranger}"
        except OSError as error:
            reason = str(error)
            gone = connection is None and isinstance(error, ConnectionRefusedError)
            silent = isinstance(error, TimeoutError) and time.monotonic() - began >= _SILENT_SECONDS
            unreachable = connection is None and (silent or error.errno in _NO_HOST)
            if unreachable:
                self._lose_host(link, host)
        if reason is not None:
            if connection is not None:
                connection.close()
            self._fail(link, owner, f"{host}:{port}: {reason}", gone=gone, unreachable=unreachable)

    def _admit(self, connection: socket.socket) -> None:
        wire = Wire(connection, time.monotonic() + _HANDSHAKE_BOUND)
        try:
            if self._secret is None and not handshake.of_this_host(connection):
                handshake.refuse(wire, "without a shared secret, only peers of its own host are taken: set one on both")
                raise Refused("a stranger from another host")
            peer = handshake.admit(wire, self._id, self._secret, _MAX_PATIENCE)
            wire.deadline = time.monotonic() + min(max(peer.patience, 0.0), _MAX_PATIENCE)
            plain = self._take_turns(wire, peer.id)
            with self._lock:
                self._incoming += 1
                link = f"in-{self._incoming}-{peer.id.hex()[:8]}"
                owner = self._owners[link] = object()
            reason = self._join_and_watch(_Join(link, peer, connection, plain, incoming=True, owner=owner))
            if reason is not None:
                connection.close()
                self._fail(link, owner, None)
        except (Refused, NotAPeer, OSError):
            connection.close()  # whoever asked has been told, or is no instance
        finally:
            with self._lock:
                self._handshakes -= 1

    def _take_turns(self, wire: Wire, peer_id: bytes) -> bool:
        """Agree with a peer on a link. Returns whether it is to do without MPI. Raises as `handshake.take_turns`."""
        if self.failure is not None:
            handshake.refuse(wire, self.failure)
            raise Refused(self.failure)
        with self._lock:
            plain = peer_id in self._without_mpi or self._joins[peer_id] >= _MAX_JOINS_OF_A_PAIR
        plain = handshake.take_turns(wire, self._id, peer_id, self._turn, plain=plain)
        if not plain:
            with self._lock:
                self._joins[peer_id] += 1
        return plain

    def _lose_host(self, link: str, host: str) -> None:
        """A host does not answer: MPI's connections with its processes are dead, or will be."""
        try:
            addresses = {each[4][0] for each in socket.getaddrinfo(host, None)}
        except OSError:
            addresses = {host}
        with self._lock:
            if link in self._peer_of:
                self._without_mpi.add(self._peer_of[link])
            for other in list(self._links):
                if other.host in addresses:
                    other.unreachable = True
                    self._without_mpi.add(other.peer)

    def _join_and_watch(self, join: _Join) -> str | None:
        """Hand a connection to the MPI thread and wait for the join, with a bound. Returns what went wrong."""
        self._post(lambda: self._join(join))
        if join.done.wait(_JOIN_BOUND):
            return join.error
        join.connection.shutdown(socket.SHUT_RDWR)  # wakes a join that waits for the peer's words
        if join.done.wait(_JOIN_BOUND):
            return join.error or "the join took too long"
        self._give_up(f"MPI's join with a peer has not returned for {2 * _JOIN_BOUND:.0f} s: restart this instance")
        return self.failure

    def _fail(
        self, link: str, owner: object, reason: str | None, *, gone: bool = False, unreachable: bool = False
    ) -> None:
        """An attempt has failed: tell, unless nobody wants it any more or nobody knew of it."""
        with self._lock:
            if self._owners.get(link) is not owner:
                return
            del self._owners[link]
        if reason is not None:
            self._on_event(LinkFailed(link, reason, gone, unreachable))

    def _give_up(self, reason: str) -> None:
        self.failure = reason
        with self._lock:
            names = [name for name, owner in self._owners.items() if isinstance(owner, Link)]
            for name in names:
                del self._owners[name]
        for name in names:
            self._on_event(LinkDown(name, reason))

    # The MPI thread

    def _post(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        if not self._woken:
            self._woken = True
            os.eventfd_write(self._wake_fd, 1)

    def _run(self) -> None:
        try:
            self._loop()
        except Exception as error:  # noqa: BLE001 - whatever it is, those who wait for links must hear of it
            traceback.print_exc()
            self._give_up(f"the network thread has failed: {error!r}")

    def _loop(self) -> None:
        quiet_rounds = 0
        while True:
            moved = False
            while self._commands:
                self._commands.popleft()()
                moved = True
            now = time.monotonic()
            for link in list(self._links):
                moved |= self._progress(link, now)
            if self._stopping_until is not None and (not self._links or now > self._stopping_until):
                break
            quiet_rounds = 0 if moved else quiet_rounds + 1
            for key, mask in self._selector.select(self._pause(quiet_rounds, now)):
                quiet_rounds = 0
                if key.fileobj == self._wake_fd:
                    os.eventfd_read(self._wake_fd)
                    self._woken = False  # before the commands are looked at
                elif key.fileobj is self._listener:
                    self._accept()
                elif mask & selectors.EVENT_READ:
                    key.data.read(time.monotonic())
        for link in self._links:
            link.release()
        if self._listener is not None:
            self._listener.close()
        self._selector.close()

    def _pause(self, quiet_rounds: int, now: float) -> float | None:
        """Seconds to sleep at most; None at rest. MPI moves only while it is called, so links with messages inside MPI
        are polled, ever less often; those that only wait for the peer's word are woken by it."""
        if any(link.urgent for link in self._links):
            if quiet_rounds < 20:
                return 0.0
            time.sleep(50e-6)
            return 0.0 if quiet_rounds < 100 else 1e-3 if quiet_rounds < 1000 else 5e-3
        due = [at for link in self._links for at in (link.hello_deadline, link.say_taken_at) if at is not None]
        if any(link.active for link in self._links):
            due.append(now + (1e-3 if quiet_rounds < 100 else 5e-3))
        return max(min(due) - now, 1e-3) if due else None

    def _start_listening(self, listener: socket.socket) -> None:
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
        self._listener = listener
        self._selector.register(listener, selectors.EVENT_READ, None)

    def _accept(self) -> None:
        assert self._listener is not None, "only a listener is accepted from"
        try:
            connection, _ = self._listener.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:
            return  # it has gone again before we looked
        with self._lock:
            if self._handshakes >= _MAX_HANDSHAKES:
                connection.close()
                return
            self._handshakes += 1
        self._spawn(lambda: self._admit(connection))

    def _join(self, join: _Join) -> None:
        try:
            if self._stopping_until is not None:
                join.error = "the instance is stopping"
                return
            join.connection.setblocking(True)
            communicator = None
            if not join.plain:
                communicator = self._mpi.Comm.Join(join.connection.fileno())
                communicator.Set_errhandler(self._mpi.ERRORS_RETURN)
            _prepare(join.connection)
        except (self._mpi.Exception, OSError) as error:
            join.error = f"the join failed: {error}"
            return
        finally:
            self._turn.release()
            join.done.set()
        now = time.monotonic()
        if communicator is None:
            link = PlainLink(join.link, join.peer, join.connection, incoming=join.incoming, now=now)
        else:
            link = Link(join.link, join.peer, communicator, join.connection, incoming=join.incoming, now=now)
        with self._lock:
            wanted = self._owners.get(join.link) is join.owner
            if wanted:
                self._owners[join.link] = link
        self._links.append(link)
        self._selector.register(join.connection, selectors.EVENT_READ, link)
        if wanted:
            self._by_name[join.link] = link
            link.send(self._hello)
        else:
            link.close(now)

    def _send(self, name: str, body: bytes) -> None:
        link = self._by_name.get(name)
        if link is not None and link.hello_deadline is None:
            link.send(body)

    def _close(self, name: str) -> None:
        link = self._by_name.pop(name, None)
        if link is not None:
            link.close(time.monotonic())

    def _start_stopping(self) -> None:
        now = time.monotonic()
        self._stopping_until = now + _STOP_BOUND / 2
        self._by_name.clear()
        for link in self._links:
            link.close(now)

    def _progress(self, link: Link, now: float) -> bool:
        """Move a link's messages. Returns whether anything arrived or ended."""
        try:
            arrived = link.progress(now)
        except LinkBroken as ending:
            self._drop(link, str(ending), ending.gone)
            return True
        for body in arrived:
            if link.hello_deadline is not None:
                link.hello_deadline = None
                self._tell(link, LinkUp(link.name, body, link.incoming))
            else:
                self._tell(link, Frame(link.name, body))
        if link.wants_to_write:
            self._selector.modify(link.connection, selectors.EVENT_READ | selectors.EVENT_WRITE, link)
        elif self._selector.get_key(link.connection).events != selectors.EVENT_READ:
            self._selector.modify(link.connection, selectors.EVENT_READ, link)
        return bool(arrived)

    def _tell(self, link: Link, event: NetEvent) -> None:
        if self._owners.get(link.name) is link:
            self._on_event(event)

    def _drop(self, link: Link, reason: str, gone: bool) -> None:
        if not gone:
            link.say_closing()
        self._selector.unregister(link.connection)
        self._links.remove(link)
        if self._by_name.get(link.name) is link:
            del self._by_name[link.name]
        link.release()
        with self._lock:
            if link.unsettled:
                self._without_mpi.add(link.peer)
            if self._owners.get(link.name) is not link:
                return
            del self._owners[link.name]
        if link.hello_deadline is None:
            self._on_event(LinkDown(link.name, reason, gone))
        elif not link.incoming:
            self._on_event(LinkFailed(link.name, reason))


def _prepare(connection: socket.socket) -> None:
    """Nothing blocks, and a host that has vanished is noticed within about 15 s."""
    connection.setblocking(False)
    prepare_tcp(connection, idle=5, interval=3, unacknowledged=15)
