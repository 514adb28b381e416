"""One link: a joined communicator that carries the messages, and the TCP connection that made it and stays open.

A message is one MPI send; a byte on the TCP connection rings for it at the other side, which sleeps on that socket and
not inside MPI, whose waits spin. The receiver answers each message with a byte, so the sender knows for how long it
has to keep MPI going; the byte may wait a moment for a message that goes the same way, which saves both sides a wake-up
each. The connection's end tells the death of the peer at once, which MPI would not.

A link that is given up may have messages on their way, and MPI tells messages apart by the number of their
communicator, which it gives to another one once this is freed. So what a peer sent before it died, or before it heard
of the end, may come out of the next link, whoever is at its other side. Therefore a stamp that no other link has goes
before each message, and what has another one is dropped: nobody has rung for it here.

Everything here runs on the one thread that calls MPI, and nothing waits.
"""

from __future__ import annotations

import socket
from collections import deque
from dataclasses import dataclass
from typing import Any

from pdjax.net import mpi
from pdjax.net.handshake import Peer

MAX_BODY = 4 << 20  # bytes of one message
WINDOW = 32  # messages under way at a time
_MAX_QUEUED = 64 << 20  # bytes that wait for a peer before it counts as stuck
_RECEIVE_BOUND = 10.0  # seconds from a peer's ring to its message
_ANSWER_BOUND = 20.0  # seconds in which a peer must have taken a message
_LINGER = 2.0  # seconds that a link being closed waits for its messages to be taken
RING, TAKEN, CLOSING = b"m", b"t", b"c"
_TAKEN_DELAY = 1e-3  # seconds that the word of a message taken may wait for company
_MAX_OWED = WINDOW // 4  # such words that may wait

# MPI may still read or write these: sends and receives of links that have broken. They cannot be taken back.
_abandoned: list[Any] = []


class LinkBroken(Exception):
    """The link has ended; the sentence says why. `gone`: the peer's process has ended, without doubt."""

    gone = False


@dataclass
class _Transfer:
    """An MPI send or receive under way, with its memory."""

    request: Any
    body: bytes | bytearray


class Link:
    """See the module's docstring. `now` is always `time.monotonic`."""

    _read_bytes = 4096  # at a time, from the connection

    def __init__(
        self, name: str, peer: Peer, communicator: Any, connection: socket.socket, *, incoming: bool, now: float
    ) -> None:
        self.name = name
        self.peer = peer.id  # of its process
        self.host: str = connection.getpeername()[0]
        self.unreachable = False  # the host does not answer any more
        self.incoming = incoming
        self.connection = connection
        self.hello_deadline: float | None = now + _RECEIVE_BOUND
        self._mpi = mpi.load()
        self._communicator = communicator
        self._stamp = peer.stamp
        self._outbox: deque[bytes] = deque()
        self._queued = 0  # bytes in the outbox
        self._sends: deque[_Transfer] = deque()
        self._receive: _Transfer | None = None
        self._rings = b""  # what the socket has not taken yet
        self._due = 0  # messages that have been rung for
        self._due_since = now
        self._owed = 0  # messages that we have taken and not yet said so
        self._untaken = 0  # messages of ours that the peer has not taken
        self._taken_at = now
        self.say_taken_at: float | None = None
        self._ended = False
        self._peer_closing = False
        self._close_deadline: float | None = None

    @property
    def active(self) -> bool:
        """Whether MPI must be kept going for this link."""
        return bool(self.urgent or self._untaken or self._close_deadline is not None)

    @property
    def urgent(self) -> bool:
        """Whether a message is under way inside MPI, and comes or goes with the next calls."""
        return bool(self._outbox or self._sends or self._due)

    @property
    def unsettled(self) -> bool:
        """Whether messages may be under way inside MPI, in either direction, or MPI's own connection may be broken."""
        return bool(self.unreachable or self._untaken or self._due or self._sends or self._receive is not None)

    @property
    def wants_to_write(self) -> bool:
        """Whether the connection was full."""
        return bool(self._rings)

    def send(self, body: bytes) -> None:
        """Queue a message. It leaves with `progress`."""
        self._outbox.append(body)
        self._queued += len(body)

    def close(self, now: float) -> None:
        """End the link once what was sent has been taken, or after a short while."""
        if self._close_deadline is None:
            self._close_deadline = now + _LINGER

    def read(self, now: float) -> bool:
        """Take in what has come over the connection. Returns whether there may be more."""
        try:
            data = self.connection.recv(self._read_bytes)
        except BlockingIOError:
            return False
        except OSError as error:
            self.unreachable |= isinstance(error, TimeoutError)
            data = b""
        if not data:
            self._ended = True
        self._hear(data, now)
        return bool(data)

    def _hear(self, data: bytes, now: float) -> None:
        """Take in words of the peer."""
        if not self._due and RING in data:
            self._due_since = now
        self._due += data.count(RING)
        taken = data.count(TAKEN)
        if taken:
            self._untaken -= taken
            self._taken_at = now
        self._peer_closing |= CLOSING in data

    def progress(self, now: float) -> list[bytes]:
        """Move everything that can move. Returns the messages that have arrived, in order.

        Raises:
            LinkBroken: the link has ended, by either side's wish or by a failure, and nothing more has arrived.
        """
        try:
            self._start_sends(now)
            while self._sends and self._sends[0].request.Test():
                self._sends.popleft()
            arrived = self._receive_due(now)
            if self._untaken and not self._sends and not arrived:
                self._poke()
        except self._mpi.Exception as error:
            raise LinkBroken(f"MPI failed: {error}") from error
        if self.say_taken_at is not None and now >= self.say_taken_at:
            self._say_taken()
        self._flush_rings()
        if not arrived:
            self._check_end(now)
        return arrived

    def say_closing(self) -> None:
        """Tell the peer that the link is given up, so that it does not take its end for this side's death."""
        self._rings += CLOSING
        self._flush_rings()

    def release(self) -> None:
        """Let go of connection and communicator. MPI's Disconnect is never called: it would wait for a dead peer."""
        self.connection.close()
        unfinished = [*self._sends, *([self._receive] if self._receive is not None else [])]
        _abandoned.extend(unfinished)
        if unfinished or (self._ended and not self._peer_closing):
            mpi.note_lost_peer()
        if unfinished:
            return
        try:
            self._communicator.Free()
        except self._mpi.Exception:
            _abandoned.append(self._communicator)  # a message has come that nobody will take: MPI keeps both

    def _start_sends(self, now: float) -> None:
        going = min(len(self._outbox), WINDOW - len(self._sends))
        if not going:
            return
        # The bell first: the peer takes about as long to wake up as MPI does to send.
        self._rings += RING * going
        self._say_taken()
        self._flush_rings()
        if not self._untaken:
            self._taken_at = now
        for _ in range(going):
            if not self._peer_lives(now):
                return
            body = self._outbox.popleft()
            self._queued -= len(body)
            stamped = self._stamp + body
            request = self._communicator.Isend([stamped, self._mpi.BYTE], 0, 0)
            self._sends.append(_Transfer(request, stamped))
            self._untaken += 1

    def _poke(self) -> None:
        """What MPI calls sent may still lie in its buffers, and moves only while MPI is called."""
        self._communicator.Iprobe(0, 0)

    def _peer_lives(self, now: float) -> bool:
        """MPI must not be asked to send to a peer whose death it has seen: MPICH over UCX crashes then. Our connection
        to that peer ends at the same time as MPI's, so a look at it first is enough."""
        while self.read(now):
            continue
        return not self._ended

    def _receive_due(self, now: float) -> list[bytes]:
        arrived: list[bytes] = []
        while self._due:
            if self._receive is None:
                self._receive = self._match()
            if self._receive is None or not self._receive.request.Test():
                break
            body, self._receive = bytes(self._receive.body), None
            if not body.startswith(self._stamp):
                continue
            arrived.append(body.removeprefix(self._stamp))
            self._due -= 1
            self._due_since = now
        self._take(len(arrived), now)
        return arrived

    def _take(self, messages: int, now: float) -> None:
        """So many are taken, which is said soon."""
        self._owed += messages
        if messages and self.say_taken_at is None:
            self.say_taken_at = now + _TAKEN_DELAY
        if self._owed > _MAX_OWED:
            self._say_taken()

    def _say_taken(self) -> None:
        self._rings += TAKEN * self._owed
        self._owed = 0
        self.say_taken_at = None

    def _match(self) -> _Transfer | None:
        status = self._mpi.Status()
        message = self._communicator.Improbe(0, 0, status)
        if message is None:
            return None
        size = status.Get_count(self._mpi.BYTE)
        if size > len(self._stamp) + MAX_BODY:
            raise LinkBroken(f"the peer sent a message of {size} bytes; at most {MAX_BODY} are taken")
        body = bytearray(size)
        return _Transfer(message.Irecv([body, self._mpi.BYTE]), body)

    def _flush_rings(self) -> None:
        if not self._rings or self._ended:
            return
        try:
            sent = self.connection.send(self._rings)
        except BlockingIOError:
            return
        except OSError:
            self._ended = True
            return
        self._rings = self._rings[sent:]

    def _check_end(self, now: float) -> None:
        if self._peer_closing and not self._due:
            raise LinkBroken("closed by the peer")
        if self._ended:
            ending = LinkBroken("the connection ended: the peer has died")
            # A peer that gives a link up says so, and a host that has vanished is only out of reach.
            ending.gone = not (self._peer_closing or self.unreachable)
            raise ending
        if self._close_deadline is not None:
            settled = not (self._outbox or self._sends or self._untaken or self._rings)
            if settled or now > self._close_deadline:
                self._say_taken()
                self._rings += CLOSING
                self._flush_rings()
                raise LinkBroken("closed")
        if self._due and now - self._due_since > _RECEIVE_BOUND:
            raise LinkBroken(f"the peer announced a message that did not come within {_RECEIVE_BOUND:.0f} s")
        if self._untaken and now - self._taken_at > _ANSWER_BOUND:
            raise LinkBroken(f"the peer has taken no message for {_ANSWER_BOUND:.0f} s")
        if self._untaken < 0:
            raise LinkBroken("the peer says it has taken more messages than it was sent")
        if self._queued > _MAX_QUEUED:
            raise LinkBroken(f"{self._queued} bytes are waiting: the peer takes too little")
        if self.hello_deadline is not None and now > self.hello_deadline:
            raise LinkBroken("the peer did not say hello after the join")
